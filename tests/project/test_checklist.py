"""Test that a norm has every place of the checklist in CONTRIBUTING.md."""

import ast
import inspect
import re
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Unpack

import pytest
from cases import CASES, TWINS

import jaxnorm
from jaxnorm import linen, nnx, norms

ROOT = Path(__file__).parents[2]
OPTIONS = {
    "scale",
    "bias",
    "epsilon",
    "where",
    "axis_name",
    "dtype",
    "full_range",
    "implementation",
}
SAID = (
    "sqrt(",
    "floating dtype",
    "boolean mask or float",
    "arXiv",
    "Args:",
    "Returns:",
    "Raises:",
    ">>>",
)
FIRST = ("batch_norm", "rms_norm")  # which no change since the first version names
# of weights, which have no x
OTHERS = ("jaxnorm.norms.weights",)
MODULES = [
    import_module(module.name)
    for module in iter_modules(norms.__path__, "jaxnorm.norms.")
    if module.name not in OTHERS
]
NAMES = sorted(
    name
    for module in MODULES
    for name, function in vars(module).items()
    if name.endswith("_norm")
    and inspect.isfunction(function)
    and function.__module__ == module.__name__
)


def called(case):
    """The names that a row of the table may call."""
    function = case.call.func if isinstance(case.call, partial) else case.call
    return {function.__name__, *function.__code__.co_names}


def module_of(package, name):
    """The class of rms_norm is RMSNorm."""
    return {module.lower(): module for module in package.__all__}.get(name.replace("_", ""))


def written(*parts):
    return ROOT.joinpath(*parts).read_text()


def imported_for_types():
    """The names that jaxnorm/__init__.py imports where type checkers read it."""
    tree = ast.parse(written("jaxnorm", "__init__.py"))
    guarded = next(
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    return {
        alias.asname or alias.name
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def called_on_jn(source):
    """The functions of the package that a program calls as jn.name."""
    calls = (
        ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)
    )
    return {call.removeprefix("jn.") for call in calls if call.startswith("jn.")}


def section(name):
    """What the gallery has of a norm, from its heading on."""
    return next(
        (
            text
            for text in written("docs", "gallery.md").split("\n## ")
            if f"[jaxnorm.{name}]" in text
        ),
        "",
    )


def missing(name):
    """What is left to do, by file."""
    parameters, text = (
        inspect.signature(function := getattr(jaxnorm, name)).parameters,
        function.__doc__,
    )
    ours = {
        option
        for option, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    if "options" in parameters and parameters["options"].annotation == Unpack[jaxnorm.NormOptions]:
        ours |= jaxnorm.NormOptions.__annotations__.keys()
    modules = {package.__name__: module_of(package, name) for package in (linen, nnx)}
    lines = [
        name,
        *(f"{package.removeprefix('jaxnorm.')}.{module}" for package, module in modules.items()),
    ]
    file = f"{function.__module__.replace('.', '/')}.py"
    done = {
        f"{file}: x is to be positional-only": next(iter(parameters.values())).kind
        is inspect.Parameter.POSITIONAL_ONLY,
        **{f"{file}: option {option}": option in ours for option in sorted(OPTIONS)},
        **{f"{file}: {part} in the docstring": part in text for part in SAID},
        f"{file}: the formula before Args": re.search(
            r"``.*= .*(sqrt|epsilon).*``", text.partition("Args:")[0]
        ),
        **{
            f"{package.replace('.', '/')}: a module in __all__": module
            for package, module in modules.items()
        },
        "tests/cases.py: a row of CASES": any(name in called(case) for case in CASES),
        "tests/cases.py: a row of TWINS": modules["jaxnorm.nnx"] in dict(TWINS),
        "jaxnorm/__init__.py: an import for type checkers": name in imported_for_types(),
        **{
            f"tests/typed/use.py: a line for jn.{called}": called
            in called_on_jn(written("tests", "typed", "use.py"))
            for called in lines
        },
        "docs/gallery.md: a section": bool(section(name)),
        **{
            f"docs/gallery.md: {part} in it": part in section(name)
            for part in ("```math", "<img ", f"jn.{name}(", "arxiv.org/abs/")
        },
        **{
            f"docs/{picture}": (ROOT / "docs" / picture).exists()
            for picture in re.findall(r"images/[\w-]+\.svg", section(name))
        },
        "CHANGELOG.md: a line": f"`{name}`" in written("CHANGELOG.md") or name in FIRST,
    }
    return [place for place, found in done.items() if not found]


@pytest.mark.parametrize("name", NAMES)
def test_no_place_of_a_norm_is_forgotten(name):
    assert not missing(name), f"{name} lacks " + "; ".join(missing(name))


def test_the_norms_are_those_that_are_public():
    assert {name for name in jaxnorm.__all__ if name.endswith("_norm")} - {
        "weight_norm",
        "spectral_norm",
    } == set(NAMES)


def test_linen_and_nnx_have_the_same_modules():
    assert sorted(linen.__all__) == sorted(nnx.__all__)
