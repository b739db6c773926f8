"""How fast the kernels in a wheel are, which are compiled for a level of processors, beside those built on the spot, for this one.

    python -m build --wheel && python -m bench.wheel dist/jaxnorm-*-manylinux*.whl

Both are called through the same installed wheel, in processes in turn; writes wheel.json and wheel.md.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.progress import track

from bench import speed
from bench.peers import JAX_PEERS
from bench.stamp import commit
from jaxnorm.experiments.report import machine

HERE = Path(__file__).parent
WAYS = ("of the wheel", "built here")


def install(wheel: Path, folder: Path) -> Path:
    """An environment with the wheel and what measuring takes; returns its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", f"jaxnorm[experiments] @ {wheel.resolve().as_uri()}"], check=True)
    return python


class Worker:
    """A process that measures the cases it is told, with the kernels that lie in its cache, or with those of the wheel."""

    def __init__(self, python: Path, folder: Path, way: str):
        environment = os.environ | {"XDG_CACHE_HOME": str(folder / way), "JAX_PLATFORMS": "cpu"}
        command = [python, "-m", "bench.wheel", "--worker"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, cwd=folder, env=environment, text=True, bufsize=1, **pipes)

    def ask(self, text: str) -> list[float]:
        print(text, file=self.process.stdin)
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def work() -> None:
    """A line with a case prepares it; "go" gives the milliseconds of its output, and of its output and gradients."""
    calls: list = []
    for line in map(str.strip, sys.stdin):
        if line != "go":
            found = speed.jax_calls(JAX_PEERS["jaxnorm"]()[line.split()[0]], speed.Case(*line.split()))[0]
            calls = [(call, speed.repeats_for(call)) for call in (found["forward"], found["gradients"])]
        print(json.dumps([1e3 * speed.sample(*call)[0] for call in calls]), flush=True)


def measure(workers: dict[str, Worker], rounds: int) -> Iterator[dict]:
    """The median of each case's milliseconds, by way; both ways take turns within every round."""
    cases = [f"{case.norm} {case.shape} {case.dtype}" for case in speed.Settings().runs() if case.norm != "switchable"]  # it has no kernel
    for case in track(cases, "Measuring"):
        for worker in workers.values():
            worker.ask(case)
        times = [[worker.ask("go") for worker in workers.values()] for _ in range(rounds)]
        for kind, medians in zip(("output", "output and gradients"), np.median(times, 0).T.tolist(), strict=True):
            yield {"case": f"{case}, {kind}", "ms": dict(zip(workers, medians, strict=True))}
    for worker in workers.values():
        worker.end()


def page(results: dict) -> str:
    machine, cases = results["machine"], results["cases"]
    ratios = np.array([case["ms"][WAYS[0]] / case["ms"][WAYS[1]] for case in cases])
    rows = [
        f"| {case['case']} | {case['ms'][WAYS[0]]:.3f} | {case['ms'][WAYS[1]]:.3f} | {ratio:.2f} |"
        for case, ratio in zip(cases, ratios, strict=True)
    ]
    return (
        f"""# Kernels of a wheel beside those built on the spot

`{results["command"]}`: {machine["processor"]}, {machine["cores"]} cores, jax {machine["jax"]}, commit {results["commit"]}.
Milliseconds, the median of {results["rounds"]} rounds, in which both take turns.

Median of the ratios {np.median(ratios):.3f}, geometric mean {np.exp(np.log(ratios).mean()):.3f};
at most 1.05 in {(ratios <= 1.05).sum()} of {len(ratios)} cases.

| | of the wheel | built here | ratio |
|---|---|---|---|
"""
        + "\n".join(rows)
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.wheel", description=__doc__.split("\n", 1)[0])
    parser.add_argument("wheel", type=Path, nargs="?", default=Path(), help="a wheel with kernels for this machine")
    parser.add_argument("--rounds", type=int, default=31, help="%(default)s by default")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the two files")
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
        built = os.environ | {"XDG_CACHE_HOME": str(folder / WAYS[1])}
        subprocess.run([python, "-m", "jaxnorm.kernels"], cwd=folder, env=built, check=True, capture_output=True)
        cases = list(measure({way: Worker(python, folder, way) for way in WAYS}, options.rounds))
    facts = {"command": f"python -m bench.wheel {options.wheel.name}", "commit": commit(), "machine": machine()}
    results = facts | {"rounds": options.rounds, "cases": cases}
    (options.out / "wheel.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "wheel.md").write_text(page(results))
    print(f"Written: {options.out / 'wheel.json'}, {options.out / 'wheel.md'}")


if __name__ == "__main__":
    main()
