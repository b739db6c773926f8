"""How fast the norms are, beside everyone else's.

    python -m bench [--only NORMS] [--shapes SHAPES] [--peers PEERS] [--platform PLATFORM]
                    [--resume]
    python -m bench --check [PLATFORM ...]

The first measures and writes results.json, a table and pictures; the second compares counters,
which do not vary from run to run, with bench/bounds.json: also those of programs for accelerators,
where their compilers are installed.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import jax
from rich.console import Console

from bench import bounds, speed, speed_report
from bench.peers import OTHERS, installed
from bench.shapes import LARGE, SHAPES
from bench.stamp import allocator, commit, versions
from jaxnorm.experiments import interrupts, report
from jaxnorm.experiments.runs import carry_out, to_resume
from jaxnorm.kernels.cpu import build, loading

PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}  # as JAX names them


def main() -> int:
    """Returns the exit status: 0, 1 for results or counters that are wrong, 130 if interrupted."""
    options, console = _parser().parse_args(), Console()
    if options.platform:
        jax.config.update("jax_platforms", PLATFORMS[options.platform])
    try:
        platform = jax.default_backend()
    # the latter, without a text, of what is not installed
    except (RuntimeError, AssertionError) as error:
        where = options.platform or "what JAX_PLATFORMS says"
        print(
            f"bench: JAX cannot run here on {where}: "
            f"{str(error) or 'it has no such device, or is installed without it'}",
            file=sys.stderr,
        )
        return 1
    if platform == "cpu":
        _build(console)
    write = options.write_bounds is not None
    if write or options.check is not None:
        counted = options.write_bounds or options.check or bounds.PLATFORMS
        return bounds.check(counted, console, write)
    # one is measured on the CPU, the other differs there alone
    elsewhere = () if platform == "cpu" else ("torch", speed_report.PLAIN)
    peers = tuple(peer for peer in options.peers if peer not in elsewhere)
    shapes = options.shapes or (tuple(SHAPES) if platform == "cpu" else (*LARGE, *SHAPES))
    settings = speed.Settings(options.only, shapes, options.dtypes, peers, options.rounds)
    measure = partial(_measure, peers=settings.peers, rounds=settings.rounds)
    missing = [peer for peer in OTHERS if not installed(peer)]
    if missing:
        console.print(f"Not installed, and left out: {', '.join(missing)}.")
    facts = {
        "platform": platform,
        "commit": commit(),
        "packages": versions(),
        "native": loading.built(),
        "imports": speed.imports(),
        "allocator": allocator(),
    }
    try:
        facts |= {"resume": options.resume, "resume_command": to_resume()}
        results = carry_out(
            settings,
            ("norm", "shape", "dtype"),
            measure,
            speed_report.summarize,
            options.out,
            console,
            **facts,
        )
    except report.ResultsError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    text = speed_report.page(results, options.out)
    (options.out / "README.md").write_text(text)
    files = speed_report.plot(options.out, results)
    console.print(speed_report.summary(results), markup=False)
    written = (options.out / report.RESULTS, options.out / "README.md", *files)
    console.print(f"Written: {', '.join(str(path) for path in written)}")
    return 0


def _measure(case: speed.Case, on_progress, peers, rounds) -> dict:
    return speed.measure(case, on_progress, peers, rounds)


def _build(console: Console) -> None:
    if loading.built():
        return
    try:
        console.print(f"Built: {build.build()}", markup=False)
    except build.BuildError as error:
        console.print(f"Without kernels: {error}", markup=False)
    loading.built.cache_clear()


def _some_of(known):
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(
            dict.fromkeys(name.strip() for name in text.split(";" if ";" in text else ","))
        )
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown {', '.join(map(repr, unknown))}: choose from {'; '.join(known)}."
            )
        return names

    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    usual = speed.Settings()
    add(
        "--only",
        metavar="NORMS",
        type=_some_of(speed.NORMS),
        default=usual.norms,
        help=f"of {', '.join(speed.NORMS)}",
    )
    shapes = "; ".join(f"{name} ({shape.where})" for name, shape in (SHAPES | LARGE).items())
    add(
        "--shapes",
        type=_some_of((*SHAPES, *LARGE)),
        help=f"of {shapes}; by default all but the last two, which are for accelerators",
    )
    add(
        "--dtypes",
        type=_some_of(speed.DTYPES),
        default=usual.dtypes,
        help=f"of {', '.join(speed.DTYPES)}",
    )
    add(
        "--peers",
        type=_some_of(speed.PEERS),
        default=usual.peers,
        help=f"with semicolons between them, of {'; '.join(speed.PEERS)}",
    )
    add(
        "--rounds",
        type=int,
        default=usual.rounds,
        help=f"measured rounds; {usual.rounds} by default",
    )
    add(
        "--platform",
        choices=PLATFORMS,
        help="what JAX runs on, by default what it chooses; PyTorch is measured on the CPU alone",
    )
    add(
        "--out",
        metavar="DIR",
        type=Path,
        default=Path("runs/speed"),
        help="folder for results and pictures; runs/speed by default",
    )
    add("--resume", action="store_true", help="go on with the interrupted measurements in --out")
    some = {"nargs": "*", "choices": bounds.PLATFORMS, "metavar": "PLATFORM"}
    on = "of programs for %(choices)s, by default all whose compilers are installed"
    add("--check", **some, help=f"compare counters with their bounds instead: {on}")
    add("--write-bounds", **some, help="make the counters the bounds instead")
    return parser


if __name__ == "__main__":
    sys.exit(interrupts.command(main))
