"""The command line: ``jaxnorm compare`` and ``jaxnorm axes``."""

import argparse
import signal
import sys
from pathlib import Path

from rich.console import Console

from jaxnorm.experiments import report
from jaxnorm.experiments.compare import Settings, compare
from jaxnorm.experiments.data import VARIABLE, DataError
from jaxnorm.experiments.picture import draw
from jaxnorm.experiments.tasks import TASKS


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0, 1 for missing data or results, 2 for wrong usage, 130 if interrupted."""
    options = _parser().parse_args(arguments)
    console = Console()
    if options.command == "axes":
        draw(options.out)
        console.print(f"Written: {options.out}")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # being stopped is being interrupted
    try:
        results = compare(_settings(options), options.out, console, data_dir=options.data_dir, resume=options.resume)
    except (DataError, report.ResultsError) as error:
        print(f"jaxnorm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    console.print(report.table(results))
    console.print(f"Written: {options.out / report.RESULTS}, {options.out / report.CURVES}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxnorm", description="Normalization for JAX and Flax: experiments on real data.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = commands.add_parser(
        "compare",
        help="train the same network with different norms",
        description="Trains the same network once per norm, variant, batch size and seed, and shows which normalization helps where.\n\n"
        + "\n".join(f"  {name:<12}{task.summary}" for name, task in TASKS.items()),
        epilog="Defaults by task:\n" + "\n".join(f"  {name:<12}{_told(task.defaults)}" for name, task in TASKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).add_argument
    add("data", nargs="?", default="digits", type=_one_of("task", TASKS), metavar="TASK", help=f"{', '.join(TASKS)}; digits by default")
    add("--data-dir", metavar="DIR", help=f"folder of data files (mnist.npz, imdb.npz); without it ${VARIABLE}, then a download of MNIST")
    add("--variants", metavar="NAMES", type=_names, help="comma-separated: dense, conv; lstm-rows, gru-pixels, ...; lstm, gru, rnn")
    add("--norms", metavar="NAMES", type=_names, help="comma-separated: none, batch, layer, rms, group, instance, switchable, layer-0.3")
    add("--batch-sizes", metavar="SIZES", type=_sizes, help="comma-separated")
    add("--seeds", metavar="N", type=_positive(int), help="number of seeds, from 0")
    add("--epochs", metavar="N", type=_positive(int), help="passes through the training data")
    add("--learning-rate", metavar="RATE", default=1e-3, type=_positive(float), help="of Adam; 1e-3 by default")
    add("--momentum", metavar="M", type=_momentum, help="weight of the old value in batch norm's running average")
    add("--train-examples", metavar="N", type=_positive(int), help="use only the first N training examples")
    add(
        "--out",
        metavar="DIR",
        default=Path("runs/compare"),
        type=Path,
        help="folder for results.json and curves.png; runs/compare by default",
    )
    add("--resume", action="store_true", help="go on with the interrupted comparison in --out")
    axes = commands.add_parser("axes", help="draw which elements each norm pools", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    axes.add_argument("--out", metavar="FILE", default=Path("runs/axes.png"), type=Path, help="the picture")
    return parser


def _told(defaults) -> str:
    return ", ".join(f"{name} {','.join(map(str, value)) if isinstance(value, tuple) else value}" for name, value in defaults.items())


def _settings(options: argparse.Namespace) -> Settings:
    task = TASKS[options.data]
    chosen = {name: default if getattr(options, name) is None else getattr(options, name) for name, default in task.defaults.items()}
    for variant in chosen["variants"]:
        if variant not in task.variants:
            _parser().error(f"unknown variant {variant!r} of {options.data}: choose from {', '.join(task.variants)}.")
    known = {norm: None for variant in chosen["variants"] for norm in task.variants[variant]}
    for norm in chosen["norms"]:
        if norm not in known:
            other = [variant for variant, norms in task.variants.items() if norm in norms]
            hint = f" {norm} is for --variants {','.join(other)}." if other else ""
            _parser().error(f"unknown norm {norm!r} for {', '.join(chosen['variants'])}: choose from {', '.join(known)}.{hint}")
    return Settings(data=options.data, learning_rate=options.learning_rate, train_examples=options.train_examples, **chosen)


def _one_of(what: str, known):
    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"unknown {what} {text!r}: choose from {', '.join(known)}.")
        return text

    return parse


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if "" in names:
        raise argparse.ArgumentTypeError(f"must be names with commas between them: got {text!r}.")
    return names


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_positive(int)(size) for size in text.split(",")))


def _positive(kind: type):
    def parse(text: str):
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {'an integer' if kind is int else 'a number'}: got {text!r}.") from None
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
