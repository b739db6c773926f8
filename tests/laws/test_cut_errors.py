"""Test wrong calls, however data are cut.

Over devices, microbatches and segments, the error is the error of the whole.
"""

import jax
import numpy as np
import pytest
from cases import long_sweep
from cut_inputs import data
from cuts import WAYS

GROWING = r"must broadcast against x without growing it: {0} has shape .*, x has shape"
SHAPE_OF_MASK = (
    GROWING.format("where")
    + "|weights must have the shape of the first batch axes|vmap got inconsistent sizes"
)
SHAPE_OF_PARAMETER = r"{0} must have the shape of the feature axes, \(32,\)|" + GROWING
# What is wrong: the argument, what it is made of what is right, and the error.
WRONG = {
    "integers": (
        "x",
        lambda x: x.astype(np.int32),
        TypeError,
        "must be floating point: got int32. Cast",
    ),
    "booleans": ("x", lambda x: x > 0, TypeError, "must be floating point: got bool. Cast"),
    "mask_of_another_size": ("where", lambda mask: mask.repeat(2, -1), ValueError, SHAPE_OF_MASK),
    "mask_of_another_rank": ("where", lambda mask: mask[..., None], ValueError, SHAPE_OF_MASK),
    "mask_of_integers": (
        "where",
        lambda mask: mask.astype(np.int32),
        TypeError,
        "where must be boolean or float weights: got int32. Cast",
    ),
    "negative_epsilon": (
        "epsilon",
        lambda epsilon: -epsilon,
        ValueError,
        "epsilon must be finite and >= 0: got -1e-05.",
    ),
    "infinite_epsilon": (
        "epsilon",
        lambda epsilon: epsilon / 1e-320,
        ValueError,
        "epsilon must be finite and >= 0: got inf.",
    ),
    "epsilon_nan": (
        "epsilon",
        lambda epsilon: epsilon * np.nan,
        ValueError,
        "epsilon must be finite and >= 0: got nan.",
    ),
    "epsilon_of_letters": (
        "epsilon",
        str,
        TypeError,
        r"epsilon must be a number: got '1e-05' \(str\).",
    ),
}
OF_PARAMETERS = {
    "another_size": (lambda a: a.repeat(2), ValueError, SHAPE_OF_PARAMETER),
    "another_shape": (lambda a: a.reshape(2, -1), ValueError, SHAPE_OF_PARAMETER),
    "integers": (
        lambda a: a.astype(np.int32),
        TypeError,
        "{} must be floating point: got int32. Cast",
    ),
}
# which looks at its parameters itself, and casts x
OF_FLAX = [way for way in WAYS if way.name.startswith(("linen", "nnx"))]
# whose users scale, and which sees weights traced: checked under checkify alone
OF_ONLINE = ("stages", "stacked_stages", "online")
FUNCTIONAL = [way for way in WAYS if way not in OF_FLAX and way.name not in OF_ONLINE]
RUNS = [
    (way, name) for way in WAYS for name in WRONG if way not in OF_FLAX or WRONG[name][0] != "x"
]
QUICK = [(way, name) for way, name in RUNS if name == "mask_of_another_size" or way.name == "merge"]


def refused(way, name, make, error, match):
    given = data(True, fold=way.fold, segments=way.segments, shuffled=way.over_devices)
    arguments = {
        "x": given.x,
        "scale": given.scale,
        "bias": given.bias,
        "where": given.where,
        "epsilon": 1e-5,
    }
    arguments[name] = make(arguments[name])
    epsilon = arguments.pop("epsilon")
    with pytest.raises(error, match=match):
        jax.eval_shape(
            lambda x, scale, bias, where: way.run(x, scale, bias, where, epsilon),
            *arguments.values(),
        )


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # of what is masked out
@pytest.mark.parametrize(("way", "mistake"), long_sweep(RUNS, quick=QUICK), ids=str)
def test_wrong_arguments(way, mistake):
    name, make, error, match = WRONG[mistake]
    refused(way, name, make, error, match.replace("where", way.mask))


@pytest.mark.slow
@pytest.mark.parametrize("way", OF_FLAX, ids=str)
def test_modules_cast_integers_as_flax_does(way, rng):
    """To float32: they are neither truncated nor wrapped."""
    given = data(False, fold=way.fold, segments=way.segments)
    x = rng.integers(0, 256, given.x.shape, np.uint8)
    whole, same = (
        way.run(x, given.scale, given.bias, None, 1e-5)[0] for x in (x, x.astype(np.float32))
    )
    assert whole.dtype == np.float32
    np.testing.assert_array_equal(whole, same)


@pytest.mark.parametrize("mistake", OF_PARAMETERS)
@pytest.mark.parametrize("name", ["scale", "bias"])
@pytest.mark.parametrize("way", long_sweep(FUNCTIONAL, quick=FUNCTIONAL[:1]), ids=str)
def test_wrong_parameters(way, name, mistake):
    make, error, match = OF_PARAMETERS[mistake]
    refused(way, name, make, error, match.format(name))


@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf])
@pytest.mark.parametrize(
    "way",
    long_sweep(
        [way for way in WAYS if "devices" not in way.name and way.name not in OF_ONLINE],
        quick=WAYS[1:2],
    ),
    ids=str,
)
def test_wrong_weights(way, weight):
    given = data(False, fold=way.fold, segments=way.segments)
    weights = np.where(
        np.arange(given.x.size).reshape(given.x.shape) % 5 == 0, np.float32(weight), np.float32(1)
    )
    with pytest.raises(ValueError, match=f"must be finite and >= 0: found {weight}"):
        way.run(given.x, given.scale, given.bias, weights, 1e-5)
