"""Compare the modules of both families with Flax's.

The tests compare arguments, dtypes, and arrays with few axes.
"""

import inspect
import warnings
from functools import partial

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import long_sweep
from flax import nnx

import jaxnorm.linen
import jaxnorm.nnx

KEY = jax.random.key(0)
FAMILIES = {"linen": (jaxnorm.linen, flax.linen), "nnx": (jaxnorm.nnx, nnx)}
PAIRS = [
    (family, name)
    for family, (ours, theirs) in FAMILIES.items()
    for name in ours.__all__
    if hasattr(theirs, name)
]
WRAPPERS = [pair for pair in PAIRS if pair[1] in ("WeightNorm", "SpectralNorm")]
NORMS = [pair for pair in PAIRS if pair not in WRAPPERS]
MODES = [
    (*pair, training)
    for pair in NORMS
    for training in ((False, True) if pair[1] == "BatchNorm" else (True,))
]
LOW, FULL = jnp.bfloat16, jnp.float32


def both(family, name):
    return (getattr(library, name) for library in FAMILIES[family])


def call(family, norm, x, training=True, **options):
    """The output of a new module of eight features, and its state after the call."""
    if "GroupNorm" in norm.__name__:
        options["num_groups"] = 2
    if running := norm.__name__ in ("BatchNorm", "SwitchableNorm"):
        options["use_running_average"] = not training
    if family == "nnx":
        module = norm(8, **options, rngs=nnx.Rngs(0))
        return module(x), nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))
    variables = norm(**options).init(KEY, x)
    y, state = norm(**options).apply(variables, x, mutable=["batch_stats"])
    return y, dict(state["batch_stats"]) if running else {}


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_each_module_is_one_of_flax(family, name):
    ours, theirs = both(family, name)
    assert issubclass(ours, theirs)


def test_interceptors_find_linen_modules_by_flax_classes():
    """As written for Flax's modules: what every layer norm puts out, doubled."""

    def double(call, args, kwargs, context):
        factor = 2 if isinstance(context.module, flax.linen.LayerNorm) else 1
        return factor * call(*args, **kwargs)

    model = flax.linen.Sequential([jaxnorm.linen.RMSNorm(), jaxnorm.linen.LayerNorm()])
    x = jnp.array([[3.0, -3.0]])
    with flax.linen.intercept_methods(double):
        y, variables = model.init_with_output(KEY, x)
    assert set(variables["params"]) == {"layers_0", "layers_1"}
    np.testing.assert_allclose(y, [[2, -2]], rtol=2e-6)


def test_filters_find_nnx_modules_by_flax_classes():
    """As written for Flax's modules: running statistics are frozen, and layer norms gathered."""
    modules = (
        jaxnorm.nnx.BatchNorm(2, rngs=nnx.Rngs(0)),
        nnx.Dropout(0.5),
        jaxnorm.nnx.LayerNorm(2, rngs=nnx.Rngs(0)),
    )
    model = nnx.Sequential(*modules)
    model.set_attributes(nnx.BatchNorm, use_running_average=True)
    # by 0 and 1, which stay
    np.testing.assert_allclose(modules[0](jnp.array([[3.0, 5.0]])), [[3, 5]], rtol=1e-5)
    np.testing.assert_array_equal(modules[0].mean[...], [0, 0])
    assert [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.LayerNorm)] == [
        modules[2]
    ]


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_same_signatures_as_flax(family, name):
    """Names, order, defaults and how they may be passed; a call may take more keywords."""
    ours, theirs = both(family, name)
    for method in ("__init__", "__call__"):
        found, truth = (
            dict(inspect.signature(getattr(norm, method)).parameters) for norm in (ours, theirs)
        )
        if name == "SpectralNorm" and "kwargs" not in truth:  # for the layer
            found.pop("kwargs", None)
        more = {
            "__call__": {"segments": None, "num_segments": None, "residual": None},
            "__init__": {
                "unbiased": False,
                "skip_constant": False,
                "scale_offset": 0,
                "rounding": "once",
            },
        }
        for beyond, default in more[method].items():
            if beyond in found:
                assert (found[beyond].kind, found.pop(beyond).default) == (
                    inspect.Parameter.KEYWORD_ONLY,
                    default,
                )
        assert [(key, p.kind) for key, p in found.items()] == [
            (key, p.kind) for key, p in truth.items()
        ]
        defaults = [
            {key: p.default for key, p in each.items() if not callable(p.default)}
            for each in (found, truth)
        ]
        assert defaults[0] == defaults[1]


