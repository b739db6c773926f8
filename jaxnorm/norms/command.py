"""The command ``jaxnorm norms``, which lists norms, and the option ``--import``."""

import argparse
import importlib
import sys

from jaxnorm.norms.table import available_norms, find

IMPORT = "--import"
IMPORT_HELP = "module that registers norms of your own, imported first; may be repeated"


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status.

    The status is 0 for success, 1 for a module that cannot be imported, 2 for wrong usage.
    """
    parser = argparse.ArgumentParser(
        prog="jaxnorm norms",
        description="List the norms by name: the call of a module, its class and its function, "
        "then the formula and which elements share statistics, then the paper.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a norm; all by default")
    parser.add_argument(IMPORT, metavar="MODULE", action="append", help=IMPORT_HELP)
    names = parser.parse_args(arguments).names
    if status := import_named(arguments):
        return status
    try:
        print("\n".join(map(str, map(find, names or available_norms()))))
    except ValueError as error:
        remedy = f" A norm of your own needs {IMPORT} and the module that registers it."
        print(f"jaxnorm norms: {error}{remedy}", file=sys.stderr)
        return 2
    return 0


def import_named(arguments: list[str]) -> int:
    """Import the modules that follow ``--import``, and return the exit status, 0 for success.

    As for ``python -m``, they may lie in the working directory.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(IMPORT, dest="modules", action="append", default=[], nargs="?")
    if "" not in sys.path:
        sys.path.insert(0, "")
    for name in filter(None, parser.parse_known_args(arguments)[0].modules):
        try:
            importlib.import_module(name)
        except Exception as error:
            kind = type(error).__name__
            remedy = f" Name the module, {name[:-3]}." if name.endswith(".py") else ""
            print(f"jaxnorm: {IMPORT} {name} failed: {kind}: {error}.{remedy}", file=sys.stderr)
            return 1
    return 0
