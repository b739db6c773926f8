"""Arrange hard inputs as channels of one array, with masks and without, for test_cuts.py."""

from dataclasses import dataclass
from functools import cache

import jax.numpy as jnp
import numpy as np
from hard import HALF, HARD, normal

# elements of each hard input; segments, of which 3 is empty, 4 has one element, and masks hide all
# of 5
N, K = 256, 7
# how many rows a mask leaves to each of eight devices, or microbatches
FILLED = (32, 0, 1, 10, 26, 18, 5, 32)
BOUNDS = (0, 0, 1, 87, N)  # of unequal microbatches: one is empty, one has one element
FIXED = [0, N // 2, N - 1]  # where outliers are: no mask hides them
JUNK = np.array([np.nan, np.inf, -np.inf, 1e30])


def constant(value):
    return lambda rng, groups, n: np.full((groups, n), value)


def beside(value):
    return lambda rng, groups, n: np.where(
        np.arange(n) == 0, value, rng.standard_normal((groups, n))
    )


INPUTS = {hard.name: hard.make for hard in HARD}
INPUTS |= {f"constant_{value:.8g}": constant(value) for value in (0.0, 0.1, 3.3, 1e6 + 0.3, 1e10)}
INPUTS |= {f"beside_{value}": beside(value) for value in (np.nan, np.inf, -np.inf)}
INPUTS |= {"all_masked": INPUTS["normal"], "one_left": INPUTS["mean_1e+06"]}
MAKERS = {"float32": INPUTS}
for dtype in ("float16", "bfloat16"):
    halves = {
        name: lambda rng, groups, n, make=make: make(rng, (groups, n))
        for kind, name, make in HALF
        if kind == dtype
    }
    MAKERS[dtype] = halves | {
        name: INPUTS[name] for name in ("constant_3.3", "beside_nan", "all_masked")
    }
WIDE = ("normal", "mean_10000", "constant_3.3", "beside_nan", "all_masked")
MAKERS["float64"] = {name: INPUTS[name] for name in WIDE} | {"mean_1e+08": normal(1e8)}


def ids_of(n):
    """Return unsorted ids of segments."""
    rng = np.random.default_rng(1)
    ids = rng.choice([0, 1, 2, 6], n)
    ids[rng.permutation(n - 2)[:21] + 1] = [4, *[5] * 20]  # neither the first nor the last
    return ids


@dataclass(frozen=True)
class Data:
    """Hard inputs as channels of one array ``(N, inputs)``.

    One program takes them all, and inputs that are not finite stand next to others.
    """

    names: tuple[str, ...]
    x: np.ndarray
    where: np.ndarray | None
    cotangent: np.ndarray
    scale: np.ndarray
    bias: np.ndarray


@cache
def data(masked, dtype="float32", fold=1, segments=False, shuffled=False):
    """Return the data; with ``fold`` 2 in the shape ``(inputs, N / 2, 2)``.

    The groups then hold two channels each.
    """
    rng = np.random.default_rng(0)
    x = np.stack([make(rng, 1, N)[0] for make in MAKERS[dtype].values()], 1)
    names, count = list(MAKERS[dtype]), x.shape[1]
    if shuffled:
        rest = np.setdiff1d(np.arange(N), FIXED)
        x[rest] = x[rng.permutation(rest)]
    where = None
    if masked:
        filled = np.arange(N) % (N // 8) < np.repeat(FILLED, N // 8)
        where = filled[:, None] & (rng.random(x.shape) < 0.9)
        where[FIXED] = True
        where[:, names.index("all_masked")] = False
        if "one_left" in names:
            where[:, names.index("one_left")] = np.arange(N) == N // 2
    (cotangent, x), params = (
        (folded(a, fold) for a in (rng.standard_normal(x.shape), x)),
        rng.uniform(0.5, 1.5, (2, count)),
    )
    if masked:
        where = folded(where, fold)
        if segments:
            where = where & np.expand_dims(ids_of(N // fold) != 5, (1,) if fold == 1 else (0, 2))
        x = np.where(where, x, JUNK[np.arange(x.size).reshape(x.shape) % 4])
    own, wide = jnp.dtype(dtype), np.float64 if dtype == "float64" else np.float32
    with np.errstate(over="ignore"):
        x, cotangent = (np.asarray(a.astype(wide).astype(own)) for a in (x, cotangent))
    scale, bias = (params if fold == 1 else params[:, :2]).astype(wide)
    return Data(tuple(names), x, where, cotangent, scale, bias)


def folded(a, fold):
    return a if fold == 1 else a.T.reshape(a.shape[1], N // 2, 2)


def by_input(a, fold):
    """Return ``(inputs, positions, fold)``, whatever the layout."""
    return np.asarray(a).T[:, :, None] if fold == 1 else np.asarray(a)
