"""Quantiles of a stream: how far their ranks are off, in which time and bytes, ours and others'.

    python -m bench.quantiles [--rows 10000000]

writes bench/results/quantiles.json and quantiles.md. One feature of float32 comes in batches of
25,000, in several orders. The robot libraries' classes are read from their source, see
bench/normalizers_peers.py; DataSketches needs `pip install datasketches==5.2.0`.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench import normalizers_peers as peers

RANKS = (0.001, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999)
BATCH = 25_000

Orders = dict[str, Callable[[np.random.Generator, int], np.ndarray]]
ORDERS: Orders = {
    "random": lambda rng, n: rng.standard_normal(n),
    "sorted": lambda rng, n: np.sort(rng.standard_normal(n)),
    "drifting": lambda rng, n: rng.standard_normal(n) + np.linspace(0, 100, n),
    "lognormal": lambda rng, n: np.exp(3 * rng.standard_normal(n)),
    "an outlier last": lambda rng, n: np.append(rng.standard_normal(n - 1), 1e4),
}

# What a method does: batches to a function of a rank, and the bytes that it keeps.
Method = Callable[[list[np.ndarray]], tuple[Callable[[float], float], int]]


def ours(batches: list[np.ndarray]) -> tuple[Callable[[float], float], int]:
    from jaxnorm.arguments.axes import resolve
    from jaxnorm.data.host.sketch import Sketch

    sketch, low, high = None, np.inf, -np.inf
    for batch in batches:
        reduction = resolve(0, batch.shape, {})
        if sketch is None:
            sketch = Sketch.of(batch, reduction, None)
        else:
            sketch = sketch.updated(batch, reduction, None)
        low, high = min(low, batch.min()), max(high, batch.max())
    ends = np.array([low], np.float64), np.array([high], np.float64)
    kept = sum(
        block.nbytes for _, levels in sketch.parts for level in levels.blocks for block in level
    )
    return lambda rank: float(sketch.quantile(rank, *ends)[0]), kept


def merged(batches: list[np.ndarray]) -> tuple[Callable[[float], float], int]:
    """Ours, of 40 parts that are merged."""
    from jaxnorm.data import Normalizer

    parts = [batches[i::40] for i in range(40)]
    whole = None
    for part in parts:
        fitted = Normalizer.fit([batch[:, None] for batch in part], quantiles=RANKS)
        whole = fitted if whole is None else whole.merge(fitted)
    sketch = whole._state.leaves[""].sketch
    kept = sum(
        block.nbytes for _, levels in sketch.parts for level in levels.blocks for block in level
    )
    return lambda rank: whole.quantile(rank).item(), kept


def datasketches(name: str, size: int) -> Method:
    def run(batches: list[np.ndarray]) -> tuple[Callable[[float], float], int]:
        import datasketches as library

        sketch = getattr(library, name)(size)
        for batch in batches:
            sketch.update(batch)
        return sketch.get_quantile, len(sketch.serialize())

    return run


def by_ranks(size: int) -> Method:
    """The t-digest of DataSketches 5.2.0, by bisection of its ranks.

    Its own get_quantile draws the line between two centroids the wrong way round.
    """

    def run(batches: list[np.ndarray]) -> tuple[Callable[[float], float], int]:
        import datasketches as library

        digest = library.tdigest_float(size)
        for batch in batches:
            digest.update(batch)

        def quantile(rank: float) -> float:
            low, high = digest.get_min_value(), digest.get_max_value()
            for _ in range(60):
                middle = (low + high) / 2
                low, high = (middle, high) if digest.get_rank(middle) < rank else (low, middle)
            return high

        return quantile, len(digest.serialize())

    return run


def histogram(load: Callable[[], Any]) -> Method:
    """openpi's and LeRobot's: 5000 bins, moved where the range grows."""

    def run(batches: list[np.ndarray]) -> tuple[Callable[[float], float], int]:
        stats = load()
        for batch in batches:
            stats.update(batch[:, None])
        kept = sum(part.nbytes for part in (*stats._histograms, *stats._bin_edges))
        return lambda rank: float(_of_histogram(stats, rank)), kept

    return run


def _of_histogram(stats: Any, rank: float) -> np.ndarray:
    if hasattr(stats, "_quantile_list"):
        stats._quantile_list = [rank]
        return stats._compute_quantiles()[0][0]
    return stats._compute_quantiles([rank])[0][0]


def envelope(batches: list[np.ndarray]) -> tuple[Callable[[float], float], int]:
    """LeRobot's merge of episodes: the least of the lower quantiles, the largest of the upper."""
    module = peers.lerobot()
    found = []
    for batch in batches:
        stats = module.RunningQuantileStats(list(RANKS))
        stats._quantile_keys = [f"q{number}" for number in range(len(RANKS))]
        stats.update(batch[:, None])
        found.append(stats.get_statistics())
    values = {
        rank: (min if rank <= 0.5 else max)(each[f"q{number}"].item() for each in found)
        for number, rank in enumerate(RANKS)
    }
    return values.__getitem__, 0


