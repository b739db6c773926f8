#!/usr/bin/env bash
# One would guess: get_quantile of a t-digest rises with the rank, and get_rank leads back from it.
# What happens: datasketches 5.2.0 interpolates between two centroids the wrong way round: from one to the next the quantile falls, and
#   then it jumps. Of 1e6 normals the median comes out at rank 0.487 and the quartile at 0.259. get_rank of the same digest is right to
#   0.0002, so the quantiles that bisecting get_rank finds are 60 times as good. Each run gives the same.
# Why it matters: centring by the median and scaling by quartiles takes them from such a sketch. The error is largest in the middle,
#   where centroids are far apart, and passes for that of the sketch; of two near ranks the lower one mostly has the higher quantile.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/env"
"$folder/env/bin/pip" install -q datasketches==5.2.0 numpy
cat > "$folder/program.py" <<'PROGRAM'
from importlib.metadata import version

import datasketches
import numpy as np

x = np.random.default_rng(0).standard_normal(1_000_000)
ordered = np.sort(x)
digest = datasketches.tdigest_double(200)
digest.update(x)


def by_bisection(rank):
    low, high = digest.get_min_value(), digest.get_max_value()
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if digest.get_rank(middle) < rank else (low, middle)
    return low


true_rank = lambda value: np.searchsorted(ordered, value) / len(x)
print("datasketches", version("datasketches"))
errors = []
for rank in (0.1, 0.25, 0.5, 0.75, 0.9):
    direct, bisected = digest.get_quantile(rank), by_bisection(rank)
    ranks = true_rank(direct), true_rank(bisected)
    errors.append([abs(found - rank) for found in ranks])
    print(f"rank {rank}: {direct:.4f} by get_quantile, of rank {ranks[0]:.4f}; {bisected:.4f} by get_rank, of rank {ranks[1]:.4f}")
direct, bisected = np.max(errors, axis=0)
ranks = np.linspace(0.001, 0.999, 999)
steps = np.diff([digest.get_quantile(rank) for rank in ranks])
values = np.linspace(-3, 3, 999)
print(f"largest error of the rank: {direct:.4f} and {bisected:.4f}")
print(f"of {len(steps)} steps of 0.001 in rank {(steps < 0).sum()} lower the quantile")
print("get_rank rises with the value:", bool((np.diff([digest.get_rank(value) for value in values]) >= 0).all()))
raise SystemExit(not (direct > 0.005 and bisected < 0.001 and (steps < 0).mean() > 0.5))
PROGRAM
"$folder/env/bin/python" "$folder/program.py"