@pytest.mark.parametrize("name", [name for family, name in NORMS if family == "nnx"])
def test_same_attributes_as_flax(name):
    ours, theirs = (vars(norm(32, rngs=nnx.Rngs(0))) for norm in both("nnx", name))
    static = {
        key for key, value in theirs.items() if isinstance(value, int | float | str | tuple | None)
    }
    assert {key: ours.get(key, "absent") for key in static} == {key: theirs[key] for key in static}


@pytest.mark.usefixtures("ordinary_promotion")  # Flax relies on it
@pytest.mark.parametrize(("family", "name", "training"), long_sweep(MODES, quick=MODES[::3]))
def test_same_dtypes_as_flax(family, name, training):
    for kind in (FULL, LOW, jnp.int32, bool):
        x = jax.ShapeDtypeStruct((4, 5, 8), kind)
        for param_dtype in (FULL, LOW):
            for dtype in (None, FULL, LOW):
                options = {"training": training, "param_dtype": param_dtype, "dtype": dtype}
                found, truth = (
                    jax.eval_shape(partial(call, family, norm, **options), x)
                    for norm in both(family, name)
                )
                assert found == truth, (kind, options)


def call_wrapped(family, norm, x, kernel_dtype, **options):
    """The output of a new dense layer within the module, and the module's state after the call."""
    if family == "nnx":
        module = norm(
            nnx.Linear(8, 4, param_dtype=kernel_dtype, rngs=nnx.Rngs(0)),
            **options,
            rngs=nnx.Rngs(0),
        )
        return module(x), nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))
    module = norm(flax.linen.Dense(4, param_dtype=kernel_dtype), **options)
    training = {"update_stats": True} if norm.__name__ == "SpectralNorm" else {}
    return module.apply(module.init(KEY, x, **training), x, mutable=["batch_stats"], **training)


@pytest.mark.usefixtures("ordinary_promotion")
@pytest.mark.parametrize(("family", "name"), WRAPPERS)
def test_wrappers_of_layers_have_the_dtypes_of_flax(family, name):
    x = jax.ShapeDtypeStruct((4, 8), LOW)
    for kernel_dtype in (FULL, LOW):
        for param_dtype in (FULL, LOW):
            for dtype in (None, FULL, LOW):
                options = {"kernel_dtype": kernel_dtype, "param_dtype": param_dtype, "dtype": dtype}
                found, truth = (
                    partial(jax.eval_shape, partial(call_wrapped, family, norm, **options), x)
                    for norm in both(family, name)
                )
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FutureWarning)  # Flax narrows without a cast
                    expected = truth()
                assert found() == expected, options


@pytest.mark.usefixtures("ordinary_promotion")
@pytest.mark.parametrize(("family", "name", "training"), long_sweep(MODES, quick=MODES[::3]))
def test_integers_and_booleans_as_flax(family, name, training, rng):
    for x in (rng.integers(0, 256, (4, 5, 8)).astype(np.uint8), rng.random((4, 5, 8)) < 0.5):
        ours, theirs = (
            partial(call, family, norm, training=training) for norm in both(family, name)
        )
        # in one program, of which Flax makes ten where each step is called
        found, truth = ours(jnp.asarray(x)), jax.jit(theirs)(x)
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5), found, truth)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("training", [False, True])
def test_switchable_norm_takes_integers(family, training, rng):
    x = jnp.asarray(rng.integers(0, 256, (4, 5, 8)), jnp.uint8)
    norm = FAMILIES[family][0].SwitchableNorm
    found, truth = (call(family, norm, a, training) for a in (x, x.astype(FULL)))
    jax.tree.map(np.testing.assert_array_equal, found, truth)
    assert call(family, norm, x, training, dtype=LOW)[0].dtype == LOW


ONE_AXIS = [pair for pair in NORMS if pair[1] != "InstanceNorm"]  # which needs a batch


@pytest.mark.parametrize(("family", "name"), long_sweep(ONE_AXIS, quick=ONE_AXIS[::2]))
def test_one_axis_as_flax(family, name, rng):
    """Single examples under vmap; nnx.GroupNorm of Flax fails there, its linen one stands in."""
    x, cotangent = jnp.asarray(rng.standard_normal((2, 3, 8)), FULL)
    ours, theirs = both(family, name)
    modules = (
        (family, ours),
        ("linen", flax.linen.GroupNorm) if name == "GroupNorm" else (family, theirs),
    )
    found, truth = (
        jax.vjp(jax.vmap(lambda row, module=module: call(*module, row)[0]), x) for module in modules
    )
    np.testing.assert_allclose(found[0], truth[0], atol=1e-5)
    np.testing.assert_allclose(found[1](cotangent)[0], truth[1](cotangent)[0], atol=1e-5)
