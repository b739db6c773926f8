"""Test that adopted models equal models that were written with our classes, bit for bit."""

from types import ModuleType
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as fnn
from flax import nnx as fnx

import jaxnorm as jn
from jaxnorm.linen.adoption import OURS as LINEN
from jaxnorm.nnx.adoption import OURS as NNX

# far from 0, where Flax's variance loses its digits, so that the two ways differ
X = (np.random.default_rng(0).standard_normal((4, 6, 8)) + 300).astype(np.float32)
KEY = jax.random.key(0)
pytestmark = pytest.mark.usefixtures("ordinary_promotion")


class Zoo(fnn.Module):
    """Every norm of a library, with options that are not the defaults."""

    lib: Any

    @fnn.compact
    def __call__(self, x, train: bool = True):
        lib, mask = self.lib, jnp.broadcast_to(jnp.arange(6)[:, None] < 5, x.shape)
        x = x + lib.LayerNorm(epsilon=1e-3, use_bias=False, scale_init=fnn.initializers.normal())(x)
        x = x + lib.RMSNorm(reduction_axes=(1, 2), feature_axes=(1, 2), name="rms")(x)
        x = x + lib.GroupNorm(num_groups=None, group_size=2)(x, mask=mask)
        x = x + lib.InstanceNorm(dtype=jnp.bfloat16)(x).astype(jnp.float32)
        x = x + lib.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        x = x + lib.WeightNorm(fnn.Dense(8), epsilon=1e-6)(x)
        x = x + lib.SpectralNorm(fnn.Dense(8))(x, update_stats=train)
        return lib.LayerNorm(use_fast_variance=False)(x)


class Parts(fnn.Module):
    """Norms made in setup, shared, in a list, scanned, rematerialized, mapped and compiled."""

    lib: Any

    def setup(self):
        lib = self.lib

        class Block(fnn.Module):
            @fnn.compact
            def __call__(self, x, _):
                return x + fnn.Dense(8)(lib.LayerNorm()(x)), None

        self.shared = lib.LayerNorm()
        self.listed = [lib.RMSNorm(), lib.BatchNorm(use_running_average=False)]
        self.remat = fnn.remat(lib.GroupNorm)(num_groups=2)
        self.compiled = fnn.jit(lib.InstanceNorm)()
        self.mapped = fnn.vmap(
            lib.LayerNorm, variable_axes={"params": 0}, split_rngs={"params": True}
        )()
        self.scanned = fnn.scan(
            Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )()

    def __call__(self, x):
        x = self.shared(x) + 300
        for norm in (*self.listed, self.remat, self.compiled, self.mapped, self.shared):
            x = x + norm(x)
        return self.scanned(x, None)[0]


def applied(model, variables, x=X):
    """Output, state and gradients, by a program of its own."""

    def loss(params, x):
        y, state = model.apply({**variables, "params": params}, x, mutable=["batch_stats"])
        return (y**2).sum(), (y, state)

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(variables["params"], x)


def evaluated(model, variables):
    return jax.jit(lambda variables: model.apply(variables, X, train=False))(variables)


@pytest.mark.parametrize("made", [Zoo, Parts])
def test_linen_models_equal_models_of_our_classes(made):
    theirs, ours = made(fnn), made(jn.linen)
    start = jax.jit(theirs.init)  # has a program for each context
    variables = start(KEY, X)
    with jn.linen.adopted():
        chex.assert_trees_all_equal(start(KEY, X), variables)
        adopted = applied(theirs, variables)
    chex.assert_trees_all_equal(adopted, applied(ours, variables))
    (_, (y, _)), (_, (other, _)) = adopted, applied(theirs, variables)
    assert np.abs(y - other).max() > 1e-4


def test_evaluation_in_linen():
    variables = jax.jit(Zoo(fnn).init)(KEY, X)
    with jn.linen.adopted():
        y = evaluated(Zoo(fnn), variables)
    np.testing.assert_array_equal(y, evaluated(Zoo(jn.linen), variables))


def by(norm, **options):
    """Whether Flax's norm is adopted, told by what it makes of large numbers."""
    with jn.linen.adopted(**options):
        return ran(norm)


def ran(norm):
    x = jnp.array([[1e4, 1e4 + 1]])
    y, _ = jax.jit(norm.init_with_output)(KEY, x)
    return {1: "ours", 500: "Flax's"}[round(float(jnp.abs(y).max()))]


class Own(fnn.LayerNorm):
    """A user's subclass."""


class Wrapped(fnn.Module):
    @fnn.compact
    def __call__(self, x):
        return fnn.LayerNorm(name="norm")(x)


