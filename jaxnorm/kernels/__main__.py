"""The command ``python -m jaxnorm.kernels``, which builds the kernels for this CPU."""

import argparse
import signal
import sys
from pathlib import Path

import jax

from jaxnorm.core import plan
from jaxnorm.kernels.cpu import build, libraries


def main(arguments: list[str] | None = None, folder: Path = libraries.FOLDER) -> int:
    """Build the kernels, or say whether they are active, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog=libraries.BUILD,
        description="Builds jaxnorm's kernels for this CPU, which takes about half a minute.",
        epilog=(
            "Exit status: 0 if they are built, or active; 1 if they cannot be built, "
            "or are not active; 130 if interrupted."
        ),
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--force", action="store_true", help="build them even if they are up to date"
    )
    choice.add_argument(
        "--status",
        action="store_true",
        help="say in one line whether they are active, and if not why; build nothing",
    )
    options = parser.parse_args(arguments)
    if options.status:
        reasons = inactive(folder)
        print(
            f"Not active: {'; '.join(reasons)}."
            if reasons
            else f"Active: {libraries.usable(folder)}"
        )
        return 1 if reasons else 0
    try:
        build.build(folder, force=options.force, tell=lambda line: print(line, flush=True))
    except build.BuildError as error:
        print(f"jaxnorm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("jaxnorm: interrupted, nothing is built.", file=sys.stderr)
        return 130
    return 0


def inactive(folder: Path) -> list[str]:
    """Return every reason for which the kernels are not active."""
    reasons = [_lacking(folder)]
    try:
        wish = plan.from_environment()
        platform = jax.default_backend()
    except ValueError as error:
        reasons.append(str(error).removesuffix("."))
    except (RuntimeError, AssertionError):  # an AssertionError if a platform is not installed
        reasons.append(
            f"JAX cannot run on {jax.config.values.get('jax_platforms') or 'any platform'}"
        )
    else:
        if wish not in (None, "native"):
            reasons.append(f"left aside by {plan.VARIABLE}={wish}")
        elif wish is None and platform != "cpu":
            reasons.append(f"JAX runs on platform {platform}, and they are for cpu")
    return [reason for reason in reasons if reason]


def _lacking(folder: Path) -> str | None:
    """Return why there is no library that can be used; None if there is one."""
    if libraries.usable(folder):
        return None
    if damaged := libraries.candidates(folder):
        return (
            f"{' and '.join(f'{path} {libraries.fault(path)}' for path in damaged)}, "
            f"to be rebuilt with {libraries.BUILD}"
        )
    for other in libraries.others(folder):
        if other.suffix == ".so":
            return (
                f"{other} is built for {libraries.purpose(other)}, "
                f"to be rebuilt with {libraries.BUILD}"
            )
    return f"never built in {folder}, which {libraries.BUILD} does"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop as if interrupted
    sys.exit(main())
