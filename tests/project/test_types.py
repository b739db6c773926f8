"""Test what type checkers see of the installed package.

A user's file has no Any, mistakes are found, and types at run time are the same.
"""

import ast
import inspect
import json
import runpy
import subprocess
import sys
import typing
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import UnionType

import flax.nnx
import jax
import pytest

import jaxnorm
from jaxnorm import linen, nnx, recurrent
from jaxnorm.linen.recurrent import _CallOptions as LinenOptions
from jaxnorm.nnx.recurrent import _CallOptions as NNXOptions
from jaxnorm.nnx.recurrent import _CellOptions as CellOptions
from jaxnorm.recurrent import options, parameters

ROOT, TYPED = Path(__file__).parents[2], Path(__file__).parents[1] / "typed"
USE, WRONG = TYPED / "use.py", TYPED / "wrong.py"
COMMANDS = {
    "mypy": [
        "--strict",
        "--config-file=",
        "--output=json",
        f"--cache-dir={ROOT / '.mypy_cache/typed'}",
        "--python-executable",
        sys.executable,
    ],
    # TYPED has the options: strict, and no Any
    "basedpyright": ["--project", TYPED, "--outputjson", "--pythonpath", sys.executable],
}


def run(checker):
    """What a checker reports: file, line, message. Where it runs, jaxnorm is found where it is
    installed.
    """
    # basedpyright: what lies beside its options
    files = [USE.name, WRONG.name] if checker == "mypy" else []
    command = [sys.executable, "-m", checker, *COMMANDS[checker], *files]
    result = subprocess.run(command, cwd=TYPED, capture_output=True, text=True, check=False)
    # found errors: 0 is none, others are of the checker's own
    assert result.returncode == 1, result.stdout + result.stderr
    if checker == "mypy":
        return [
            (found["file"], found["line"], found["message"])
            for found in map(json.loads, result.stdout.splitlines())
        ]
    reports = json.loads(result.stdout)["generalDiagnostics"]
    return [
        (Path(found["file"]).name, found["range"]["start"]["line"] + 1, found["message"])
        for found in reports
    ]


@pytest.mark.parametrize("checker", COMMANDS)
def test_checkers_find_mistakes_and_no_others(checker):
    pytest.importorskip(checker)
    found = defaultdict(dict)
    for file, line, message in run(checker):
        found[file].setdefault(line, message)
    marked = {
        i for i, line in enumerate(WRONG.read_text().splitlines(), 1) if line.endswith("# error")
    }
    assert found[USE.name] == {}
    assert len(marked) > 20
    assert found[WRONG.name].keys() == marked, found


def conforms(value, kind):
    """Whether a value is of a type, as far as that can be asked."""
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if kind in ("Carry", typing.ForwardRef("Carry")):  # within itself
        return conforms(value, options.Carry)
    if origin in (typing.Union, UnionType):
        return any(conforms(value, one) for one in of)
    if origin is dict:
        return isinstance(value, dict) and all(
            conforms(one, kind)
            for pair in value.items()
            for one, kind in zip(pair, of, strict=True)
        )
    if origin is tuple:
        kinds = of[:1] * len(value) if of[1:] == (...,) else of
        return (
            isinstance(value, tuple)
            and len(value) == len(kinds)
            and all(map(conforms, value, kinds))
        )
    return isinstance(value, dict if typing.is_typeddict(kind) else kind)


def test_types_are_those_of_what_runs(monkeypatch):
    """The user's file, with every assert_type checked; traced, since that takes less time than
    compiling.
    """
    asserted = []

    def check(value, kind):
        assert conforms(value, kind), f"{kind}: got {value!r}"
        asserted.append(kind)
        return value

    monkeypatch.setattr(typing, "assert_type", check)
    names = runpy.run_path(str(USE))
    newer = hasattr(flax.nnx, "WeightNorm")  # Flax 0.12.1, which has SpectralNorm, too
    for name in (
        *(["nnx_weights"] if newer else []),
        "statistics",
        "styled",
        "standardized",
        "norms",
        "recurrent_parameters",
        "nnx_norms",
        "nnx_conditional",
        "nnx_networks",
    ):
        jax.eval_shape(names[name])
    for keep in (False, True):
        jax.eval_shape(partial(names["recurrent_networks"], keep))
    jax.eval_shape(partial(names["Norms"]().init, train=True), names["key"], names["x"])
    jax.eval_shape(names["Networks"]().init, names["key"], names["x"])
    names["nnx_population"]()
    names["for_optimizers"]()
    names["linen_population"](
        linen.BatchNorm(use_running_average=False).init(names["key"], names["h"])
    )
    written = [
        node
        for node in ast.walk(ast.parse(USE.read_text()))
        if isinstance(node, ast.Call) and called(node) == "assert_type"
    ]
    assert len(asserted) >= len(written) - (0 if newer else 2) > 70


