"""The command ``jaxnorm check``, which compares a model with Flax's norms and with ours."""

import argparse
import importlib
import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxnorm.flax_common.comparison import Comparison
from jaxnorm.flax_common.inputs import InputsError

DESCRIPTION = """Run a model with Flax's norms and with jaxnorm's, and print how they compare:
outputs, state and gradients, errors from float64, bytes that reverse mode keeps, times, and which
implementation ran for each norm."""
EPILOG = """The function takes no argument. It returns

  (model, inputs) or (model, inputs, options)                        for flax.nnx
  (model, variables, inputs) or (model, variables, inputs, options)  for flax.linen

inputs    an array, a tuple of arguments by position, or a dict of arguments by keyword
variables of the linen model; None initializes them
options   a dict of arguments of jaxnorm.nnx.compare or jaxnorm.linen.compare, for example rngs,
          method, loss or without, and of arguments of the model by keyword

The exit status is 0 if the outputs agree within the tolerance, or jaxnorm's are at least as near to
float64; 1 if they differ; 2 if nothing was compared."""
SHAPES = {
    "nnx": ("(model, inputs) or (model, inputs, options)", (2, 3)),
    "linen": ("(model, variables, inputs) or (model, variables, inputs, options)", (3, 4)),
}


class UsageError(Exception):
    """Raised where nothing can be compared. The message says what to do."""


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status, which EPILOG explains."""
    options = _parser().parse_args(arguments)
    try:
        if options.json and not options.json.absolute().parent.is_dir():
            raise UsageError(
                f"--json must name a file in a folder that exists: got {options.json}."
            )
        found = _compared(options)
        if options.json:
            options.json.write_text(found.to_json() + "\n")
    except (UsageError, OSError) as error:
        print(f"jaxnorm check: {error}", file=sys.stderr)
        return 2
    Console().print(found)
    agrees = found.agrees(options.tolerance)
    limit = found.tolerance if options.tolerance is None else options.tolerance
    apart = max((each.between for each in found.differences if each.part == "outputs"), default=0.0)
    if apart <= limit:
        print(f"The outputs agree within {limit:.1e}: they differ by {apart:.1e}.")
    else:
        nearer = f"; {'jaxnorm' if agrees else 'Flax'}'s are nearer to float64"
        known = all(each.our_error is not None for each in found.differences)
        print(f"The outputs differ by {apart:.1e}, more than {limit:.1e}{nearer if known else ''}.")
    return 0 if agrees else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxnorm check",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        metavar="MODULE:FUNCTION",
        help="function that makes the model, for example package.module:make_model",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there as well")
    parser.add_argument(
        "--rounds", type=_positive, default=20, help="how often each step is timed; 20 by default"
    )
    parser.add_argument(
        "--tolerance",
        type=_fraction,
        help="largest difference of the outputs, divided by the largest output; by default the "
        "root of the epsilon of the coarsest dtype in the model, 3e-4 in float32",
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a positive integer: got {text!r}")
    return int(text)


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number from 0 on: got {text!r}")
    return value


def _compared(options: argparse.Namespace) -> Comparison:
    """Return the comparison of the model that the function returns."""
    name = options.model
    model, *rest = _guarded(name, _loaded(name))
    family = "nnx" if _is_nnx(model) else "linen"
    shown, _ = SHAPES[family]
    *variables, inputs, more = rest if len(rest) == SHAPES[family][1][1] - 1 else (*rest, {})
    if not isinstance(more, dict):
        raise UsageError(
            f"{name} must return {shown} with a dict of options: got {type(more).__name__}."
        )
    compare = importlib.import_module(f"jaxnorm.{family}").compare
    given = inputs if isinstance(inputs, tuple | list) else ()
    named = inputs if isinstance(inputs, dict) else {}
    if not named and not isinstance(inputs, tuple | list):
        given = (inputs,)
    keywords = {"rounds": options.rounds} | named | more
    return _guarded(name, lambda: compare(model, *variables, *given, **keywords), "comparing")


def _guarded(name: str, run: Callable[[], Any], doing: str = "calling") -> Any:
    """Return the result of the user's code; its traceback is shown if it fails."""
    try:
        found = run()
    except InputsError as error:
        raise UsageError(f"{doing} {name} failed: {error}") from None
    except Exception as error:
        traceback.print_exc()
        kind = type(error).__name__
        raise UsageError(f"{doing} {name} failed: {kind}: {error}") from None
    if doing == "calling":
        _check(name, found)
    return found


def _check(name: str, found: Any) -> None:
    """Raise UsageError unless a function returned a model and its inputs."""
    either = " for nnx, ".join(shown for shown, _ in SHAPES.values()) + " for linen"
    if not isinstance(found, tuple) or not found:
        raise UsageError(f"{name} must return {either}: got {type(found).__name__}.")
    family = "nnx" if _is_nnx(found[0]) else "linen" if _is_linen(found[0]) else None
    if family is None:
        raise UsageError(
            f"{name} must return {either}: got a tuple whose first element is of "
            f"{type(found[0]).__module__}.{type(found[0]).__name__}."
        )
    shown, lengths = SHAPES[family]
    if len(found) not in lengths:
        raise UsageError(
            f"{name} must return {shown} with a model of flax.{family}: got {len(found)} elements."
        )


def _is_nnx(model: Any) -> bool:
    from flax import nnx

    return isinstance(model, nnx.Module)


def _is_linen(model: Any) -> bool:
    from flax import linen

    return isinstance(model, linen.Module)


def _loaded(name: str) -> Callable[[], Any]:
    """Return the function that ``package.module:function`` names.

    As for ``python -m``, the module may lie in the working directory.
    """
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise UsageError(f"the model must be MODULE:FUNCTION: got {name!r}.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(f"importing {module_name} failed: {error}.") from None
        raise UsageError(
            f"there is no module {error.name!r}: run the command in the folder that it lies in, or "
            "install it."
        ) from None
    except Exception as error:
        traceback.print_exc()
        raise UsageError(
            f"importing {module_name} failed: {type(error).__name__}: {error}"
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [each for each in vars(module) if callable(getattr(module, each))]
        close = get_close_matches(function_name, names, 1)
        hint = f" Did you mean {close[0]}?" if close else ""
        what = "no function" if function is None else "no function, but a value"
        raise UsageError(f"{module_name} has {what} {function_name!r}.{hint}")
    return function
