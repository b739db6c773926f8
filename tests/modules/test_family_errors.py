"""Test that every module of the table answers wrong arguments by their own names."""

import inspect
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

import jaxnorm as jn

NORMS = jn.available_norms()
FAMILIES = ("linen", "nnx")
# what a constructor needs besides the defaults
NEEDED = {
    "group": {"num_groups": 2},
    "evonorm_s0": {"num_groups": 2},
    "ghost_batch": {"num_chunks": 2},
    "gated_rms": {"gate_first": True},
    "conditional_batch": {"num_classes": 3},
}
OF_CONDITION = {"ada_layer": 5, "ada_layer_zero": 5, "ada_instance": 5, "film": 5, "spade": 3}
IMAGES = np.random.default_rng(0).standard_normal((2, 4, 4, 8)).astype(np.float32)
VECTORS, MAP = np.ones((2, 5), np.float32), np.ones((2, 2, 2, 3), np.float32)
SECOND = {
    "gated_rms": IMAGES,
    "qk": IMAGES,
    "conditional_batch": np.arange(2),
    "spade": MAP,
} | dict.fromkeys(("ada_layer", "ada_layer_zero", "ada_instance", "film"), VECTORS)
MODULES = [(family, name) for family in FAMILIES for name in NORMS]


def made(family, name, **options):
    options = NEEDED.get(name, {}) | options
    if family == "linen":
        running = {"use_running_average": False} if NORMS[name].running else {}
        return jn.linen.norm(name, **running | options)
    if name in OF_CONDITION:
        options = {"condition_features": OF_CONDITION[name]} | options
    return jn.nnx.norm(name, options.pop("num_features", 8), rngs=flax_nnx.Rngs(0), **options)


def called(family, name, *arrays, module=None, **options):
    module = module or made(family, name)
    if family == "linen":
        return module.init_with_output(jax.random.key(0), *arrays, **options)[0]
    return module(*arrays, **options)


def arrays_of(name):
    return [jnp.asarray(a) for a in (IMAGES, SECOND.get(name)) if a is not None]


def names_of(family, name):
    """The names of the arrays of a call."""
    call = inspect.signature(type(made(family, name)).__call__).parameters
    return list(call)[1 : 1 + len(arrays_of(name))]


def refused(error, said):
    return pytest.raises(error, match=re.escape(said))


@pytest.mark.parametrize(("family", "name"), MODULES)
def test_each_array_is_named_where_it_is_none(family, name):
    for i, argument in enumerate(names_of(family, name)):
        arrays = arrays_of(name)
        for wrong, kind in ((None, "NoneType"), ("no", "str")):
            arrays[i] = wrong
            with refused(TypeError, f"{argument} must be an array of numbers: got {kind}."):
                called(family, name, *arrays)


@pytest.mark.parametrize("family", FAMILIES)
def test_lists_are_arrays(family):
    x = [[3.0, -3.0, 3.0, -3.0, 3.0, -3.0, 3.0, -3.0]]
    y = called(family, "rms", x)
    np.testing.assert_array_equal(y, called(family, "rms", jnp.array(x)))


@pytest.mark.parametrize(("family", "name"), MODULES)
def test_flags_are_booleans_and_initializers_functions(family, name):
    constructor = inspect.signature(getattr(getattr(jn, family), NORMS[name].linen).__init__)
    for argument, parameter in constructor.parameters.items():
        if isinstance(parameter.default, bool) and argument != "use_running_average":
            for wrong in ("no", None, 2):
                with refused(TypeError, f"{argument} must be True or False: got {wrong!r}."):
                    made(family, name, **{argument: wrong})
        if argument.endswith("_init") and parameter.default is not None:
            with refused(TypeError, f"{argument} must be a function (key, shape, dtype): got None"):
                made(family, name, **{argument: None})


