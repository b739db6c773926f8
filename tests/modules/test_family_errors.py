"""Test that every module of the table answers wrong arguments by their own names."""

import inspect
import re

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
