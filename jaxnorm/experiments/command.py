"""Run the command line: ``jaxnorm compare``, ``jaxnorm explain`` and ``jaxnorm axes``."""

import argparse
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from rich.console import Console

from jaxnorm import __version__
from jaxnorm.experiments import explain, figures, report, samples
from jaxnorm.experiments.compare import Settings, compare
from jaxnorm.experiments.data import VARIABLE, DataError
from jaxnorm.experiments.interrupts import INTERRUPTED
from jaxnorm.experiments.models import CONV, VARIANTS
from jaxnorm.experiments.picture import draw
from jaxnorm.experiments.runs import to_resume
from jaxnorm.experiments.tasks import TASKS
from jaxnorm.experiments.training import OPTIMIZERS
from jaxnorm.norms.command import IMPORT, IMPORT_HELP


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status.

    The status is 0 after success, 1 where data are missing or results cannot be read or
    written, 2 after wrong usage, and 130 after an interrupt.
    """
    options = _parser().parse_args(arguments)
    console = Console()
    try:
        written = {"axes": _axes, "explain": _explain, "compare": _compare}[options.command](
            options, console, to_resume(arguments)
        )
    except (DataError, report.ResultsError) as error:
        print(f"jaxnorm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    console.print(f"Written: {', '.join(map(str, written))}")
    return 0


def _axes(options: argparse.Namespace, console: Console, resume_command: str) -> list[Path]:
    draw(options.out)
    return [options.out]


def _compare(options: argparse.Namespace, console: Console, resume_command: str) -> list[Path]:
    keywords = {
        "data_dir": options.data_dir,
        "resume": options.resume,
        "jobs": options.jobs or TASKS[options.data].jobs,
        "resume_command": resume_command,
    }
    results = compare(_settings(options), options.out, console, **keywords)
    return [
        options.out / file
        for file in (
            report.RESULTS,
            *figures.pictures(results["settings"]),
            *samples.pictures(results),
        )
    ]


def _explain(options: argparse.Namespace, console: Console, resume_command: str) -> list[Path]:
    given = {
        name: getattr(options, name) for name in EXPLAINED if getattr(options, name) is not None
    }
    keywords = {
        "data_dir": options.data_dir,
        "resume": options.resume,
        "resume_command": resume_command,
    }
    explain.explain(explain.Settings(**given), options.out, console, **keywords)
    return [options.out]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxnorm",
        description=(
            "Normalization for JAX and Flax: the statistics of data sets, "
            "and experiments on real data."
        ),
    )
    parser.add_argument("--version", action="version", version=f"jaxnorm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # fit, show, convert, norms and check are listed for --help alone: __main__.py runs them without
    # this parser
    commands.add_parser("fit", help="fit the statistics of a data set in files", add_help=False)
    commands.add_parser("show", help="print the statistics that fit found", add_help=False)
    convert = "write statistics in the format of another library"
    commands.add_parser("convert", help=convert, add_help=False)
    commands.add_parser("norms", help="list the norms by name", add_help=False)
    words = "compare a Flax model with Flax's norms and with jaxnorm's"
    commands.add_parser("check", help=words, add_help=False)
    add = commands.add_parser(
        "compare",
        help="train the same network with different norms",
        description=(
            "Train the same network once per norm, variant, batch size and seed, "
            "and show which norm helps where.\n\n"
        )
        + "\n".join(f"  {name:<18}{task.summary}" for name, task in TASKS.items()),
        epilog="Defaults by task:\n"
        + "\n".join(
            f"  {name:<18}{_format_defaults(task.defaults)}" for name, task in TASKS.items()
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).add_argument
    add(
        "data",
        nargs="?",
        default="digits",
        type=_one_of("task", TASKS),
        metavar="TASK",
        help=f"{', '.join(TASKS)}; digits by default",
    )
    add(
        "--data-dir",
        metavar="DIR",
        help=f"folder of data files (.npz); without it ${VARIABLE}, then a download of MNIST",
    )
    add(
        "--variants",
        metavar="NAMES",
        type=_names,
        help=f"comma-separated: {_all(task.variants for task in TASKS.values())}",
    )
    norms = _all(norms for task in TASKS.values() for norms in task.variants.values())
    add("--norms", metavar="NAMES", type=_names, help=f"comma-separated: {norms}")
    add(IMPORT, metavar="MODULE", action="append", help=IMPORT_HELP)
    add("--batch-sizes", metavar="SIZES", type=_sizes, help="comma-separated")
    add("--seeds", metavar="N", type=_positive(int), help="number of seeds, from 0")
    add("--epochs", metavar="N", type=_positive(int), help="passes over the training data")
    add(
        "--learning-rate",
        metavar="RATE",
        type=_positive(float),
        help="learning rate of the optimizer",
    )
    add(
        "--optimizer",
        metavar="NAME",
        default="adam",
        type=_one_of("optimizer", OPTIMIZERS),
        help="adam (default) or sgd",
    )
    add(
        "--momentum",
        metavar="M",
        type=_momentum,
        help="weight of the old value in batch norm's running average",
    )
    add(
        "--train-examples",
        metavar="N",
        type=_positive(int),
        help="use only the first N training examples",
    )
    several = ", ".join(f"{task.jobs} for {name}" for name, task in TASKS.items() if task.jobs > 1)
    add(
        "--jobs",
        metavar="N",
        type=_positive(int),
        help=f"number of runs at a time; affects steps/s alone; 1 by default, {several}",
    )
    add(
        "--out",
        metavar="DIR",
        default=Path("runs/compare"),
        type=Path,
        help="folder for results.json and pictures; runs/compare by default",
    )
    add("--resume", action="store_true", help="continue the interrupted comparison in --out")
    _add_explain(commands)
    axes = commands.add_parser(
        "axes",
        help="draw which elements share statistics under each norm",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    axes.add_argument(
        "--out",
        metavar="FILE",
        default=Path("runs/axes.png"),
        type=_picture,
        help="file of the picture",
    )
    return parser


# the settings that `jaxnorm explain` takes as options; the others keep their defaults
EXPLAINED = ("data", "variant", "norms", "batch_size", "seeds", "epochs", "learning_rate")


def _add_explain(commands) -> None:
    usual = explain.Settings()
    add = commands.add_parser(
        "explain",
        help="measure why norms help",
        description=(
            "Train LeNet with each norm after its convolutions, by plain gradient descent, and "
            "measure on the way: the loss along the gradient, the drift of the layers' inputs and "
            "gradients, the effect of scaling the weights, and the blend that switchable norm "
            "learns at several batch sizes. Write four pictures and a paragraph for each."
        ),
    ).add_argument
    images, variants = ("digits", "mnist"), [name for name in VARIANTS if name != "dense"]
    norms = [norm for norm in CONV if norm != explain.BLEND]
    add(
        "data",
        nargs="?",
        type=_one_of("data", images),
        metavar="DATA",
        help="digits (part of scikit-learn; default) or mnist",
    )
    add("--data-dir", metavar="DIR", help="folder of mnist.npz")
    add(
        "--variant",
        metavar="NAME",
        type=_one_of("variant", variants),
        help=f"{' or '.join(variants)}; {usual.variant} by default",
    )
    add(
        "--norms",
        metavar="NAMES",
        type=_known(norms),
        help=f"comma-separated: {', '.join(norms)}; {','.join(usual.norms)} by default",
    )
    add(IMPORT, metavar="MODULE", action="append", help=IMPORT_HELP)
    add("--batch-size", metavar="SIZE", type=_positive(int), help=f"{usual.batch_size} by default")
    add("--seeds", metavar="N", type=_positive(int), help=f"{usual.seeds} by default")
    add("--epochs", metavar="N", type=_positive(int), help=f"{usual.epochs} by default")
    add(
        "--learning-rate",
        metavar="RATE",
        type=_positive(float),
        help=f"{usual.learning_rate} by default",
    )
    add(
        "--out",
        metavar="DIR",
        default=Path("runs/explain"),
        type=Path,
        help="folder for results and pictures; runs/explain by default",
    )
    add("--resume", action="store_true", help="continue the interrupted measurements in --out")


def _all(names: Iterable[Iterable[str]]) -> str:
    """Return the distinct names of several collections, with commas between them."""
    return ", ".join(dict.fromkeys(chain.from_iterable(names)))


def _format_defaults(defaults) -> str:
    return ", ".join(
        f"{name} {','.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in defaults.items()
    )


def _settings(options: argparse.Namespace) -> Settings:
    """Return the settings of a comparison: the options, and the task's defaults for the rest.

    A norm or variant that the task does not have ends the program with status 2.
    """
    task = TASKS[options.data]
    selected = {
        name: default if getattr(options, name) is None else getattr(options, name)
        for name, default in task.defaults.items()
    }
    for variant in selected["variants"]:
        if variant not in task.variants:
            _parser().error(
                f"unknown variant {variant!r} of {options.data}: choose from "
                f"{', '.join(task.variants)}."
            )
    # a dict keeps the order of the norms, which a set would lose, and drops repeated
    # ones
    known = {norm: None for variant in selected["variants"] for norm in task.variants[variant]}
    for norm in selected["norms"]:
        if norm not in known:
            other = [variant for variant, norms in task.variants.items() if norm in norms]
            hint = f" {norm} is for --variants {','.join(other)}." if other else ""
            _parser().error(
                f"unknown norm {norm!r} for {', '.join(selected['variants'])}: choose from "
                f"{', '.join(known)}.{hint}"
            )
    shared = {"optimizer": options.optimizer, "train_examples": options.train_examples}
    return Settings(data=options.data, **(shared | selected))


def _one_of(what: str, known):
    """Return a parser of one name out of those known."""

    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(
                f"unknown {what} {text!r}: choose from {', '.join(known)}."
            )
        return text

    return parse


def _known(known):
    """Return a parser of norms with commas between them."""

    def parse(text: str) -> tuple[str, ...]:
        return tuple(map(_one_of("norm", known), _names(text)))

    return parse


def _picture(text: str) -> Path:
    """Return the path of the picture that ``--out`` names.

    A folder gets the file ``axes.png``, and a name without a suffix the suffix
    ``.png``.

    Raises:
      argparse.ArgumentTypeError: the suffix is no format that matplotlib writes.
    """
    path = Path(text)
    if path.is_dir() or text.endswith("/"):
        return path / "axes.png"
    if not path.suffix:
        return path.with_name(path.name + ".png")
    if path.suffix.lower() not in figures.formats():
        raise argparse.ArgumentTypeError(
            f"must end in one of {', '.join(figures.formats())}: got {text!r}."
        )
    return path


def _names(text: str) -> tuple[str, ...]:
    """Return the distinct names of a comma-separated text."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if "" in names:
        raise argparse.ArgumentTypeError(f"must be names with commas between them: got {text!r}.")
    return names


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_positive(int)(size) for size in text.split(",")))


def _positive(kind: type):
    """Return a parser of a positive, finite number of this type."""

    def parse(text: str):
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"must be {'an integer' if kind is int else 'a number'}: got {text!r}."
            ) from None
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be positive and finite: got {text}.")
        return value

    return parse


def _momentum(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number: got {text!r}.") from None
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must lie in [0, 1]: got {text}.")
    return value