def test_which_norms_of_linen_stay():
    norm = fnn.LayerNorm()
    assert (by(norm), ran(norm)) == ("ours", "Flax's")
    assert by(Own()) == "Flax's"
    assert by(norm, without=fnn.RMSNorm) == by(norm, without=()) == "ours"
    for without in (fnn.LayerNorm, jn.linen.LayerNorm, [fnn.RMSNorm, fnn.LayerNorm]):
        assert by(norm, without=without) == "Flax's"
    for without in ("norm", "/norm/", lambda path, _: path == "norm", {"norm"}):
        assert by(Wrapped(), without=without) == "Flax's"
    assert by(Wrapped(), without=lambda _, module: isinstance(module, fnn.RMSNorm)) == "ours"
    with pytest.raises(TypeError, match=r"without must be a class, a path, .*: got 3\."):
        by(norm, without=[3])


def test_names_of_no_norm_are_warned_of():
    said = r"without must name norms of Flax's by .*: got 'norm2'; called were 'norm'\."
    for without in ("norm2", ["norm", "norm2"], (fnn.RMSNorm, "norm2")):
        with pytest.warns(UserWarning, match=said) as seen:
            by(Wrapped(), without=without)
        assert [warning.filename for warning in seen] == [__file__]
    with pytest.warns(UserWarning, match="got 'nor', 'orm'; called"):
        assert by(Wrapped(), without=("nor", "orm")) == "ours"
    # where all norms of the model are known it is an error
    with pytest.raises(ValueError, match="got 'head'; there are 'norm'"):
        jn.linen.compare(Wrapped(), None, X, rounds=1, float64=False, without="head")


def test_what_is_no_reason_to_warn():
    call = jax.jit(Wrapped().init_with_output)
    with jn.linen.adopted(without="nowhere"):
        pass  # nothing was called
    with jn.linen.adopted(without="nowhere"):
        fnn.Dense(2).init(KEY, X)  # no norm was
    with pytest.raises(TypeError, match="by position"), jn.linen.adopted(without="nowhere"):
        call(KEY, X) + jn.rms_norm(X, X)
    with jn.linen.adopted(without=("norm", fnn.RMSNorm, lambda path, _: False)):
        call(KEY, X)
    for _ in range(2):  # the program of the first context has the norm
        with jn.linen.adopted(without="norm"):
            call(KEY, X)
            fnn.LayerNorm().init(KEY, X)
    with jn.linen.adopted(without="nowhere"), jn.linen.adopted():
        Wrapped().init(KEY, X)  # the inner context decides


def test_the_inner_context_decides():
    norm = fnn.LayerNorm()
    with jn.linen.adopted():
        assert by(norm, without=fnn.LayerNorm) == "Flax's"
        assert ran(norm) == "ours"
    assert ran(norm) == "Flax's"


def test_one_compiled_function_has_a_program_for_each_context():
    norm, x, traces = fnn.LayerNorm(), jnp.array([[1e4, 1e4 + 1]]), []

    @jax.jit
    def call(variables):
        traces.append(1)
        return norm.apply(variables, x)

    variables = norm.init(KEY, x)
    before = call(variables)
    for _ in range(3):
        with jn.linen.adopted():
            assert call(variables)[0, 1] == pytest.approx(1, abs=1e-5)
        with jn.linen.adopted(without=[fnn.LayerNorm]):
            np.testing.assert_array_equal(call(variables), before)
        np.testing.assert_array_equal(call(variables), before)
    assert len(traces) <= 4  # one more where the context was made here
    assert jn.linen.adopted()(norm.apply)(variables, x)[0, 1] == pytest.approx(1, abs=1e-5)


def test_a_bound_norm_is_of_its_own_class_again():
    norm = fnn.LayerNorm()
    bound = norm.bind(norm.init(KEY, X))
    with jn.linen.adopted():
        np.testing.assert_array_equal(bound(X), jn.linen.LayerNorm().apply(norm.init(KEY, X), X))
        with pytest.raises(ValueError, match="mask"):
            bound(X, mask=np.ones((3, 3), bool))
        assert type(bound) is fnn.LayerNorm


def test_linen_sees_one_call_of_each_norm():
    variables = Wrapped().init(KEY, X)
    with jn.linen.adopted():
        _, state = Wrapped().apply(variables, X, capture_intermediates=True, mutable=True)
        shown = Wrapped().tabulate(KEY, X)
    assert len(state["intermediates"]["norm"]["__call__"]) == 1
    assert shown.count("LayerNorm") == 1
    seen = []

    def watch(run, given, named, context):
        seen.append(type(context.module))
        return run(*given, **named)

    with fnn.intercept_methods(watch), jn.linen.adopted():
        Wrapped().apply(variables, X)
    assert seen.count(fnn.LayerNorm) == 1


# nnx


class NnxBlock(fnx.Module):
    def __init__(self, lib, rngs):
        self.norm = lib.LayerNorm(8, epsilon=1e-3, rngs=rngs)
        self.dense = fnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return x + self.dense(self.norm(x))


