"""Fitting a data set that outgrows memory: accuracy, time and memory of ours and of others, over
files of float32.

    python -m bench.normalizers [--gib 4]

writes bench/results/normalizers.json and normalizers.md. The files are made of seeded normal
numbers (deviation 1, means 0, 1000 and 10,000, 256 features), read chunk by chunk, and removed.
Each peer runs in a process of its own; reading is not part of its time. Memory is the most that
the process holds beyond what it held before the first chunk, without the pages of files. Times are
those of the file of mean 1000. Keras adapts to chunks only where TensorFlow is installed, with
whatever backend (`pip install tensorflow-cpu`). The robot libraries' classes are read from their
source, of which OPENPI_NORMALIZE and LEROBOT_COMPUTE_STATS name the files: see
bench/normalizers_peers.py. A peer that is not installed keeps the row that it has.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.normalizers_peers import PEERS, TRUTH

FEATURES, ROWS = 256, 65_536
MEANS = (0, 1000, 10_000)
TIMED = 1000
CHUNK = ROWS * FEATURES * 4  # bytes: 64 MiB
RUNS = 3


class Chunks:
    """The chunks of a file, and the seconds that reading them took."""

    shape = (ROWS, FEATURES)

    def __init__(self, path: str):
        self.path, self.seconds, self.cpu_seconds = path, 0.0, 0.0

    def __len__(self) -> int:
        return os.path.getsize(self.path) // CHUNK

    def read(self, number: int) -> np.ndarray:
        began, cpu = time.perf_counter(), time.thread_time()
        chunk = np.fromfile(self.path, np.float32, CHUNK // 4, offset=number * CHUNK)
        self.seconds += time.perf_counter() - began
        self.cpu_seconds += time.thread_time() - cpu
        return chunk.reshape(self.shape)

    def __iter__(self) -> Iterator[np.ndarray]:
        return map(self.read, range(len(self)))


def write(path: str, chunks: int, mean: float) -> None:
    with open(path, "wb") as file:
        for seed in range(chunks):
            rng = np.random.default_rng(seed)
            x = rng.standard_normal((ROWS, FEATURES), np.float32) + np.float32(mean)
            x.tofile(file)


def measure(peer: str, path: str) -> dict:
    """What one process finds: mean, variance, quantiles, seconds and bytes."""
    run, chunks, done, most = PEERS[peer](), Chunks(path), threading.Event(), [0]
    before = _held()

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], _held())

    threading.Thread(target=watch, daemon=True).start()
    began, cpu = time.perf_counter(), time.process_time()
    found = run(chunks)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    done.set()
    facts = {
        "seconds": seconds - chunks.seconds,
        "cpu_seconds": cpu - chunks.cpu_seconds,
        "chunks_held": (most[0] - before) / CHUNK,
        "rank_error": rank_error(chunks, found.quantiles),
    }
    mean, var = (np.asarray(each, float).tolist() for each in found[:2])
    return facts | {"mean": mean, "var": var}


def rank_error(chunks: Chunks, quantiles: dict[float, np.ndarray]) -> float | None:
    """The largest distance of a quantile's rank in the data from the rank it stands for."""
    if not quantiles:
        return None
    below = {rank: np.zeros((2, FEATURES)) for rank in quantiles}
    for chunk in chunks:
        for rank, values in quantiles.items():
            below[rank] += [(chunk < values).sum(0), (chunk <= values).sum(0)]
    rows = len(chunks) * ROWS
    errors = [
        np.maximum(low / rows - rank, rank - high / rows).max()
        for rank, (low, high) in below.items()
    ]
    return float(max(*errors, 0))


