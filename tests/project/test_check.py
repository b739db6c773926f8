"""Test the command jaxnorm check: its status, its table, its file, and its errors."""

import json
import re
import sys

import pytest

from jaxnorm import checking

MODELS = """
import numpy as np
from flax import linen as nn, nnx

x = (np.random.default_rng(0).standard_normal((4, 8)) + 1000).astype("f")
class M(nn.Module):
    @nn.compact
    def __call__(self, x, shift=0.0):
        return nn.LayerNorm()(x + shift)
def linen(): return M(), None, x
def named(): return M(), None, {"x": x}, {"shift": 1.0, "float64": False}
def nnx_model(): return nnx.LayerNorm(8, rngs=nnx.Rngs(0)), (x,)
def alone(): return M()
def short(): return M(), x
def number(): return 1, x
def options(): return M(), None, x, x
def raises(): raise ValueError("no data")
def unknown(): return M(), None, x, {"shifd": 1}
def many(): return nnx.LayerNorm(8, rngs=nnx.Rngs(0)), (x, None, x)
value = 3
"""


@pytest.fixture
def check(tmp_path, monkeypatch, capsys, ordinary_promotion):
    (tmp_path / "own_models.py").write_text(MODELS)
    (tmp_path / "broken_models.py").write_text("import no_such_library")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_models", raising=False)
    monkeypatch.syspath_prepend("")

    def run(*arguments):
        status = checking.main([*arguments, "--rounds", "1"])
        return status, *capsys.readouterr()

    return run


@pytest.mark.parametrize("name", ["linen", "nnx_model"])
def test_models_that_agree_or_are_nearer_to_float64(check, tmp_path, name):
    status, shown, _ = check(f"own_models:{name}", "--json", "found.json", "--tolerance", "1e-9")
    assert status == 0
    assert "LayerNorm" in shown
    assert "more than 1.0e-09; jaxnorm's are nearer to float64." in shown
    assert json.loads((tmp_path / "found.json").read_text())["norms"][0]["name"] == "LayerNorm"


def test_a_difference_that_nobody_judges_is_one(check):
    status, shown, _ = check("own_models:named", "--tolerance", "1e-9")
    assert status == 1
    assert shown.splitlines()[-1].endswith("more than 1.0e-09.")
    status, shown, _ = check("own_models:named", "--tolerance", "0.5")
    assert status == 0
    assert "The outputs agree within 5.0e-01" in shown


ERRORS = {
    "own_models": "the model must be MODULE:FUNCTION: got 'own_models'.",
    "no_models:f": "there is no module 'no_models': run the command in the folder",
    "broken_models:f": "importing broken_models failed: No module named 'no_such_library'.",
    "own_models:linem": "own_models has no function 'linem'. Did you mean linen?",
    "own_models:value": "own_models has no function, but a value 'value'.",
    "own_models:alone": "for linen: got M.",
    "own_models:short": "with a model of flax.linen: got 2 elements.",
    "own_models:number": "whose first element is of builtins.int.",
    "own_models:options": "with a dict of options: got ndarray.",
    "own_models:raises": "calling own_models:raises failed: ValueError: no data",
    "own_models:unknown": "comparing own_models:unknown failed: inputs must fit M.__call__(x, "
    "shift=0.0): got 1 by position and shifd by keyword, an unexpected keyword argument "
    "'shifd'. Did you mean shift?",
    "own_models:many": "inputs must fit LayerNorm.__call__(x, *, mask=None): got 3 by position, "
    "too many positional arguments.",
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_compared(check, name):
    status, shown, said = check(name, "--json", "found.json")
    last = said.splitlines()[-1]
    assert (status, shown) == (2, "")
    assert last.startswith("jaxnorm check: ")
    # of the user's own errors the traceback comes first
    assert (len(said.splitlines()) == 1) == (name != "own_models:raises")
    assert ERRORS[name] in last


def test_wrong_options(check, capsys):
    assert check("own_models:linen", "--json", "no/found.json")[0] == 2
    for arguments, words in (
        (["--rounds", "0"], "must be a positive integer: got '0'"),
        (["--tolerance", "-1"], "must be a number from 0 on: got '-1'"),
    ):
        with pytest.raises(SystemExit) as ended:
            checking.main(["own_models:linen", *arguments])
        assert ended.value.code == 2
        assert re.search(re.escape(words), capsys.readouterr().err)
    with pytest.raises(SystemExit) as ended:
        checking.main(["--help"])
    assert ended.value.code == 0
    assert "(model, variables, inputs) or" in capsys.readouterr().out
