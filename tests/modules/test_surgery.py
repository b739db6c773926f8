"""Test that norms are replaced and frozen where that is asked, and nowhere else."""

from functools import partial
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as fnx

import jaxnorm as jn
from jaxnorm.flax_common.surgery import Report

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (4, 3, 8)) + 3


class Linen(fnn.Module):
    """Two norms, one in a block below."""

    norms: Any = fnn

    @fnn.compact
    def __call__(self, x, train=False):
        x = self.norms.BatchNorm(use_running_average=not train, epsilon=1e-3)(x)
        return Block()(x, train)


class Block(fnn.Module):
    @fnn.compact
    def __call__(self, x, train):
        x = jn.linen.BatchNorm(name="norm")(x, not train)
        return fnn.LayerNorm(use_bias=False, name="layer")(x)


class Nnx(fnx.Module):
    """The same of nnx."""

    def __init__(self, rngs, norms=jn.nnx):
        self.first = norms.BatchNorm(8, epsilon=1e-3, rngs=rngs)
        self.block = fnx.Sequential(
            jn.nnx.BatchNorm(8, rngs=rngs), fnx.LayerNorm(8, use_bias=False, rngs=rngs)
        )

    def __call__(self, x):
        return self.block(self.first(x))


def variables_of(model, x=X):
    """Return variables of which none is a default."""
    leaves, structure = jax.tree.flatten(model.init(KEY, x))
    keys = jax.random.split(KEY, len(leaves))
    return structure.unflatten(
        [a + 0.3 * jax.random.uniform(key, a.shape) for a, key in zip(leaves, keys, strict=True)]
    )


def test_batch_norm_becomes_group_norm_with_scale_and_bias():
    model = Linen()
    variables = variables_of(model)
    swapped, new, report = jn.linen.swap(
        model, variables, X, to="group", only=fnn.BatchNorm, options={"num_groups": 2}
    )
    own = variables["params"]
    assert set(new) == {"params"}
    jax.tree.map(np.testing.assert_array_equal, new["params"], own)
    assert [(row.path, row.kind, row.into) for row in report.rows] == [
        ("BatchNorm_0", "BatchNorm", ("GroupNorm",)),
        ("Block_0/norm", "BatchNorm", ("GroupNorm",)),
    ]
    assert report.rows[0].kept == ("scale", "bias", "epsilon=0.001")
    assert report.rows[0].dropped == ("mean", "var")
    first, block = own["BatchNorm_0"], own["Block_0"]
    y = jn.group_norm(X, 2, **first, epsilon=1e-3)
    y = jn.group_norm(y, 2, **block["norm"], epsilon=1e-5)
    y = jn.layer_norm(y, scale=block["layer"]["scale"])
    for train in (False, True):  # no collection is mutable
        found = jax.jit(swapped.apply, static_argnums=2)(new, X, train)
        np.testing.assert_allclose(found, y, rtol=1e-5, atol=1e-5)
    fresh = jax.eval_shape(swapped.init, KEY, X)
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, new)


def test_layer_norm_becomes_rms_norm_or_dynamic_tanh():
    model = Linen()
    variables = variables_of(model)
    before, batch = variables["params"]["Block_0"]["layer"], fnn.BatchNorm
    for to, kept, added in (
        ("rms", ("scale", "epsilon=1e-06"), ()),
        ("dynamic_tanh", ("scale",), ("alpha",)),
    ):
        swapped, new, report = jn.linen.swap(
            model, variables, X, to=to, only=lambda path, module: not isinstance(module, batch)
        )
        (row,) = report.rows
        assert (row.path, row.kept, row.added, row.dropped) == ("Block_0/layer", kept, added, ())
        after = new["params"]["Block_0"]["layer"]
        np.testing.assert_array_equal(after["scale"], before["scale"])
        assert set(after) == {"scale", *added}
        assert new["batch_stats"].keys() == variables["batch_stats"].keys()
        assert jax.eval_shape(swapped.apply, new, X).shape == X.shape
    twice, both, _ = jn.linen.swap(swapped, new, X, to="instance", only="BatchNorm_0")
    assert "BatchNorm_0" not in both["batch_stats"]
    assert jax.eval_shape(twice.apply, both, X).shape == X.shape


