"""``python -m jaxnorm``: the experiments' command line."""

import sys

from jaxnorm import interrupts


def main() -> int:
    """Returns the exit status; where the command is interrupted, it ends the process."""
    try:
        from jaxnorm.experiments.command import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("jaxnorm"):
            raise
        print(f"jaxnorm: the experiments need {error.name}: pip install 'jaxnorm[experiments]'.", file=sys.stderr)
        return 1
    return interrupts.command(run)


if __name__ == "__main__":
    sys.exit(main())
