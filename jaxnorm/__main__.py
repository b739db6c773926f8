"""``python -m jaxnorm``: the command lines of data sets, ``fit`` and ``show``, and of the
experiments.
"""

import difflib
import importlib.util
import sys

from jaxnorm import __version__
from jaxnorm.experiments import interrupts

# module -> package
NEEDED = {"optax": "optax", "sklearn": "scikit-learn", "rich": "rich", "matplotlib": "matplotlib"}
COMMANDS = ("fit", "show", "convert", "norms", "check", "compare", "explain", "axes")
HELP = """usage: jaxnorm COMMAND ...

  fit      fit the statistics of a data set in files
  show     print a file of statistics, ours or another library's
  convert  write statistics in the format of another library
  norms    list the norms by name
  check    compare a Flax model with Flax's norms and with jaxnorm's

compare, explain and axes, which are experiments, need pip install 'jaxnorm[experiments]'."""


def main() -> int:
    """Returns the exit status; where the command is interrupted, it ends the process."""
    if sys.argv[1:] == ["--version"]:  # at once, and without what the experiments need
        print(f"jaxnorm {__version__}")
        return 0
    # need nothing of what the experiments do; some not even JAX
    alone = {"fit": _fit, "show": _show, "convert": _convert, "norms": _norms, "check": _check}
    if sys.argv[1:2] and sys.argv[1] in alone:
        return interrupts.command(alone[sys.argv[1]])
    if sys.argv[1:] and (word := sys.argv[1]) not in COMMANDS and not word.startswith("-"):
        close = difflib.get_close_matches(word, COMMANDS, 1)
        meant = f": did you mean {close[0]}?" if close else "."
        print(f"jaxnorm: {word!r} is no command{meant} jaxnorm --help lists them.", file=sys.stderr)
        return 2
    missing = [
        package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None
    ]
    if missing and set(sys.argv[1:]) <= {"-h", "--help"}:
        print(HELP)
        return 0
    if missing:
        *others, last = missing
        named = f"{', '.join(others)} and {last}, which are" if others else f"{last}, which is"
        print(
            f"jaxnorm: the experiments need {named} not installed: pip install "
            "'jaxnorm[experiments]'.",
            file=sys.stderr,
        )
        return 1
    return interrupts.command(_run)


def _fit() -> int:
    from jaxnorm.data.command import main

    return main(sys.argv[2:])


def _show() -> int:
    from jaxnorm.data.show import main

    return main(sys.argv[2:])


def _convert() -> int:
    from jaxnorm.data.convert import main

    return main(sys.argv[2:])


def _norms() -> int:
    from jaxnorm.norms.command import main

    return main(sys.argv[2:])


def _check() -> int:
    if importlib.util.find_spec("flax") is None:
        print(
            "jaxnorm check: it needs flax, which is not installed: pip install 'jaxnorm[flax]'.",
            file=sys.stderr,
        )
        return 2
    from jaxnorm.checking import main

    return main(sys.argv[2:])


def _run() -> int:
    # The parser lists the norms, so those of your own come first.
    from jaxnorm.norms.command import import_named

    if status := import_named(sys.argv[1:]):
        return status
    # takes seconds, in which an interrupt is to be quiet already
    from jaxnorm.experiments.command import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