def test_nnx_swaps_as_linen():
    model = Nnx(fnx.Rngs(0))
    before = fnx.to_pure_dict(fnx.state(model))
    expected = model.first.scale[...]
    swapped, report = jn.nnx.swap(model, to="group", only=fnx.BatchNorm, options={"num_groups": 2})
    assert [(row.path, row.kept, row.dropped) for row in report.rows] == [
        ("block/layers/0", ("scale", "bias", "epsilon=1e-05"), ("mean", "var")),
        ("first", ("scale", "bias", "epsilon=0.001"), ("mean", "var")),
    ]
    assert type(swapped.first) is jn.nnx.GroupNorm
    assert swapped.first.epsilon == 1e-3
    np.testing.assert_array_equal(swapped.first.scale[...], expected)
    y = jn.group_norm(jn.group_norm(X, 2, epsilon=1e-3), 2, epsilon=1e-5)
    found = fnx.jit(lambda model, x: model(x))(swapped, X)
    np.testing.assert_allclose(found, jn.layer_norm(y), rtol=1e-5, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, fnx.to_pure_dict(fnx.state(model)), before)
    again, _ = jn.nnx.swap(model, to="dynamic_tanh", only="block", copy=False)
    assert again is model
    assert type(model.block.layers[1]).__name__ == "DynamicTanh"
    assert not hasattr(model.block.layers[1], "epsilon")


def both(change):
    """Return what a change raises in either family."""
    model = Linen()
    yield lambda **given: getattr(jn.linen, change)(model, variables_of(model), X, **given)
    yield lambda **given: getattr(jn.nnx, change)(Nnx(fnx.Rngs(0)), **given)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, TypeError, r"^to must be the name of the new norm: got none\. Pass to='rms'"),
        ({"to": None}, ValueError, r"^to must be one of batch, .*: got None\.$"),
        ({"to": "grup"}, ValueError, r"^to must be one of .* Did you mean 'group'\?"),
        ({"to": "film"}, ValueError, r"to must be a norm that is called as y = norm\(x\): 'film'"),
        ({"to": "group", "options": {"num_groups": 3}}, ValueError, "cannot become this norm. "),
        ({"to": "rms", "options": {"groups": 3}}, TypeError, "groups"),
        (
            {"to": "rms", "only": "layer"},
            ValueError,
            "only must name norms .* got 'layer'; there are '.*', '",
        ),
        ({"to": "rms", "only": fnn.Dense}, ValueError, "must .* a norm that only names"),
        ({"to": "rms", "only": [None]}, TypeError, "only must be a class, a path"),
    ],
)
def test_what_cannot_be_swapped_is_refused(given, error, message):
    for swap in both("swap"):
        with pytest.raises(error, match=message):
            swap(**given)


def test_nnx_needs_no_inputs_for_a_swap():
    model = Nnx(fnx.Rngs(0))
    for given, options in (((X,), {"to": "rms"}), ((X,), {}), (("rms",), {})):
        with pytest.raises(TypeError, match="takes the model alone by position: got 2 arguments"):
            jn.nnx.swap(model, *given, **options)


def test_features_must_be_the_last_axis():
    model = fnn.BatchNorm(True, axis=1)
    with pytest.raises(ValueError, match=r"the model must have its features on the last axis"):
        jn.linen.swap(model, variables_of(model), X, to="layer")
    with pytest.raises(ValueError, match=r"got axis=1. Leave it out by only="):
        jn.nnx.swap(fnx.BatchNorm(3, axis=1, rngs=fnx.Rngs(0)), to="layer")
    swapped, _ = jn.nnx.swap(fnx.BatchNorm(3, axis=1, rngs=fnx.Rngs(0)), to="ghost_batch",
                             options={"num_chunks": 2})  # fmt: skip
    assert swapped.axis == 1


@pytest.mark.parametrize("norms", [fnx, jn.nnx])
@pytest.mark.parametrize("groups", [{"num_groups": 2}, {"num_groups": None, "group_size": 4}])
def test_nnx_swaps_group_norms(norms, groups):
    norm = norms.GroupNorm(8, **groups, rngs=fnx.Rngs(0))
    swapped, report = jn.nnx.swap(norm, to="rms")
    assert (report.rows[0].kept, report.rows[0].dropped) == (("scale", "epsilon=1e-06"), ("bias",))
    np.testing.assert_array_equal(swapped(X), jn.rms_norm(X, scale=jnp.ones(8)))


