"""Fitting a data set that outgrows memory: accuracy, time and memory of ours and of others, over
one file of float32.

    python -m bench.normalizers [--gib 4]

writes bench/results/normalizers.json and normalizers.md. The file is made of seeded normal numbers
(mean 1000, deviation 1, 256 features), read chunk by chunk, and removed. Each peer runs in a
process of its own; reading is not part of its time. Memory is the most that the process holds
beyond what it held before the first chunk, without the pages of files. Keras adapts to chunks only
where TensorFlow is installed, with whatever backend (`pip install tensorflow-cpu`).
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
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

FEATURES, ROWS, MEAN = 256, 65_536, 1000.0
CHUNK = ROWS * FEATURES * 4  # bytes: 64 MiB
RUNS = 3


class Chunks:
    """The chunks of a file, and the seconds that reading them took."""

    def __init__(self, path: str):
        self.path, self.seconds, self.cpu_seconds = path, 0.0, 0.0

    def __iter__(self) -> Iterator[np.ndarray]:
        for start in range(0, os.path.getsize(self.path), CHUNK):
            began, cpu = time.perf_counter(), time.thread_time()
            chunk = np.fromfile(self.path, np.float32, CHUNK // 4, offset=start).reshape(
                -1, FEATURES
            )
            self.seconds += time.perf_counter() - began
            self.cpu_seconds += time.thread_time() - cpu
            yield chunk
            del chunk


def write(path: str, chunks: int) -> None:
    with open(path, "wb") as file:
        for seed in range(chunks):
            (
                np.random.default_rng(seed).standard_normal((ROWS, FEATURES), np.float32)
                + np.float32(MEAN)
            ).tofile(file)


Found = tuple[np.ndarray, np.ndarray]  # mean and variance


def jaxnorm_fit(threads: int) -> Callable[[Chunks], Found]:
    from jaxnorm.data import Normalizer

    def run(chunks: Chunks) -> Found:
        moments = Normalizer.fit(chunks, threads=threads).moments
        return moments.mean[0], moments.var[0]

    return run


def sklearn_fit() -> Callable[[Chunks], Found]:
    from sklearn.preprocessing import StandardScaler

    def run(chunks: Chunks) -> Found:
        scaler = StandardScaler()
        for chunk in chunks:
            scaler.partial_fit(chunk)
            del chunk
        return scaler.mean_, scaler.var_

    return run


def keras_fit() -> Callable[[Chunks], Found]:
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    def run(chunks: Chunks) -> Found:
        layer = keras.layers.Normalization(axis=-1)
        layer.adapt(iter(chunks))
        return np.asarray(layer.adapt_mean), np.asarray(layer.adapt_variance)

    return run


def nnx_fit() -> Callable[[Chunks], Found]:
    import jax.numpy as jnp
    from flax import nnx

    def run(chunks: Chunks) -> Found:
        metric = nnx.metrics.Welford()
        for chunk in chunks:
            metric.update(values=jnp.asarray(chunk))
            del chunk
        found = metric.compute()
        return np.asarray(found.mean)[None], np.asarray(found.standard_deviation)[None] ** 2

    return run


def squares(dtype) -> Callable[[], Callable[[Chunks], Found]]:
    def run(chunks: Chunks) -> Found:
        count, total, squared = 0, np.zeros(FEATURES, dtype), np.zeros(FEATURES, dtype)
        for chunk in chunks:
            x = chunk.astype(dtype, copy=False)
            count, total, squared = count + len(x), total + x.sum(0), squared + (x * x).sum(0)
            del chunk, x
        return total / count, squared / count - (total / count) ** 2

    return lambda: run


def two_pass(chunks: Chunks) -> Found:
    """The textbook's, in float64: what accuracy is held against."""
    rows = os.path.getsize(chunks.path) // (4 * FEATURES)
    mean = sum(chunk.sum(0, dtype=np.float64) for chunk in chunks) / rows
    return mean, sum(((chunk - mean) ** 2).sum(0) for chunk in chunks) / rows


PEERS: dict[str, Callable[[], Callable[[Chunks], Found]]] = {
    "jaxnorm.data.Normalizer": lambda: jaxnorm_fit(os.cpu_count() or 1),
    "jaxnorm.data.Normalizer, one thread": lambda: jaxnorm_fit(1),
    "scikit-learn StandardScaler.partial_fit": sklearn_fit,
    "Keras Normalization.adapt (JAX)": keras_fit,
    "flax.nnx.metrics.Welford (one group)": nnx_fit,
    "E[x²] − E[x]², float32": squares(np.float32),
    "E[x²] − E[x]², float64": squares(np.float64),
    "two passes, float64": lambda: two_pass,
}
TRUTH = "two passes, float64"


