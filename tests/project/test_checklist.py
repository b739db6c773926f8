"""Test that each norm is in every file that the checklist of CONTRIBUTING.md names."""

import ast
import inspect
import re
from functools import cache, partial
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
    "batch_invariant",
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
# of weights, which have no x, and of a sum, which is x with an option of layer norm's modules
OTHERS = ("jaxnorm.norms.weights", "jaxnorm.norms.residual", "jaxnorm.norms.table")
MODULES = [
    import_module(module.name)
    for module in iter_modules(norms.__path__, "jaxnorm.norms.")
    if module.name not in OTHERS
]
# not taken from jaxnorm, which may still lack some of them
FUNCTIONS = {
    name: function
    for module in MODULES
    for name, function in sorted(vars(module).items())
    if name.endswith("_norm")
    and inspect.isfunction(function)
    and function.__module__ == module.__name__
}


def called(case):
    """The names that a row of the table may call."""
    function = case.call.func if isinstance(case.call, partial) else case.call
    return {function.__name__, *function.__code__.co_names}


def module_of(package, name):
    """The class of rms_norm is RMSNorm."""
    return {module.lower(): module for module in package.__all__}.get(name.replace("_", ""))


def written(*parts):
    """The text of a file of the repository."""
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


@cache
def lines_of_types():
    """The functions and classes that tests/typed/use.py calls as jn.name."""
    return called_on_jn(written("tests", "typed", "use.py"))


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


def of_function(name):
    """Whether the file of the function says what it must, by place."""
    function = FUNCTIONS[name]
    parameters, text = inspect.signature(function).parameters, function.__doc__ or ""
    ours = {
        option
        for option, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    if "options" in parameters and parameters["options"].annotation == Unpack[jaxnorm.NormOptions]:
        ours |= jaxnorm.NormOptions.__annotations__.keys()
    file = f"{function.__module__.replace('.', '/')}.py"
    return {
        f"{file}: x is to be positional-only": next(iter(parameters.values())).kind
        is inspect.Parameter.POSITIONAL_ONLY,
        **{f"{file}: option {option}": option in ours for option in sorted(OPTIONS)},
        **{f"{file}: {part} in the docstring": part in text for part in SAID},
        f"{file}: the formula before Args": re.search(
            r"``.*= .*(sqrt|epsilon).*``", text.partition("Args:")[0]
        ),
        "jaxnorm/__init__.py: a row of _MODULE_OF": name in jaxnorm.__all__,
        "jaxnorm/__init__.py: an import for type checkers": name in imported_for_types(),
        "tests/cases.py: a row of CASES": any(name in called(case) for case in CASES),
        f"tests/typed/use.py: a line for jn.{name}": name in lines_of_types(),
    }


def of_module(package, name):
    """Whether a package has a module of the norm, and other files know it, by place."""
    module, place = module_of(package, name), package.__name__.replace(".", "/")
    if module is None:
        # all other places need the module's name
        return {f"{place}: a module in __all__": False}
    short = package.__name__.removeprefix("jaxnorm.")
    return {
        f"tests/cases.py: a row of TWINS for {module}": module in dict(TWINS),
        f"tests/typed/use.py: a line for jn.{short}.{module}": f"{short}.{module}"
        in lines_of_types(),
        f"README.md: `{module}` in the table of norms": f"`{module}`" in written("README.md"),
        "jaxnorm/norms/table.py: a row": any(
            (row.function, getattr(row, short)) == (name, module)
            for row in jaxnorm.available_norms().values()
        ),
    }


def of_gallery(name):
    """Whether the gallery has all of its section of the norm, by place."""
    if not section(name):
        return {"docs/gallery.md: a section": False}
    return {
        **{
            f"docs/gallery.md: {part} in it": part in section(name)
            for part in ("```math", "<img ", f"jn.{name}(", "arxiv.org/abs/")
        },
        **{
            f"docs/{picture}": (ROOT / "docs" / picture).exists()
            for picture in re.findall(r"images/[\w-]+\.svg", section(name))
        },
    }


def missing(name):
    """What is left to do, by file."""
    done = {
        **of_function(name),
        **of_module(linen, name),
        **of_module(nnx, name),
        **of_gallery(name),
        "CHANGELOG.md: a line": f"`{name}`" in written("CHANGELOG.md") or name in FIRST,
    }
    return [place for place, found in done.items() if not found]


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_no_place_of_a_norm_is_forgotten(name):
    assert not missing(name), f"{name} lacks " + "; ".join(missing(name))


def test_the_norms_are_those_that_are_public():
    assert {name for name in jaxnorm.__all__ if name.endswith("_norm")} - {
        "weight_norm",
        "spectral_norm",
        "add_norm",
        "register_norm",
        "unregister_norm",
    } == set(FUNCTIONS)


def test_linen_and_nnx_have_the_same_modules():
    assert sorted(linen.__all__) == sorted(nnx.__all__)