def test_every_version_of_flax_keeps_the_options_of_an_instance_norm():
    norm = fnx.BatchNorm(8, epsilon=0.1, use_bias=False, rngs=fnx.Rngs(0))
    swapped, report = jn.nnx.swap(norm, to="instance")
    assert (swapped.epsilon, swapped.use_bias) == (0.1, False)
    assert report.rows[0].kept == ("scale", "epsilon=0.1")


def test_surgery_sees_adopted_norms():
    model = fnn.Sequential([fnn.Dense(3), fnn.BatchNorm(use_running_average=True), fnn.relu])
    variables = variables_of(model)
    expected = model.apply(variables, X)
    with jn.linen.adopted():
        folded, new, report = jn.linen.fold(model, variables, X)
        assert report.rows[0].into == ("layers_0",)
        np.testing.assert_allclose(folded.apply(new, X), expected, rtol=1e-5, atol=1e-5)
        swapped, of_rms, _ = jn.linen.swap(model, variables, X, to="rms")
        found = swapped.apply(of_rms, X)
    np.testing.assert_array_equal(swapped.apply(of_rms, X), found)
    assert abs(found - expected).max() > 0.1


class TestFreezing:
    def test_linen(self):
        model = Linen()
        variables = variables_of(model)
        frozen, report = jn.linen.freeze(model, variables, X, only="Block_0")
        assert [(row.path, row.outcome) for row in report.rows] == [("Block_0/norm", "frozen")]
        step = jax.jit(lambda v: frozen.apply(v, X, True, mutable=["batch_stats"])[1])
        new = step(variables)["batch_stats"]
        old = variables["batch_stats"]
        jax.tree.map(np.testing.assert_array_equal, new["Block_0"], old["Block_0"])
        assert (new["BatchNorm_0"]["mean"] != old["BatchNorm_0"]["mean"]).all()
        all_frozen, _ = jn.linen.freeze(model, variables, X)
        np.testing.assert_array_equal(
            all_frozen.apply(variables, X, True), model.apply(variables, X, False)
        )
        thawed, report = jn.linen.unfreeze(frozen)
        assert thawed is model
        assert [(row.path, row.outcome) for row in report.rows] == [("Block_0/norm", "unfrozen")]
        swapped, *_ = jn.linen.swap(frozen, variables, X, to="rms", only=fnn.LayerNorm)
        assert jn.linen.unfreeze(swapped)[0].model is model

    def test_linen_in_part(self):
        model = Linen()
        variables = variables_of(model)
        frozen, _ = jn.linen.freeze(model, variables, X)
        again, _ = jn.linen.freeze(frozen, variables, X)
        for all_frozen, only in (
            (frozen, "Block_0"),
            (again, "/Block_0/norm/"),
            (frozen, jn.linen.BatchNorm),
            (frozen, [lambda path, norm: type(norm) is jn.linen.BatchNorm and path[:1] == "B"]),
        ):
            part, report = jn.linen.unfreeze(all_frozen, only=only)
            assert [row.path for row in report.rows] == ["Block_0/norm"]
            new = part.apply(variables, X, True, mutable=["batch_stats"])[1]["batch_stats"]
            old = variables["batch_stats"]
            assert (new["Block_0"]["norm"]["mean"] != old["Block_0"]["norm"]["mean"]).all()
            np.testing.assert_array_equal(new["BatchNorm_0"]["mean"], old["BatchNorm_0"]["mean"])
            assert jn.linen.unfreeze(part, only="BatchNorm_0")[0] is model
        assert jn.linen.unfreeze(model) == (model, Report(()))

    def test_linen_swapped(self):
        options = {"use_running_average": False}
        for norm in (fnn.BatchNorm(use_running_average=False), fnn.LayerNorm()):
            model = fnn.Sequential([norm])
            variables = variables_of(model)
            swapped, new, _ = jn.linen.swap(model, variables, X, to="batch", options=options)
            frozen, report = jn.linen.freeze(swapped, new, X)
            assert report.difference > 1
            y, updated = frozen.apply(new, X, mutable=["batch_stats"])
            given = {name: values["layers_0"] for name, values in new.items()}
            evaluated = jn.linen.BatchNorm(True, epsilon=norm.epsilon).apply(given, X)
            np.testing.assert_array_equal(y, evaluated)
            jax.tree.map(np.testing.assert_array_equal, updated["batch_stats"], new["batch_stats"])
            assert jn.linen.unfreeze(frozen)[0] == swapped
        without, new, _ = jn.linen.swap(swapped, new, X, to="rms")
        with pytest.raises(ValueError, match="calls none"):
            jn.linen.freeze(without, new, X)

    @pytest.mark.parametrize(
        ("only", "error", "message"),
        [
            ("nowhere", ValueError, "name frozen norms .* got 'nowhere'; there are '.*', '"),
            ([fnn.Dense, "nowhere"], ValueError, "got 'nowhere'"),
            (fnn.Dense, ValueError, "must have a frozen norm that only names: frozen are .*, "),
            ([None], TypeError, "only must be a class, a path"),
        ],
    )
    def test_what_cannot_be_unfrozen(self, only, error, message):
        frozen, _ = jn.linen.freeze(Linen(), variables_of(Linen()), X)
        nnx, _ = jn.nnx.freeze(Nnx(fnx.Rngs(0)))
        for unfreeze, model, untouched in (
            (jn.linen.unfreeze, frozen, Linen()),
            (jn.nnx.unfreeze, nnx, Nnx(fnx.Rngs(0))),
        ):
            with pytest.raises(error, match=message):
                unfreeze(model, only=only)
            with pytest.raises(error):
                unfreeze(untouched, only=only)
            assert unfreeze(untouched)[1] == Report(())
            with pytest.raises(TypeError, match=r"module of flax\.(linen|nnx): got int"):
                unfreeze(3)

    def test_linen_calibration(self):
        model = Linen(jn.linen)  # Flax's collect no Moments
        variables = variables_of(model)
        frozen, _ = jn.linen.freeze(model, variables, X, only="Block_0")
        old = variables["batch_stats"]
        new = jn.linen.recalibrate(frozen, variables, [X], train=True)["batch_stats"]
        np.testing.assert_array_equal(
            new["Block_0"]["norm"]["mean"], old["Block_0"]["norm"]["mean"]
        )
        np.testing.assert_array_equal(new["Block_0"]["norm"]["var"], old["Block_0"]["norm"]["var"])
        np.testing.assert_allclose(new["BatchNorm_0"]["mean"], X.mean((0, 1)), rtol=1e-6)
        collecting = jn.linen.accumulate(variables)
        _, after = frozen.apply(collecting, X, True, mutable=["batch_stats", "batch_moments"])
        seen = after["batch_moments"]["Block_0"]["norm"]["seen"].moments
        assert not seen.count.any()
        jax.tree.map(np.testing.assert_array_equal, after["batch_stats"]["Block_0"], old["Block_0"])

    def test_nnx(self):
        model = Nnx(fnx.Rngs(0))
        same, report = jn.nnx.freeze(model, only="block")
        assert same is model
        assert [(row.path, row.outcome) for row in report.rows] == [("block/layers/0", "frozen")]
        norm = model.block.layers[0]
        model.train()
        fnx.jit(lambda model, x: model(x))(model, X)
        norm(X, use_running_average=False)
        assert norm.mean[...].tolist() == [0.0] * 8
        assert (model.first.mean[...] != 0).all()
        _, report = jn.nnx.unfreeze(model)
        assert [row.path for row in report.rows] == ["block/layers/0"]
        model(X)
        assert (norm.mean[...] != 0).any()

    def test_nnx_calibration(self):
        model = Nnx(fnx.Rngs(0))
        jn.nnx.freeze(model, only="first")
        jn.nnx.recalibrate(model, [X])
        assert model.first.mean[...].tolist() == [0.0] * 8
        np.testing.assert_allclose(
            model.block.layers[0].mean[...], (X / np.sqrt(1.001)).mean((0, 1)), rtol=1e-5
        )
        jn.nnx.accumulate(model)
        assert not hasattr(model.first, "batch_moments")
        with pytest.raises(ValueError, match="only must name norms with running statistics"):
            jn.nnx.recalibrate(model, [X], only="first")
        jn.nnx.freeze(model)
        with pytest.raises(ValueError, match=r"a norm must not be frozen .* Call unfreeze\(\)"):
            jn.nnx.recalibrate(model, [X])

    def test_differences(self):
        """Of the outputs in the mode of the call; it is the same number on the way back."""
        model, training = Linen(jn.linen), {"train": True, "mutable": ["batch_stats"]}
        variables = variables_of(model)
        batch, _ = model.apply(variables, X, **training)
        running = model.apply(variables, X)
        apart, sizes = (
            float(abs(batch - running).max()),
            [float(abs(y).max()) for y in (batch, running)],
        )
        frozen, report = jn.linen.freeze(model, variables, X, **training)
        assert (report.difference, report.largest) == pytest.approx((apart, sizes[0]), rel=1e-6)
        _, report = jn.linen.unfreeze(frozen, variables, X, **training)
        assert (report.difference, report.largest) == pytest.approx((apart, sizes[1]), rel=1e-6)
        # no collection need be named as mutable
        frozen, report = jn.linen.freeze(model, variables, X, train=True)
        _, back = jn.linen.unfreeze(frozen, variables, X, train=True)
        assert report.difference == back.difference == pytest.approx(apart, rel=1e-6)
        assert jn.linen.swap(model, variables, X, to="rms", train=True)[2].rows
        assert jn.linen.freeze(model, variables, X)[1].difference == 0
        assert jax.eval_shape(lambda v: jn.linen.freeze(model, v, X)[0].apply(v, X), variables)
        twin = Nnx(fnx.Rngs(0))
        before, stats = twin(X), jax.tree.map(np.array, fnx.state(twin, fnx.BatchStat))
        _, report = jn.nnx.freeze(twin, X)
        apart = float(abs(twin(X) - before).max())
        assert (report.difference, report.largest) == pytest.approx(
            (apart, float(abs(before).max())), rel=1e-6
        )
        assert jn.nnx.unfreeze(twin, X)[1].difference == report.difference
        jax.tree.map(np.testing.assert_array_equal, fnx.state(twin, fnx.BatchStat), stats)
        assert jn.nnx.freeze(twin)[1].difference is None

    def test_differences_of_outputs_that_are_no_numbers(self):
        """Keys have none, and what is infinite before and after does not differ."""

        class Model(fnn.Module):
            @fnn.compact
            def __call__(self, x):
                y = fnn.BatchNorm(use_running_average=True)(x)
                return {"key": KEY, "logits": jnp.where(y > 3, -jnp.inf, 2.0)}

        _, report = jn.linen.freeze(Model(), Model().init(KEY, X), X)
        assert (report.difference, report.largest) == (0, 2)

    def test_refusals(self):
        for freeze in both("freeze"):
            with pytest.raises(ValueError, match="only must name norms"):
                freeze(only="nowhere")
            with pytest.raises(ValueError, match=r"got 'nowhere'; there are '.*', '"):
                freeze(only=[fnn.Dense, "nowhere"])
            with pytest.raises(ValueError, match=r"must .* a norm that only names"):
                freeze(only=fnn.Dense)
        with pytest.raises(ValueError, match=r"'first' would thaw in model\.train\(\)"):
            jn.nnx.freeze(Nnx(fnx.Rngs(0), fnx))
        with pytest.raises(TypeError, match=r"model must be a module of flax\.nnx: got BatchNorm"):
            jn.nnx.freeze(fnn.BatchNorm())