def measure(peer: str, path: str) -> dict:
    """What one process finds: mean, variance, seconds and bytes."""
    run, chunks, done, most = PEERS[peer](), Chunks(path), threading.Event(), [0]
    before = _held()

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], _held())

    threading.Thread(target=watch, daemon=True).start()
    began, cpu = time.perf_counter(), time.process_time()
    mean, var = run(chunks)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    done.set()
    facts = {
        "seconds": seconds - chunks.seconds,
        "cpu_seconds": cpu - chunks.cpu_seconds,
        "chunks_held": (most[0] - before) / CHUNK,
    }
    return facts | {"mean": mean.astype(float).tolist(), "var": var.astype(float).tolist()}


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
    errors = {
        name: float(np.abs(np.array(runs[0][name]) / exact - 1).max())
        for name, exact in (("mean", mean), ("var", var))
    }
    medians = {
        name: float(np.median([run[name] for run in runs])) for name in ("seconds", "cpu_seconds")
    }
    return (
        {f"{name}_error": error for name, error in errors.items()}
        | medians
        | {"chunks_held": max(run["chunks_held"] for run in runs)}
    )


def report(rows: dict[str, dict], gib: float, facts: dict) -> str:
    lines = [
        "| | mean's error | variance's error | seconds | CPU seconds | memory, chunks | runs |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        wrong = "no digit right" if row["var_error"] > 0.5 else f"{row['var_error']:.0e}"
        times = f"{row['seconds']:.1f} | {row['cpu_seconds']:.1f}"
        lines.append(
            f"| {name} | {row['mean_error']:.0e} | {wrong} | {times} | {row['chunks_held']:.1f} | "
            f"{row['runs']} |"
        )
    head = (
        f"Fitting {gib:g} GiB of float32, mean 1000, deviation 1, 256 features, in chunks of 64 "
        "MiB (python -m bench.normalizers).\n"
        "Errors: the largest of all features, relative to two passes in float64. Time: without "
        "reading, "
        "median of the runs, beside other work on the machine, which CPU seconds show less of; "
        f"{facts['processor']}, "
        f"{facts['cores']} cores. Memory: the most beyond what was held before the first chunk, "
        "the chunk itself included, in chunks.\n"
    )
    return head + "\n" + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--runs", type=int, default=RUNS)
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
    parser.add_argument("--file", help="the data: kept, and not written again if it is there")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if options.peer:
        print(json.dumps(measure(options.peer, options.file)))
        return
    from bench.stamp import commit, versions
    from jaxnorm.experiments.report import machine

    with tempfile.TemporaryDirectory() as folder:
        path = options.file or os.path.join(folder, "data.f32")
        if not os.path.exists(path):
            write(path, math.ceil(options.gib * 2**30 / CHUNK))
        runs = measure_in_turn(options.only or list(PEERS), path, options.runs)
    result = options.out / "normalizers.json"
    rows = json.loads(result.read_text())["rows"] if options.only else {}
    truth = runs[TRUTH][0]
    rows |= {
        name: summarize(found, truth) | {"commit": commit(), "runs": options.runs}
        for name, found in runs.items()
    }
    facts = machine() | versions() | {"gib": options.gib}
    options.out.mkdir(exist_ok=True)
    result.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")
    text = report({name: rows[name] for name in PEERS}, options.gib, facts)
    (options.out / "normalizers.md").write_text(text)
    print(text)


def measure_in_turn(peers: list[str], path: str, times: int) -> dict[str, list[dict]]:
    """Each in a process of its own; the truth is measured with them."""
    runs: dict[str, list[dict]] = {name: [] for name in dict.fromkeys((*peers, TRUTH))}
    for _ in range(times):
        for name, found in runs.items():
            command = [sys.executable, "-m", "bench.normalizers", "--peer", name, "--file", path]
            found.append(
                json.loads(
                    subprocess.run(
                        command, capture_output=True, text=True, check=True
                    ).stdout.splitlines()[-1]
                )
            )
            print(
                name,
                {
                    key: round(value, 2)
                    for key, value in found[-1].items()
                    if isinstance(value, float)
                },
                flush=True,
            )
    return runs


if __name__ == "__main__":
    main()
