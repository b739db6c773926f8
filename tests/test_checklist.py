"""A norm is whole: every place of the checklist in CONTRIBUTING.md has it."""

import inspect
from functools import partial
from pathlib import Path
from typing import Unpack

import pytest
from cases import CASES, TWINS

import jaxnorm
from jaxnorm import graphs, linen, nnx, norms, switchable

ROOT = Path(__file__).parent.parent
OPTIONS = {"scale", "bias", "epsilon", "where", "axis_name", "dtype", "full_range", "implementation"}
SAID = ("sqrt(", "floating dtype", "boolean mask or float", "arXiv", "Args:", "Returns:", "Raises:", ">>>")
NAMES = sorted(
    name
    for module in (norms, graphs, switchable)
    for name, function in vars(module).items()
    if name.endswith("_norm") and inspect.isfunction(function) and function.__module__ == module.__name__
)


def called(case):
    """The names that a row of the table may call."""
    function = case.call.func if isinstance(case.call, partial) else case.call
    return {function.__name__, *function.__code__.co_names}


def module_of(package, name):
    """The class of rms_norm is RMSNorm."""
    return {module.lower(): module for module in package.__all__}.get(name.replace("_", ""))


def missing(name):
    """What is left to do, by file."""
    parameters, text = inspect.signature(function := getattr(jaxnorm, name)).parameters, function.__doc__
    ours = {option for option, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}
    if "options" in parameters and parameters["options"].annotation == Unpack[jaxnorm.NormOptions]:
        ours |= jaxnorm.NormOptions.__annotations__.keys()
    modules = {package.__name__: module_of(package, name) for package in (linen, nnx)}
    file = f"{function.__module__.replace('.', '/')}.py"
    done = {
        f"{file}: x is to be positional-only": next(iter(parameters.values())).kind is inspect.Parameter.POSITIONAL_ONLY,
        **{f"{file}: option {option}": option in ours for option in sorted(OPTIONS)},
        **{f"{file}: {part} in the docstring": part in text for part in SAID},
        "jaxnorm/__init__.py: the name in __all__": name in jaxnorm.__all__,
        **{f"{package.replace('.', '/')}: a module in __all__": module for package, module in modules.items()},
        "tests/cases.py: a row of CASES": any(name in called(case) for case in CASES),
        "tests/cases.py: a row of TWINS": modules["jaxnorm.nnx"] in dict(TWINS),
        "tests/typed/use.py: a line": f"jn.{name}(" in (ROOT / "tests" / "typed" / "use.py").read_text(),
        "docs/gallery.md: a section": f"[jaxnorm.{name}]" in (ROOT / "docs" / "gallery.md").read_text(),
        "CHANGELOG.md: a line": name.removesuffix("_norm") in (ROOT / "CHANGELOG.md").read_text().lower(),
    }
    return [place for place, found in done.items() if not found]


@pytest.mark.parametrize("name", NAMES)
def test_no_place_of_a_norm_is_forgotten(name):
    assert not missing(name), f"{name} lacks " + "; ".join(missing(name))


def test_the_norms_are_those_that_are_public():
    assert {name for name in jaxnorm.__all__ if name.endswith("_norm")} - {"weight_norm", "spectral_norm"} == set(NAMES)


def test_linen_and_nnx_have_the_same_modules():
    assert sorted(linen.__all__) == sorted(nnx.__all__)