@pytest.mark.parametrize(
    ("model", "variables", "error", "message"),
    [
        (fnn.Dense(2), None, TypeError, "variables must be what init returns, .* got NoneType"),
        (fnn.Dense(2), {"Dense_0": {"kernel": 1}}, ValueError, "of collections: got Dense_0"),
        (fnn.Dense, {}, TypeError, "got the class Dense. Make a module"),
        (3, {}, TypeError, r"must be a module of flax\.linen: got int\. For nnx there is"),
    ],
)
@pytest.mark.parametrize(
    "call",
    [jn.linen.fold, partial(jn.linen.swap, to="rms"), jn.linen.freeze, jn.linen.diagnose],
    ids=["fold", "swap", "freeze", "diagnose"],
)
def test_models_and_variables_that_are_none(call, model, variables, error, message):
    with pytest.raises(error, match=message):
        call(model, variables, jnp.ones((2, 3)))


@pytest.mark.parametrize("call", [jn.linen.diagnose, jn.linen.compare])
def test_what_calls_norms_itself_refuses_edited_models(call):
    norm = fnn.LayerNorm()
    variables = norm.init(KEY, X)
    swapped, new, _ = jn.linen.swap(norm, variables, X, to="rms")
    with pytest.raises(TypeError, match="got a model that was edited"):
        call(swapped, new, X)