METHODS: dict[str, Method] = {
    "jaxnorm": ours,
    "jaxnorm, 40 parts merged": merged,
    "DataSketches KLL, k = 2000": datasketches("kll_floats_sketch", 2000),
    "DataSketches t-digest, 200": datasketches("tdigest_float", 200),
    "DataSketches t-digest, 2000": datasketches("tdigest_float", 2000),
    "DataSketches t-digest, 200, by its ranks": by_ranks(200),
    "DataSketches t-digest, 2000, by its ranks": by_ranks(2000),
    "openpi, 5000 bins": histogram(
        lambda: peers._module(peers.OPENPI, "openpi_normalize", {}).RunningStats()
    ),
    "LeRobot, 5000 bins": histogram(lambda: peers.lerobot().RunningQuantileStats()),
    "LeRobot, episodes merged": envelope,
}


def rows(number: int) -> Iterator[tuple[str, str, dict]]:
    for order, make in ORDERS.items():
        x = make(np.random.default_rng(0), number).astype(np.float32)
        batches, exact = np.array_split(x, number // BATCH), np.sort(x)
        for name, method in METHODS.items():
            began = time.perf_counter()
            quantile, kept = method(batches)
            seconds = time.perf_counter() - began
            errors = []
            for rank in RANKS:
                value = np.float32(quantile(rank))
                ends = (np.searchsorted(exact, value, side) / number for side in ("left", "right"))
                low, high = ends
                errors.append(max(low - rank, rank - high, 0.0))
            facts = {"error": max(errors), "nanoseconds": seconds / number * 1e9, "bytes": kept}
            print(order, name, facts, flush=True)
            yield order, name, facts


def report(found: dict[str, dict[str, dict]], number: int, facts: dict) -> str:
    orders = list(ORDERS)
    lines = [
        f"| largest error of a rank | {' | '.join(orders)} | ns an element | KiB |",
        "|" + "---|" * (len(orders) + 3),
    ]
    for name in METHODS:
        of = [found[order][name] for order in orders]
        errors = [f"{100 * each['error']:.3f} %" for each in of]
        times = sorted(each["nanoseconds"] for each in of)
        size = max(each["bytes"] for each in of) / 1024
        lines.append(
            f"| {name} | {' | '.join(errors)} | {times[0]:.0f} to {times[-1]:.0f} | "
            f"{f'{size:.0f}' if size else ''} |"
        )
    head = (
        f"Quantiles of {number:,} numbers of float32, one feature, in batches of {BATCH:,} (python "
        "-m bench.quantiles).\n"
        "Error: the largest distance of the rank that a quantile has in the data from the rank "
        f"that it stands for, of the ranks {', '.join(map(str, RANKS))}. Time: of one thread, the "
        "least and the most of the orders, beside other work on the machine; "
        f"{facts['processor']}. The quantiles of DataSketches' t-digest are worse than its ranks: "
        "get_quantile of version 5.2.0 draws the line between two centroids the wrong way round.\n"
    )
    return head + "\n" + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    from bench.stamp import commit, versions
    from jaxnorm.experiments.report import machine

    found: dict[str, dict[str, dict]] = {order: {} for order in ORDERS}
    for order, name, facts in rows(options.rows):
        found[order][name] = facts
    facts = machine() | versions() | {"commit": commit(), "rows": options.rows}
    options.out.mkdir(exist_ok=True)
    text = report(found, options.rows, facts)
    (options.out / "quantiles.json").write_text(
        json.dumps({"machine": facts, "orders": found}, indent=1) + "\n"
    )
    (options.out / "quantiles.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
