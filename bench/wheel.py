"""How fast the kernels in a wheel are, which are compiled for a level of processors, beside those
built on the spot, for this one.

    pip install build && python -m build --wheel
    python -m bench.wheel dist/jaxnorm-*-manylinux*.whl

All are called through the same installed wheel, in processes in turn, which are started anew for
every sitting, since where the memory of a process lies makes a difference to large arrays. The
kernels that are built here take part twice: how far these are from each other is what the machine
adds. Writes wheel.json and wheel.md.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
from rich.progress import track

from bench import speed
from bench.peers import JAX_PEERS
from bench.stamp import commit
from jaxnorm.experiments.report import machine

HERE = Path(__file__).parent
# of each way, the folder with kernels
CACHES = {"of the wheel": "empty", "built here": "built", "built here, again": "built"}
WHEEL, BUILT, AGAIN = WAYS = tuple(CACHES)


def install(wheel: Path, folder: Path) -> Path:
    """An environment with the wheel and what measuring takes; returns its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run(
        [
            python,
            "-m",
            "pip",
            "install",
            "-q",
            f"jaxnorm[experiments] @ {wheel.resolve().as_uri()}",
        ],
        check=True,
    )
    return python


class Worker:
    """A process that measures the cases it is told, with the kernels that lie in its cache, or with
    those of the wheel.
    """

    def __init__(self, python: Path, folder: Path, way: str):
        environment = os.environ | {
            "XDG_CACHE_HOME": str(folder / CACHES[way]),
            "JAX_PLATFORMS": "cpu",
        }
        command = [python, "-m", "bench.wheel", "--worker"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, text=True, bufsize=1, **pipes
        )

    def ask(self, text: str) -> list[float]:
        print(text, file=self.process.stdin)
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def work() -> None:
    """A line with a case prepares it; "go" gives the milliseconds of its output, and of its output
    and gradients.
    """
    calls: list = []
    for line in map(str.strip, sys.stdin):
        if line != "go":
            found = speed.jax_calls(
                JAX_PEERS["jaxnorm"]()[line.split()[0]], speed.Case(*line.split())
            )[0]
            calls = [
                (call, speed.repeats_for(call)) for call in (found["forward"], found["gradients"])
            ]
        print(json.dumps([1e3 * speed.sample(*call)[0] for call in calls]), flush=True)


def measure(start: Callable[[], dict[str, Worker]], sittings: int, rounds: int) -> list[dict]:
    """For each case the milliseconds by way, one median for each sitting; all ways take turns
    within every round.
    """
    # it has no kernel
    cases = [
        f"{case.norm} {case.shape} {case.dtype}"
        for case in speed.Settings().runs()
        if case.norm != "switchable"
    ]
    kinds = ("output", "output and gradients")
    found = {f"{case}, {kind}": {way: [] for way in WAYS} for case in cases for kind in kinds}
    for sitting in range(sittings):
        workers = start()
        for case in track(cases, f"Sitting {sitting + 1} of {sittings}"):
            for worker in workers.values():
                worker.ask(case)
            times = [
                {way: workers[way].ask("go") for way in np.roll(WAYS, turn)}
                for turn in range(rounds)
            ]
            for kind, way in product(range(len(kinds)), WAYS):
                found[f"{case}, {kinds[kind]}"][way].append(
                    statistics.median(each[way][kind] for each in times)
                )
        for worker in workers.values():
            worker.end()
    return [{"case": case, "ms": ms} for case, ms in found.items()]


def ratios(cases: list[dict], way: str) -> np.ndarray:
    """Of each case to the kernels built here: the median of the sittings' ratios."""
    return np.array([np.median(np.divide(case["ms"][way], case["ms"][BUILT])) for case in cases])


def summary(ratios: np.ndarray) -> str:
    middle, mean = np.median(ratios), np.exp(np.log(ratios).mean())
    return (
        f"median {middle:.3f}, geometric mean {mean:.3f}, "
        f"at most 1.05 in {(ratios <= 1.05).sum()} of {len(ratios)} cases"
    )


def page(results: dict) -> str:
    machine, cases = results["machine"], results["cases"]
    own, again = (ratios(cases, way) for way in (WHEEL, AGAIN))
    rows = [
        f"| {case['case']} | {np.median(case['ms'][WHEEL]):.3f} | "
        f"{np.median(case['ms'][BUILT]):.3f} | {ratio:.2f} | {noise:.2f} |"
        for case, ratio, noise in zip(cases, own, again, strict=True)
    ]
    return (
        f"""# Kernels of a wheel beside those built on the spot

`{results["command"]}`: {machine["processor"]}, {machine["cores"]} cores, jax {machine["jax"]},
commit {results["commit"]}. Milliseconds, medians of {results["sittings"]} sittings of
{results["rounds"]} rounds, in which all take turns; ratios are medians of the sittings'.

- The wheel's to those built here: {summary(own)}.
- Those built here to themselves, in another process: {summary(again)}.

| | of the wheel | built here | ratio | to themselves |
|---|---|---|---|---|
"""
        + "\n".join(rows)
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.wheel", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "wheel", type=Path, nargs="?", default=Path(), help="a wheel with kernels for this machine"
    )
    parser.add_argument("--sittings", type=int, default=3, help="%(default)s by default")
    parser.add_argument("--rounds", type=int, default=7, help="%(default)s by default")
    parser.add_argument(
        "--out", type=Path, default=HERE / "results", help="folder of the two files"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work()
    if not options.wheel.is_file():
        sys.exit(f"bench.wheel: there is no wheel {options.wheel}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = install(options.wheel, folder / "environment")
        shutil.copytree(HERE, folder / "bench", ignore=shutil.ignore_patterns("results"))
        built = os.environ | {"XDG_CACHE_HOME": str(folder / CACHES[BUILT])}
        subprocess.run(
            [python, "-m", "jaxnorm.kernels"],
            cwd=folder,
            env=built,
            check=True,
            capture_output=True,
        )
        cases = measure(
            lambda: {way: Worker(python, folder, way) for way in WAYS},
            options.sittings,
            options.rounds,
        )
    facts = {
        "command": f"python -m bench.wheel {options.wheel.name}",
        "commit": commit(),
        "machine": machine(),
    }
    results = facts | {"sittings": options.sittings, "rounds": options.rounds, "cases": cases}
    (options.out / "wheel.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "wheel.md").write_text(page(results))
    print(f"Written: {options.out / 'wheel.json'}, {options.out / 'wheel.md'}")


if __name__ == "__main__":
    main()
