"""Test mistakes of users of jaxnorm.data.

Each is refused before data are read, in words that say what to do, and changes nothing.
"""

import re

import numpy as np
import pytest

from jaxnorm.data import Normalizer
from jaxnorm.data.command import main

X = np.arange(12.0).reshape(4, 3)
FITTED = Normalizer.fit([{"a": X, "b": X}])
BATCHES = "batches must be an iterable of batches: got one "
WRONG = {
    f"{BATCHES}array, of shape (4, 3). Put it in a list.": lambda: Normalizer.fit(X),
    f"{BATCHES}dict. Put it in a list.": lambda: Normalizer.fit({"a": X}, {"a": 0}),
    f"{BATCHES}str. Put it in a list.": lambda: Normalizer.fit("a.npy"),
    "batches must be an iterable of batches: got int.": lambda: Normalizer.fit(3),
    "where must be a function, from a batch to its masks: got ndarray.": lambda: Normalizer.fit(
        [X], where=X > 1
    ),
    "every must be an integer >= 1: got 0.": lambda: Normalizer.fit([X], state="s.json", every=0),
    "axes must name at least one leaf: got {}.": lambda: Normalizer({}),
    "axes must name at least one leaf: got {'a': None}.": lambda: Normalizer({"a": None}),
    (
        "leaf 'b' must keep its shape but for the reduction axes: "
        "got statistics of shape (1, 1) after (1, 3)."
    ): lambda: FITTED.merge(Normalizer.fit([{"a": X, "b": X[:, :1]}])),
    (
        "leaf '0': an array must have an axis to reduce: got one number. Lists are trees; "
        "make one an array, np.asarray(list)."
    ): lambda: Normalizer.fit([[1.0, 2.0]]),
    "leaf 'a': dtype must be floating point: got int32.": lambda: FITTED.normalize(
        {"a": X}, dtype=np.int32
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_they_are_refused_in_words(text):
    with pytest.raises((TypeError, ValueError)) as caught:
        WRONG[text]()
    assert str(caught.value) == text
    assert FITTED.batches == 1


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [
        ("none/s.json", FileNotFoundError, "must lie in a folder that exists: .*none is none"),
        ("s.txt", ValueError, "must end in .safeten"),
    ],
)
def test_a_state_that_cannot_be_saved_is_refused_before_data_are_read(state, error, text, tmp_path):
    read = []
    with pytest.raises(error, match=text):
        Normalizer.fit((read.append(1) or X for _ in range(3)), state=tmp_path / state)
    assert not read
    with pytest.raises(error, match=text):
        FITTED.save(tmp_path / state)


def test_a_file_that_needs_what_is_not_installed_is_refused_before_data_are_read(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("jaxnorm.data.files.find_spec", lambda name: None)
    read, said = (
        [],
        "x.safetensors needs safetensors, which is not installed: pip install 'jaxnorm[data]', or "
        "name a .json file.",
    )
    with pytest.raises(ModuleNotFoundError, match=re.escape(said)):
        Normalizer.fit((read.append(1) or X for _ in range(3)), state=tmp_path / "x.safetensors")
    assert not read
    np.save(tmp_path / "a.npy", X)
    assert main([str(tmp_path / "a.npy"), "--out", str(tmp_path / "x.safetensors")]) == 1
    assert said in capsys.readouterr().err
    FITTED.save(tmp_path / "x.json")


def test_integers_that_are_denormalized_are_rounded():
    x = np.random.default_rng(0).integers(0, 256, (500, 3)).astype(np.uint8)
    fitted = Normalizer.fit([x])
    np.testing.assert_array_equal(fitted.denormalize(fitted.normalize(x), dtype=np.uint8), x)


def test_one_feature_is_none_too_many(tmp_path, capsys):
    np.save(tmp_path / "a.npy", X[:, 0])
    assert main([str(tmp_path / "a.npy"), "--out", str(tmp_path / "s.json")]) == 0
    assert (
        capsys.readouterr().out
        == f"Written: {tmp_path / 's.json'}, of an array: 1 feature, 4 elements each\n"
    )


@pytest.mark.parametrize("tree", [lambda x: x, lambda x: {"a": x}], ids=["array", "dict"])
def test_fitting_is_not_traced(tree):
    """JAX's own error says where the array was traced: a TypeError with the name of the leaf."""
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match="traced array") as caught:
        jax.jit(lambda x: Normalizer().update(tree(x)).moments)(np.ones(3, np.float32))
    assert ("leaf 'a'" in str(caught.value)) == (tree(1) == {"a": 1})