@pytest.mark.parametrize("name", NORMS)
def test_the_number_of_features_is_an_integer(name):
    for wrong in (None, "8", 8.0, True):
        said = f"num_features must be an integer of at least 0: got {wrong!r} ("
        with refused(TypeError, said):
            made("nnx", name, num_features=wrong)
    with refused(ValueError, "num_features must be an integer of at least 0: got -1."):
        made("nnx", name, num_features=-1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: jn.nnx.norm("ada_layer", 8, rngs=flax_nnx.Rngs(0)),
            "condition_features must be given to AdaLayerNorm: got no such argument.",
        ),
        (
            lambda: jn.nnx.norm("ada_layer_zero", 8, rngs=flax_nnx.Rngs(0)),
            "condition_features must be given to AdaLayerNormZero: got no such argument.",
        ),
        (lambda: jn.linen.norm("gated_rms"), "gate_first must be given to GatedRMSNorm: got no"),
        (lambda: jn.nnx.LayerNorm(8), "rngs must be given to LayerNorm: got no such argument."),
        (
            lambda: jn.nnx.norm("layer", 8, rngs=None),
            "rngs must be nnx.Rngs: got None. Pass rngs=nnx.Rngs(0).",
        ),
        (
            lambda: made("nnx", "ada_layer", activation="silu"),
            "activation must be a function of an array, or None: got 'silu'. Take one of jax.nn.",
        ),
        (
            lambda: made("nnx", "spade", hidden_features="no"),
            "hidden_features must be an integer of at least 1: got 'no' (str).",
        ),
    ],
)
def test_constructors_say_what_is_missing(make, said):
    with refused(TypeError, said):
        make()


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda flag: jn.weight_norm(IMAGES, centered=flag), "centered"),
        (lambda flag: jn.weight_standardization(IMAGES, by_fan_in=flag), "by_fan_in"),
        (lambda flag: jn.standardize(IMAGES, 0, centered=flag), "centered"),
        (lambda flag: jn.moments(IMAGES, 0, centered=flag), "centered"),
        (lambda flag: jn.layer_norm(IMAGES, full_range=flag), "full_range"),
        (lambda flag: jn.batch_norm(IMAGES, batch_invariant=flag), "batch_invariant"),
        (lambda flag: jn.gated_rms_norm(IMAGES, IMAGES, gate_first=flag), "gate_first"),
        (lambda flag: jn.quantize(IMAGES, power_of_two=flag), "power_of_two"),
        (lambda flag: jn.ema(*[jn.moments(IMAGES, 0)] * 2, unbiased=flag), "unbiased"),
        (lambda flag: jn.ema(*[jn.moments(IMAGES, 0)] * 2, skip_constant=flag), "skip_constant"),
    ],
)
def test_functions_take_booleans_alone(call, argument):
    for wrong in ("no", None, 1):
        with refused(TypeError, f"{argument} must be True or False: got {wrong!r}."):
            call(wrong)
    with refused(TypeError, f"{argument} must be True or False: got an array of shape (2,)."):
        call(np.ones(2, bool))
    with refused(TypeError, f"{argument} must be True or False: got a traced value."):
        jax.jit(call)(True)
    jax.tree.map(np.testing.assert_array_equal, call(np.True_), call(True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [*OF_CONDITION, "conditional_batch"])
def test_conditions_are_vectors_labels_or_maps_of_their_kind(family, name):
    labels = name == "conditional_batch"
    wrong = VECTORS if labels else arrays_of(name)[1].astype(bool)
    if name != "spade":
        with refused(TypeError, "condition must be labels" if labels else "vectors of floats: got"):
            called(family, name, IMAGES, wrong)
    with refused(ValueError, "x must have "):
        called(family, name, 1.0, arrays_of(name)[1])
    empty = {"spade": MAP[:, :0], "conditional_batch": np.arange(0)}.get(name, VECTORS[:, :0])
    with refused(ValueError, "condition must "):
        called(family, name, IMAGES, empty)


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_of_conditional_batch_norm_are_no_labels(family):
    sizes = {} if family == "linen" else {"condition_features": 5}
    module = made(family, "conditional_batch", num_classes=None, **sizes)
    for wrong in (np.arange(2), VECTORS > 0):
        with refused(TypeError, "Pass num_classes to the constructor for labels."):
            called(family, "conditional_batch", IMAGES, wrong, module=module)


@pytest.mark.parametrize("family", FAMILIES)
def test_spade_takes_an_empty_image_and_no_empty_map(family):
    y = called(family, "spade", IMAGES[:, :0], MAP)
    assert y.shape == (2, 0, 4, 8)
    said = "condition must have a position to take a value from, and a label: got a map of shape "
    with refused(ValueError, said + "(2, 0, 2, 3) for x of shape (2, 4, 4, 8)."):
        called(family, "spade", IMAGES, MAP[:, :0])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("over", ["head", "heads"])
def test_qk_norm_speaks_of_queries_and_keys(family, over):
    sizes = {} if family == "linen" else {"num_heads": 4}
    module = made(family, "qk", over=over, **sizes)
    short, mask = IMAGES[:, :3], np.ones((2, 4, 1, 1), bool)
    wrong = partial(called, family, "qk", module=module)
    with refused(ValueError, "mask must broadcast against k without growing it: mask has shape "):
        wrong(IMAGES, short, mask=mask)
    with refused(ValueError, "k_mask must broadcast against k without growing it: k_mask has "):
        wrong(IMAGES, short, mask=mask, k_mask=mask)
    with refused(ValueError, "mask must broadcast against q without growing it: mask has shape "):
        wrong(short, IMAGES, mask=mask, k_mask=mask)
    with refused(ValueError, "k must have the axes (..., heads, head_dim): got shape (8,)."):
        wrong(IMAGES, IMAGES[0, 0, 0])
    with refused(TypeError, "k_mask must be boolean or float weights: got int32."):
        wrong(IMAGES, IMAGES, k_mask=np.ones((2, 4, 1, 1), np.int32))


def test_qk_norm_names_the_array_of_other_features():
    for options, size in (({}, 8), ({"over": "heads", "num_heads": 4}, 32)):
        module = made("nnx", "qk", **options)
        with refused(ValueError, f"k must have the features that QKNorm was made for, {size}: got"):
            module(IMAGES, IMAGES[..., :5])


def test_the_mask_of_a_style_fits_the_style():
    with refused(ValueError, "style_where must broadcast against style without growing it: "):
        jn.ada_instance_norm(IMAGES, IMAGES[:, :3], style_where=np.ones((2, 4, 1, 1), bool))
    with refused(ValueError, "style_where, for style of shape (2, 4, 4, 8), must be finite and >="):
        jn.ada_instance_norm(IMAGES, IMAGES, style_where=np.full((2, 4, 1, 1), -1.0))


@pytest.mark.parametrize("family", FAMILIES)
def test_group_norm_needs_channels(family):
    with refused(ValueError, "must "):
        called(family, "group", np.float32(1))


@pytest.mark.parametrize(("family", "name"), MODULES)
def test_numbers_are_numbers(family, name):
    constructor = inspect.signature(getattr(getattr(jn, family), NORMS[name].linen).__init__)
    for argument in {"epsilon", "momentum"} & set(constructor.parameters):
        for wrong in ("1e-5", None):
            with refused(TypeError, f"{argument} must be a number: got {wrong!r} ("):
                made(family, name, **{argument: wrong})
        with refused(ValueError, f"{argument} must "):
            made(family, name, **{argument: -1})


@pytest.mark.parametrize(("family", "name"), MODULES)
def test_dtypes_are_dtypes(family, name):
    constructor = inspect.signature(getattr(getattr(jn, family), NORMS[name].linen).__init__)
    for argument in {"dtype", "param_dtype"} & set(constructor.parameters):
        with refused(TypeError, f"{argument} must be a dtype: got 'no'. Take one such as jnp.f"):
            made(family, name, **{argument: "no"})


@pytest.mark.parametrize("wrong", ["no", -7, [1, "a"]])
def test_the_dtype_of_an_output_is_a_dtype(wrong):
    norms = (jn.layer_norm, jn.dynamic_tanh, jn.weight_norm)
    for call in norms:
        with refused(TypeError, f"dtype must be a dtype: got {wrong!r}. Take one such as jnp.floa"):
            call(IMAGES, *([np.float32(1)] if call is jn.dynamic_tanh else []), dtype=wrong)


@pytest.mark.parametrize("family", FAMILIES)
def test_options_of_single_norms_are_of_their_kind(family):
    with refused(TypeError, "scale_offset must be a number: got 'no' (str)."):
        called(family, "rms", IMAGES, module=made(family, "rms", scale_offset="no"))
    with refused(TypeError, "renorm_clipping must be a dictionary of rmax, rmin, dmax, or None: g"):
        module = made(family, "keras_batch_renorm", renorm_clipping="no")
        called(family, "keras_batch_renorm", IMAGES, module=module)
    with refused(TypeError, "r_max must be a number: got None (NoneType)."):
        called(family, "batch_renorm", IMAGES, module=made(family, "batch_renorm", r_max=None))


def test_batch_renorm_checks_epsilon_first():
    running = jn.Moments(jnp.ones(8), jnp.zeros(8), jnp.ones(8))
    with refused(TypeError, "epsilon must be a number: got 'no' (str)."):
        jn.batch_renorm(IMAGES, running, epsilon="no")


def test_options_of_any_type_are_named():
    with refused(ValueError, "activation must be 'silu' or 'sigmoid': got ['silu']."):
        jn.gated_rms_norm(IMAGES, IMAGES, gate_first=True, activation=["silu"])
    with refused(TypeError, "axes must be integers or a pattern: got "):
        jn.group_norm(IMAGES, 2, axes=np.ones((3, 2), np.float32))
