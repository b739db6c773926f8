"""Test what save says of a model that is not like what it is to be like."""

import numpy as np
import pytest

from jaxnorm import interop


def ones(*shape):
    return np.ones(shape, np.float32)


PARAMS = {
    "fc": {"kernel": ones(3, 2), "bias": ones(2)},
    "norm": {"scale": ones(2), "bias": ones(2)},
}
LIKE = {"a.weight": ones(2, 3), "a.bias": ones(2), "b.weight": ones(2), "b.bias": ones(2)}
CASES = {
    "less": ({"a.weight": ones(2, 3), "a.bias": ones(2)}, {}, r"norm/bias .*: nothing in like"),
    "more": (LIKE | {"c.weight": ones(5)}, {}, r"c\.weight .*: the model has no parameter for it"),
    "another shape": (
        LIKE | {"a.weight": ones(4, 3)},
        {"names": {"fc": "a"}},
        r"fc/kernel \(3, 2\): a\.weight \(4, 3\) gives \(3, 4\)",
    ),
    "no such layer": (LIKE, {"names": {"fc": "z"}}, "^names must say layers of like: got 'z'"),
    "no such array": (
        LIKE,
        {"names": {"fc/kernel": "a.w", "fc/bias": "a.bias"}},
        "^names must say arrays of like: got 'a.w' for 'fc/kernel'",
    ),
    "no arrays": (3, {}, "^like must be a mapping of arrays, or a path: got int"),
    "an empty one": ({}, {}, "^like must map names to arrays: got nothing"),
}


@pytest.mark.parametrize("case", CASES)
def test_errors_speak_of_like(case):
    like, options, said = CASES[case]
    with pytest.raises((TypeError, ValueError), match=said) as raised:
        interop.save(PARAMS, framework="torch", like=like, **options)
    for word in ("file", "source", "changed", "allow_"):  # save has none of these
        assert word not in str(raised.value)


@pytest.mark.parametrize("framework", ["torch", "haiku", "flax", "equinox", "keras"])
def test_what_holds_no_arrays(framework):
    if framework == "equinox":
        pytest.importorskip("equinox")
    with pytest.raises((TypeError, ValueError), match="like must "):
        interop.save(PARAMS, framework=framework, like=3)


def test_load_speaks_of_the_file():
    with pytest.raises(ValueError, match=r"(?s)nothing in the file .*changed\. .* allow_missing"):
        interop.load(PARAMS, {"a.weight": ones(2, 3)}, framework="torch")