class NnxZoo(fnx.Module):
    """Every norm that Flax has; a block that is shared; layers that are stacked and scanned."""

    def __init__(self, lib, rngs):
        options = [
            ("BatchNorm", (8,), {"momentum": 0.5}),
            ("RMSNorm", (8,), {"param_dtype": jnp.bfloat16}),
            ("GroupNorm", (8,), {"num_groups": 2}),
            ("InstanceNorm", (8,), {"use_scale": False}),
            ("WeightNorm", (fnx.Linear(8, 8, rngs=rngs),), {"epsilon": 1e-6}),
            ("SpectralNorm", (fnx.Linear(8, 8, rngs=rngs),), {}),
        ]
        for name, given, named in options:
            if hasattr(fnx, name):
                setattr(self, name, getattr(lib, name)(*given, **named, rngs=rngs))
        self.names = tuple(name for name, *_ in options if hasattr(fnx, name))
        self.block = self.again = NnxBlock(lib, rngs)
        make = fnx.vmap(lambda rngs: NnxBlock(lib, rngs), in_axes=0)
        self.layers = fnx.split_rngs(splits=2)(make)(rngs)

    def __call__(self, x):
        for name in (*self.names, "block", "again"):
            x = x + getattr(self, name)(x)
        return fnx.scan(lambda x, layer: layer(x), in_axes=(fnx.Carry, 0), out_axes=fnx.Carry)(
            x, self.layers
        )


def nnx_zoo(lib: ModuleType) -> NnxZoo:
    return NnxZoo(lib, fnx.Rngs(0))


@fnx.jit
def nnx_applied(model, x):
    def loss(model, x):
        y = model(x)
        return (y**2).sum(), y

    return fnx.grad(loss, has_aux=True)(model, x)


def test_nnx_models_equal_models_of_our_classes():
    theirs, ours = nnx_zoo(fnx), nnx_zoo(jn.nnx)
    before = fnx.clone(theirs)
    copied = jn.nnx.adopt(theirs, copy=True)
    chex.assert_trees_all_equal(fnx.state(theirs), fnx.state(before))
    assert fnx.graphdef(theirs) == fnx.graphdef(before)
    kept = theirs.block.norm.scale
    assert jn.nnx.adopt(theirs) is theirs
    assert theirs.block is theirs.again
    assert theirs.block.norm.scale is kept
    assert copied.block.norm.scale is not kept
    for model in (theirs, copied):
        assert fnx.graphdef(model) == fnx.graphdef(ours)
        chex.assert_trees_all_equal(fnx.state(model), fnx.state(ours))
    found = nnx_applied(theirs, X)
    chex.assert_trees_all_equal(found, nnx_applied(ours, X))
    chex.assert_trees_all_equal(fnx.state(theirs), fnx.state(ours))
    assert np.abs(found[1] - nnx_applied(before, X)[1]).max() > 1e-4
    for model in (theirs, ours):
        model.eval()
    call = fnx.jit(lambda model, x: model(x))
    np.testing.assert_array_equal(call(theirs, X), call(ours, X))


class NnxOwn(fnx.LayerNorm):
    """A user's subclass."""


def test_which_norms_of_nnx_stay():
    rngs = fnx.Rngs(0)
    own, ours = NnxOwn(8, rngs=rngs), jn.nnx.LayerNorm(8, rngs=rngs, scale_offset=1)
    assert type(jn.nnx.adopt(own)) is NnxOwn
    assert jn.nnx.adopt(ours).scale_offset == 1

    def classes(**options):
        model = jn.nnx.adopt(nnx_zoo(fnx), **options)
        return {
            path[0]
            for path, node in fnx.iter_graph(model)
            if type(node) in NNX.values() and path[0] in ("BatchNorm", "block", "again", "layers")
        }

    block = min(classes() & {"block", "again"})  # shared: met there first
    assert classes() == {"BatchNorm", block, "layers"}
    assert classes(without="BatchNorm") == {block, "layers"}
    assert classes(without=[f"{block}/norm", jn.nnx.BatchNorm]) == {"layers"}
    assert classes(without=fnx.LayerNorm) == {"BatchNorm"}
    assert classes(without=lambda path, norm: "/" in path and norm.use_scale) == {"BatchNorm"}


def test_what_cannot_be_adopted_is_refused():
    model = nnx_zoo(fnx)
    with pytest.raises(ValueError, match=r"without must name norms of Flax's .* got 'layer'"):
        jn.nnx.adopt(model, without=["layers", "layer"])
    with pytest.raises(TypeError, match="without must be a class"):
        jn.nnx.adopt(model, without=[None])
    assert type(model.block.norm) is fnx.LayerNorm
    with pytest.raises(TypeError, match=r"model must be a module of flax.nnx: got LayerNorm\."):
        jn.nnx.adopt(fnn.LayerNorm())
    with pytest.raises(TypeError, match="got State"):
        jn.nnx.adopt(fnx.state(model))


def test_tables_have_every_norm_of_flax():
    """By the names of the classes, which linen makes part of a checkpoint."""
    for library, table in ((fnn, LINEN), (fnx, NNX)):
        norms = {name for name in dir(library) if name.endswith("Norm")}
        assert {theirs.__name__ for theirs in table} == norms
        assert all(theirs.__name__ == ours.__name__ for theirs, ours in table.items())
        assert all(issubclass(ours, theirs) for theirs, ours in table.items())
