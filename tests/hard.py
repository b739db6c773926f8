"""Compare norms with the float64 oracle on hard inputs, and state the bounds.

Both get the same rounded input. Output and gradients are compared.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from oracle import worst

from jaxnorm.core import plan

B32 = (4e-7, 1e-6)  # output, gradient


@dataclass(frozen=True)
class Hard:
    """An input: ``make(rng, groups, n)`` returns rows, and epsilon scales with ``unit``."""

    name: str
    make: Callable
    unit: float = 1.0
    bounds: tuple[float, float] = B32

    def __str__(self):
        return self.name


def normal(mean=0.0, size=1.0):
    return lambda rng, groups, n: rng.standard_normal((groups, n)) * size + mean


def outlier(value, place):
    def make(rng, groups, n):
        rows = rng.standard_normal((groups, n))
        rows[:, {"first": 0, "middle": n // 2, "last": n - 1}[place]] = value
        return rows

    return make


def one_ulp(rng, groups, n):
    return np.where(
        np.arange(groups * n).reshape(groups, n) % 2 == 0,
        np.float32(1e6),
        np.nextafter(np.float32(1e6), np.float32(2e6)),
    )


HARD = [
    Hard("normal", normal()),
    *(Hard(f"mean_{mean:g}", normal(mean)) for mean in (1e2, 1e3, 1e4, 1e6, 1e7)),
    Hard("sorted", lambda rng, groups, n: np.sort(rng.standard_normal((groups, n)) + 1e4, 1)),
    Hard("ramp", lambda rng, groups, n: np.linspace(0, 1e6, n) + np.zeros((groups, 1))),
    Hard("lognormal", lambda rng, groups, n: np.exp(3 * rng.standard_normal((groups, n)))),
    *(
        Hard(f"outlier_{value:g}_{place}", outlier(value, place))
        for value in (1e4, 1e6)
        for place in ("first", "middle", "last")
    ),
    *(Hard(f"size_{size:g}", normal(0, size)) for size in (1e10, 1e15)),
    *(Hard(f"size_{size:g}", normal(0, size), size) for size in (1e13, 1e-3, 1e-20, 1e-30)),
    Hard("one_ulp", one_ulp),
]
HALF = [
    ("float16", "wide", lambda rng, shape: rng.uniform(-6e4, 6e4, shape)),
    ("float16", "offset", lambda rng, shape: rng.standard_normal(shape) + 1000),
    ("bfloat16", "offset", lambda rng, shape: rng.standard_normal(shape) + 256),
    ("bfloat16", "wide", lambda rng, shape: rng.uniform(-1, 1, shape) * 3e38),
]


@lru_cache
def runs(case, implementation, **options):
    """Return functions for the output and the gradients by x, scale and bias.

    They run eagerly, and in one program compiled for all inputs.
    """

    def run(x, scale, bias, cotangent, where):
        shown = {} if where is None else {"where": where}
        y, pullback = jax.vjp(
            lambda *a: case(a[0], scale=a[1], bias=a[2], **shown, **options), x, scale, bias
        )
        return y, *pullback(cotangent.astype(y.dtype))

    return run, jax.jit(run)


def check(case, hard, rng, where=None, *, slack=1, ways=slice(None)):
    """Check a norm on a hard input; ``ways`` come from :func:`runs`."""
    x, options = (
        case.arrange(hard.make(rng, *case.groups)).astype(np.float32),
        {"epsilon": case.epsilon * hard.unit**2},
    )
    bounds = [slack * bound for bound in hard.bounds]
    scale, bias = case.params(rng)
    cotangent = rng.standard_normal(case.shape).astype(np.float32)
    truth = case.truth(x, scale=scale, bias=bias, cotangent=cotangent, **options)
    split = case.split_shape
    for run in runs(case, os.environ.get(plan.VARIABLE), **options)[ways]:
        found = run(*map(jnp.asarray, (x, scale, bias, cotangent)), where)
        assert (
            worst(np.reshape(found[0], split), truth.y.reshape(split), case.group_axes) <= bounds[0]
        )
        assert (
            worst(np.reshape(found[1], split), truth.dx.reshape(split), case.group_axes)
            <= bounds[1]
        )
        for got, want, size in (
            (found[2], truth.dscale, truth.dscale_size),
            (found[3], truth.dbias, truth.dbias_size),
        ):
            # of the sum of sizes: the sum itself may cancel
            assert np.abs(got - want).max() <= bounds[1] * size.max()
