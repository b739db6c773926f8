"""Test that each norm is in every file that the checklist of CONTRIBUTING.md names."""

import ast
import inspect
import re
from functools import cache, partial
from pathlib import Path
from typing import Unpack

import pytest
from cases import CASES, TWINS

import jaxnorm
from jaxnorm import linen, nnx

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
    "Args:",
    "Returns:",
    "Raises:",
    ">>>",
)
FIRST = ("batch_norm", "rms_norm")  # which no change since the first version names
# with formulas that the oracle lacks, and tests of their own in tests/laws
OWN_LAWS = {
    "ada_instance_norm": "test_style.py",
    "dynamic_erf": "test_pointwise.py",
    "dynamic_tanh": "test_pointwise.py",
    "evonorm_b0": "test_responses.py",
    "evonorm_s0": "test_responses.py",
    "global_response_norm": "test_responses.py",
    "reversible_instance_norm": "test_reversible.py",
    "scale_norm": "test_vectors.py",
}
# which have no statistics, and no options about them
WITHOUT_STATISTICS = ("dynamic_erf", "dynamic_tanh")
# whose gain is an argument by position: one number, or the statistics of a style
GIVEN = {"scale_norm": {"scale"}, "ada_instance_norm": {"scale", "bias"}}
# of weights, of a sum and back: no row of the table
OTHERS = {"weight_norm", "spectral_norm", "add_norm", "reverse_instance_norm"}
ROWS = {row.function: row for row in jaxnorm.available_norms().values() if row.function}
FUNCTIONS = {name: getattr(jaxnorm, name) for name in ROWS}


def called(case):
    """The names that a row of the table may call."""
    function = case.call.func if isinstance(case.call, partial) else case.call
    return {function.__name__, *function.__code__.co_names}


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
    options, said = sorted(OPTIONS - GIVEN.get(name, set())), SAID
    if name in WITHOUT_STATISTICS:
        options, said = ["scale", "bias", "where", "dtype"], SAID[1:]
    if "bias" in GIVEN.get(name, ()):
        said = [part for part in SAID if part != "floating dtype"]
    own = OWN_LAWS.get(name)
    return {
        f"{file}: x is to be positional-only": next(iter(parameters.values())).kind
        is inspect.Parameter.POSITIONAL_ONLY,
        **{f"{file}: option {option}": option in ours for option in options},
        **{f"{file}: {part} in the docstring": part in text for part in said},
        f"{file}: the formula before Args": re.search(
            r"``.*= .*(sqrt|epsilon|scale).*``", text.partition("Args:")[0]
        ),
        f"{file}: the paper": re.search(r"arXiv \d{4}\.\d{5}|20\d\d, ICLR", text),
        "jaxnorm/__init__.py: a row of _MODULE_OF": name in jaxnorm.__all__,
        "jaxnorm/__init__.py: an import for type checkers": name in imported_for_types(),
        "tests/cases.py: a row of CASES": any(name in called(case) for case in CASES)
        or (own and name.split("_")[0] in written("tests", "laws", own)),
        f"tests/typed/use.py: a line for jn.{name}": name in lines_of_types(),
    }


def of_module(package, name):
    """Whether a package has a module of the norm, and other files know it, by place."""
    short, place = package.__name__.removeprefix("jaxnorm."), package.__name__.replace(".", "/")
    module = getattr(ROWS[name], short)
    return {
        f"{place}: {module} in __all__": module in package.__all__,
        f"tests/cases.py: a row of TWINS for {module}": module in dict(TWINS)
        or not ROWS[name].call.endswith("norm(x)"),  # which their own tests compare
        f"tests/typed/use.py: a line for jn.{short}.{module}": f"{short}.{module}"
        in lines_of_types(),
        f"README.md: `{module}` in the table of norms": f"`{module}`" in written("README.md"),
    }


def of_gallery(name):
    """Whether the gallery has all of its section of the norm, by place."""
    if not section(name):
        return {"docs/gallery.md: a section": False}
    return {
        **{
            f"docs/gallery.md: {part} in it": part in section(name)
            for part in ("```math", "<img " if ROWS[name].axes else "", f"jn.{name}(")
        },
        "docs/gallery.md: the paper in it": re.search(
            r"https://(arxiv\.org/abs/|openreview\.net/)", section(name)
        ),
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


def test_the_table_has_every_public_norm():
    public = {name for name in jaxnorm.__all__ if name.endswith("_norm")}
    assert public - OTHERS - {"register_norm", "unregister_norm"} <= set(FUNCTIONS)
    modules = {row.linen for row in jaxnorm.available_norms().values()}
    of_weights = {"WeightNorm", "SpectralNorm"}
    norms = {name for name in linen.__all__ if name.endswith("Norm")} - of_weights
    assert norms <= modules <= set(linen.__all__)


def test_linen_and_nnx_have_the_same_modules():
    # a context for models whose norms exist only while they run, a function for the others
    assert sorted({*linen.__all__} - {"adopted"}) == sorted({*nnx.__all__} - {"adopt"})
