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
from pathlib import Path

import numpy as np
from rich.progress import track

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


def measure(python: Path, folder: Path, way: str, rounds: int) -> dict[tuple[str, ...], float]:
    """Milliseconds by norm, shape, dtype and kind, of ``python -m bench`` in a process of its own."""
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / way), "JAX_PLATFORMS": "cpu"}
    command = [python, "-m", "bench", "--peers", "jaxnorm", "--rounds", str(rounds), "--out", str(folder / "out")]
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    runs = json.loads((folder / "out" / "results.json").read_text())["runs"]
    shutil.rmtree(folder / "out")
    case = lambda run: tuple(run[part] for part in ("norm", "shape", "dtype"))  # noqa: E731
    return {
        (*case(run), kind): run["peers"]["jaxnorm"][kind]["ms"]
        for run in runs
        if run["norm"] != "switchable"  # which has no kernel
        for kind in ("forward", "gradients")
    }


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
Milliseconds, the least of {results["turns"]} turns of {results["rounds"]} rounds.

Geometric mean of the ratios {np.exp(np.log(ratios).mean()):.3f}; at most 1.05 in {(ratios <= 1.05).sum()} of {len(ratios)} cases.

| | of the wheel | built here | ratio |
|---|---|---|---|
"""
        + "\n".join(rows)
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.wheel", description=__doc__.split("\n", 1)[0])
    parser.add_argument("wheel", type=Path, help="a wheel with kernels for this machine")
    parser.add_argument("--turns", type=int, default=3, help="of both; %(default)s by default")
    parser.add_argument("--rounds", type=int, default=5, help="in each turn; %(default)s by default")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the two files")
    options = parser.parse_args()
    if not options.wheel.is_file():
        sys.exit(f"bench.wheel: there is no wheel {options.wheel}")
    found: dict[tuple[str, ...], dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = install(options.wheel, folder / "environment")
        shutil.copytree(HERE, folder / "bench", ignore=shutil.ignore_patterns("results"))
        built = os.environ | {"XDG_CACHE_HOME": str(folder / WAYS[1])}
        subprocess.run([python, "-m", "jaxnorm.kernels"], cwd=folder, env=built, check=True, capture_output=True)
        for way in track(WAYS * options.turns, "Measuring"):
            for case, ms in measure(python, folder, way, options.rounds).items():
                times = found.setdefault(case, {})
                times[way] = min(ms, times.get(way, ms))
    facts = {"command": f"python -m bench.wheel {options.wheel.name}", "commit": commit(), "machine": machine()}
    cases = [{"case": " ".join(case), "ms": times} for case, times in found.items()]
    results = facts | {"turns": options.turns, "rounds": options.rounds, "cases": cases}
    (options.out / "wheel.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "wheel.md").write_text(page(results))
    print(f"Written: {options.out / 'wheel.json'}, {options.out / 'wheel.md'}")


if __name__ == "__main__":
    main()
