"""Compute true values and gradients: the papers' formulas in NumPy, in float64 or better.

They are written independently of the library.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Part:
    """Statistics over ``axes``, with their weights in the mean and in the variance.

    Both weights are 1, except for switchable norm. The variance is summed over the axes
    ``summed``, and includes the square of the part ``kept`` of the mean.
    """

    axes: tuple[int, ...]
    mean_weight: float = 1.0
    var_weight: float = 1.0
    kept: float = 0.0
    summed: tuple[int, ...] = ()
    total: bool = False  # whether the sum of squares stands for the variance


@dataclass
class Result:
    y: np.ndarray
    dx: np.ndarray
    dscale: np.ndarray  # per element: sum over the broadcast axes for a parameter's gradient
    dbias: np.ndarray
    # the sums of the sizes, which the rounding errors are measured by
    dscale_size: np.ndarray | None = None
    dbias_size: np.ndarray | None = None


def oracle(
    x,
    parts,
    *,
    epsilon,
    scale=1.0,
    bias=0.0,
    cotangent=0.0,
    where=None,
    centered=True,
    correction=0,
    epsilon_in="var",
) -> Result:
    """Return output and gradients of a norm whose statistics are a blend of ``parts``.

    m_k = sum(w x) / sum(w), v_k = sum(w (x - m_k)^2) / (sum(w) - correction) over part k,
    m = sum_k a_k m_k, v = sum_k b_k v_k, y = (x - m) r scale + bias with r = 1 / sqrt(v + epsilon).
    """
    given = np.asarray(x)
    wide = np.longdouble if given.dtype == np.float64 else np.float64
    w = (
        np.ones(given.shape, wide)
        if where is None
        else np.broadcast_to(np.asarray(where), given.shape).astype(wide)
    )
    x = np.where(w > 0, given, 0).astype(wide)
    # exact, and no digit is lost to a large mean
    if centered and w.any() and not any(part.kept for part in parts):
        x = np.where(w > 0, x - x[w > 0].flat[0], 0)
    scale, bias, cotangent = (np.asarray(a).astype(wide) for a in (scale, bias, cotangent))

    def total(a, axes):
        return a.sum(axes, keepdims=True)

    def divisor(part, n):
        return 1 if part.total else np.maximum(n - correction, 1e-300)

    stats = []
    for part in parts:
        n = np.maximum(total(w, part.axes), 1e-300)
        m = total(w * x, part.axes) / n if centered else np.zeros_like(n)
        m = m + (total(w * (x - m), part.axes) / n if centered else 0)
        v = total(w * (x - m) ** 2, part.axes) / divisor(part, n)
        stats.append((part, n, m, total(v + (part.kept * m) ** 2, part.summed)))
    mean = sum(p.mean_weight * m for p, _, m, _ in stats)
    var = sum(p.var_weight * v for p, _, _, v in stats)
    sigma = np.sqrt(var)
    root = {
        "var": np.sqrt(var + epsilon),
        "std": sigma + epsilon,
        "max": np.maximum(sigma, epsilon),
    }[epsilon_in]
    r = np.divide(1, root, out=np.zeros_like(root), where=root > 0)
    hat = (x - mean) * r
    live = w > 0
    g = np.where(live, cotangent * scale, 0)
    # d r / d v = -r^3 / 2, or -r^2 / (2 sqrt(v)) with epsilon in std; below epsilon in max it is 0
    slope = {
        "var": -0.5 * r**3,
        "std": np.divide(-(r**2), 2 * sigma, out=np.zeros_like(r), where=var > 0),
        "max": np.where(sigma < epsilon, 0, -0.5 * r**3),
    }[epsilon_in]
    dx = g * r
    for part, n, m, _ in stats:
        if centered:
            dx = dx - part.mean_weight * w * total(g * r, part.axes) / n
        inner = (
            part.var_weight
            * total(g * (x - mean) * slope, (*part.axes, *part.summed))
            / divisor(part, n)
        )
        dx = dx + 2 * w * (x - m + part.kept**2 * m) * inner
    y = np.where(live, hat * scale + bias, 0)
    return Result(
        y,
        np.where(live, dx, 0),
        np.where(live, cotangent * hat, 0),
        np.where(live, cotangent, 0) + 0 * hat,
    )


def worst(found, truth, axes) -> float:
    """Return the largest error of each group relative to its largest true value, over all groups.

    A NaN counts as infinitely wrong.
    """
    found, truth = np.asarray(found).astype(np.float64), np.asarray(truth).astype(np.float64)
    size = np.abs(truth).max(axes, keepdims=True)
    error = np.abs(found - truth).max(axes, keepdims=True)
    error = np.where(error == 0, 0, error / np.where(size > 0, size, 1e-300))
    return float(np.where(np.isnan(error), np.inf, error).max(initial=0))
