"""``python -m jaxnorm.kernels``: builds the kernels for this CPU."""

import argparse
import sys

from jaxnorm.kernels import build


def main() -> int:
    """Builds; returns the exit status."""
    argparse.ArgumentParser(prog="python -m jaxnorm.kernels", description="Builds jaxnorm's kernels for this CPU.").parse_args()
    try:
        print(f"Built: {build.build()}")
    except build.BuildError as error:
        print(f"jaxnorm: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