def called(node):
    return ast.unparse(node.func)


@pytest.mark.parametrize(
    ("module", "prefix"),
    [(jaxnorm, "jn"), (recurrent, "jn.recurrent"), (linen, "jn.linen"), (nnx, "jn.nnx")],
    ids=lambda value: str(value)[:30],
)
def test_every_public_name_is_in_the_users_file(module, prefix):
    """In an assert_type."""
    calls = [
        node
        for node in ast.walk(ast.parse(USE.read_text()))
        if isinstance(node, ast.Call) and called(node) == "assert_type"
    ]
    used = {
        ast.unparse(node)
        for call in calls
        for node in ast.walk(call)
        if isinstance(node, ast.Attribute)
    }
    used |= {
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(USE.read_text()))
        if isinstance(node, ast.Call)
    }
    assert {f"{prefix}.{name}" for name in module.__all__} <= used


FUNCTIONS = [getattr(module, name) for module in (jaxnorm, recurrent) for name in module.__all__]
MODULES = [getattr(module, name) for module in (linen, nnx) for name in module.__all__]
CALLS = [value if inspect.isfunction(value) else value.__call__ for value in MODULES]


@pytest.mark.parametrize(
    "function",
    [*filter(inspect.isfunction, FUNCTIONS), jaxnorm.Moments.merge, *CALLS],
    ids=lambda f: f.__qualname__,
)
def test_public_signatures_are_complete(function):
    """Checkers would infer a type from a default, or take any value."""
    signature = inspect.signature(function)
    parts = {"return": signature.return_annotation} | {
        name: p.annotation for name, p in signature.parameters.items() if name != "self"
    }
    assert [name for name, annotation in parts.items() if annotation is signature.empty] == []


@pytest.mark.parametrize(
    ("seen", "taken", "own"),
    [
        (
            recurrent.NetworkOptions,
            options.NetworkArguments,
            {"initial", "return_moments", "reset_after", "activation"},
        ),
        (recurrent.ParameterOptions, parameters.InitArguments, {"forget_bias", "reset_after"}),
    ],
    ids=["networks", "parameters"],
)
def test_options_that_checkers_see_are_those_of_the_networks(seen, taken, own):
    """Functions name their own, and hand all on to a dataclass, which has the defaults."""
    hints = typing.get_type_hints(taken)
    assert {name: hints[name] for name in hints.keys() - own} == typing.get_type_hints(seen)
    assert own <= hints.keys()


@pytest.mark.parametrize(
    ("module", "seen"), [(linen, LinenOptions), (nnx, NNXOptions)], ids=["linen", "nnx"]
)
def test_options_that_checkers_see_are_those_of_the_modules(module, seen):
    own = typing.get_type_hints(module.LSTM.__call__)
    assert {
        option: kind
        for option, kind in own.items()
        if option not in ("inputs", "return_carry", "return")
    } == typing.get_type_hints(seen)


def test_options_that_checkers_see_are_those_of_the_cells():
    cell, layer = (typing.get_type_hints(of.__init__) for of in (nnx.LayerNormLSTMCell, nnx.LSTM))
    assert {name: cell[name] for name in cell.keys() - layer.keys()} == typing.get_type_hints(
        CellOptions
    )
    with pytest.raises(TypeError, match="forget_bais"):
        nnx.LSTM(3, 4, forget_bais=0.0, rngs=flax.nnx.Rngs(0))
