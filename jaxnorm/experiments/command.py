"""The command line: ``jaxnorm compare`` and ``jaxnorm axes``."""

import argparse
import signal
import sys
from pathlib import Path

from rich.console import Console

from jaxnorm.experiments import report
from jaxnorm.experiments.compare import Settings, compare
from jaxnorm.experiments.data import LOADERS, VARIABLE, DataError
from jaxnorm.experiments.models import PLACES
from jaxnorm.experiments.picture import draw

EPOCHS = {"digits": 20, "mnist": 5}


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
        description="Trains the same LeNet once per norm, batch size and seed, and shows which normalization helps where.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    ).add_argument
    add("--data", default="digits", type=_one_of("data set", LOADERS), metavar="NAME", help=f"data set: {', '.join(LOADERS)}")
    add("--data-dir", metavar="DIR", help=f"folder with mnist.npz; without it ${VARIABLE}, then scikit-learn's download")
    add("--where", default="dense", type=_one_of("place", PLACES), metavar="PART", help="part of the network with norms: dense or conv")
    add("--norms", metavar="NAMES", default="none,batch,layer", type=_names, help=f"comma-separated, of {', '.join(PLACES['conv'])}")
    add("--batch-sizes", metavar="SIZES", default="128,8", type=_sizes, help="comma-separated")
    add("--seeds", metavar="N", default=3, type=_positive(int), help="number of seeds, from 0")
    add("--epochs", metavar="N", type=_positive(int), help=f"{', '.join(f'{n} for {name}' for name, n in EPOCHS.items())}")
    add("--learning-rate", metavar="RATE", default=1e-3, type=_positive(float), help="of Adam")
    add("--momentum", metavar="M", default=0.99, type=_momentum, help="weight of the old value in batch norm's running average")
    add("--train-examples", metavar="N", type=_positive(int), help="use only the first N training examples")
    add("--out", metavar="DIR", default=Path("runs/compare"), type=Path, help="folder for results.json and curves.png")
    add("--resume", action="store_true", help="go on with the interrupted comparison in --out")
    axes = commands.add_parser("axes", help="draw which elements each norm pools", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    axes.add_argument("--out", metavar="FILE", default=Path("runs/axes.png"), type=Path, help="the picture")
    return parser


def _settings(options: argparse.Namespace) -> Settings:
    known = PLACES[options.where]
    for norm in options.norms:
        if norm not in known:
            hint = " It needs images: pass --where conv." if norm in PLACES["conv"] else ""
            _parser().error(f"unknown norm {norm!r} for the {options.where} part: choose from {', '.join(known)}.{hint}")
    return Settings(
        data=options.data,
        norms=options.norms,
        where=options.where,
        batch_sizes=options.batch_sizes,
        seeds=options.seeds,
        epochs=options.epochs or EPOCHS[options.data],
        learning_rate=options.learning_rate,
        momentum=options.momentum,
        train_examples=options.train_examples,
    )


def _one_of(what: str, known):
    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"unknown {what} {text!r}: choose from {', '.join(known)}.")
        return text

    return parse


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if "" in names:
        raise argparse.ArgumentTypeError(f"norms must be names with commas between them: got {text!r}.")
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