def _held() -> int:
    """Bytes of memory of this process that no file backs."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon")
    )
    return int(line.split()[1]) * 1024


def summarize(runs: list[dict], truth: dict) -> dict:
    """Median time and the largest relative errors."""
    mean, var = (np.array(truth[name]) for name in ("mean", "var"))
    if len(runs[0]["mean"]) == 1:  # one group of all features
        mean, var = mean.mean(keepdims=True), (var + (mean - mean.mean()) ** 2).mean(keepdims=True)
    # a mean of 0 has no relative error: it is held against the deviation
    mean_error = np.abs(np.array(runs[0]["mean"]) - mean) / np.maximum(np.abs(mean), np.sqrt(var))
    var_error = np.abs(np.array(runs[0]["var"]) / var - 1)
    medians = {
        name: float(np.median([run[name] for run in runs])) for name in ("seconds", "cpu_seconds")
    }
    errors = {"mean_error": float(mean_error.max()), "var_error": float(var_error.max())}
    held = {"chunks_held": max(run["chunks_held"] for run in runs)}
    return errors | medians | held | {"rank_error": runs[0]["rank_error"], "runs": len(runs)}


def report(rows: dict[str, dict], facts: dict) -> str:
    means = [f"mean {mean:,}" for mean in MEANS]
    lines = [
        f"| variance's error at | {' | '.join(means)} | rank's error | seconds a GiB | CPU "
        "seconds a GiB | memory, chunks | GiB | runs |",
        "|" + "---|" * (len(MEANS) + 7),
    ]
    for name, row in rows.items():
        errors = [_error(row.get(str(mean))) for mean in MEANS]
        timed = row[str(TIMED)]
        ranks = [found["rank_error"] for key, found in row.items() if key.isdecimal()]
        rank = f"{100 * max(ranks):.3f} %" if ranks[0] is not None else ""
        lines.append(
            f"| {name} | {' | '.join(errors)} | {rank} | {timed['seconds'] / timed['gib']:.2f} | "
            f"{timed['cpu_seconds'] / timed['gib']:.2f} | {timed['chunks_held']:.1f} | "
            f"{timed['gib']:g} | {timed['runs']} |"
        )
    head = (
        "Fitting files of float32, deviation 1, 256 features, in chunks of 64 MiB (python -m "
        "bench.normalizers).\n"
        "Errors: the largest of all features, of variances relative to two passes in float64, of "
        "ranks the distance of the 1 % and 99 % quantiles from those ranks, at any of the means. "
        "Time: without reading, at mean 1000, median of the runs; other work on the machine shows "
        "less in CPU seconds; "
        f"{facts['processor']}, {facts['cores']} cores. Memory: the most beyond what was held "
        "before the first chunk, the chunk itself included, in chunks. An empty cell was not "
        "measured.\n"
    )
    return head + "\n" + "\n".join(lines) + "\n"


def _error(found: dict | None) -> str:
    if found is None:
        return ""
    error = found["var_error"]
    return f"{error:.0e}" if error < 1e-3 else f"{100 * error:,.2g} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--runs", type=int, default=RUNS, help="at mean 1000; one at the others")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PEERS,
        metavar="PEER",
        help="measure these anew; the rows of others stay as they are",
    )
    parser.add_argument(
        "--peer", choices=PEERS, help="measure this one over --file, in this process"
    )
    parser.add_argument("--file", help="with --peer: the data")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if options.peer:
        print(json.dumps(measure(options.peer, options.file)))
        return
    from bench.stamp import commit, versions
    from jaxnorm.experiments.report import machine

    result = options.out / "normalizers.json"
    rows = json.loads(result.read_text())["rows"] if options.only and result.exists() else {}
    for mean in MEANS:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "data.f32")
            write(path, math.ceil(options.gib * 2**30 / CHUNK), mean)
            times = options.runs if mean == TIMED else 1
            runs = measure_in_turn(options.only or list(PEERS), path, times)
        for name, found in runs.items():
            # the truth is measured with all others, and has a row only where it was asked for
            if found and name in (options.only or PEERS):
                row = rows.setdefault(name, {}) | {"commit": commit()}
                own = summarize(found, runs[TRUTH][0]) | {"gib": options.gib}
                rows[name] = row | {str(mean): own}
    facts = machine() | versions()
    options.out.mkdir(exist_ok=True)
    result.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")
    text = report({name: rows[name] for name in PEERS if name in rows}, facts)
    (options.out / "normalizers.md").write_text(text)
    print(text)


def measure_in_turn(peers: list[str], path: str, times: int) -> dict[str, list[dict]]:
    """Each in a process of its own; the truth is measured with them."""
    runs: dict[str, list[dict]] = {name: [] for name in dict.fromkeys((*peers, TRUTH))}
    for _ in range(times):
        for name, found in runs.items():
            command = [sys.executable, "-m", "bench.normalizers", "--peer", name, "--file", path]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(name, "not measured:", done.stderr.strip().splitlines()[-1], flush=True)
                continue
            found.append(json.loads(done.stdout.splitlines()[-1]))
            shown = {
                key: float(f"{value:.3g}")
                for key, value in found[-1].items()
                if isinstance(value, float)
            }
            print(name, shown, flush=True)
    return runs


if __name__ == "__main__":
    main()
