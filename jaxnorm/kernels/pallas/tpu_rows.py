"""Layer and RMS norm of rows on a TPU: x is read once for the output, x and dy for the gradients.

A block of rows is copied to the memory next to the cores while the last one is worked on. Within a
block, a loop takes pieces whose values fit in the registers. What is done with a piece are the
formulas of engine/reference.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxnorm.arguments.axes import resolve
from jaxnorm.engine import groups, reference
from jaxnorm.engine.exponents import LARGE, of_largest
from jaxnorm.engine.groups import Scaling
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.reference import Inputs, Residuals, Stats
from jaxnorm.engine.spec import Spec
from jaxnorm.kernels.placement import like
from jaxnorm.kernels.static import Static

LANES, SUBLANES = 128, 8  # elements of a register: the last axis, and the one before
LEAST = 16  # rows that bfloat16 is stored by
WIDEST = 16384


@dataclass(frozen=True)
class Config:
    """How rows are divided.

    Attributes:
      rows: rows of a block.
      piece: rows of a piece of a block.
    """

    rows: int
    piece: int


def config_for(n: int, width: int, arrays: int) -> Config:
    """Return how n rows of this width are divided, where so many arrays pass in blocks.

    >>> config_for(32768, 4096, 2)
    Config(rows=128, piece=16)
    """
    # A block of 2**19 elements takes 2 MiB of float32. Two of x, dy and dx each, since one is
    # copied while another is worked on, are 12 of 16 MiB. A piece of 2**16 elements fills the 64
    # registers: more are spilled, fewer leave units waiting.
    whole = -(-width // LANES) * LANES
    block, registers = 2**19 if whole < WIDEST and arrays <= 3 else 2**18, 2**16
    most = -(-n // LEAST) * LEAST
    piece = min(max(LEAST, registers // whole // LEAST * LEAST), most)
    return Config(max(1, min(block // whole, most) // piece) * piece, piece)


def loops_over(spec: Spec, config: Config, width: int) -> PlainLoops:
    """Return the loops over a piece, whose rows lie one in each sublane of a register."""
    sizes = {"m": config.piece // SUBLANES, "s": SUBLANES}
    reduction = resolve("(m s) [c]", (config.piece, width), sizes)
    return PlainLoops(replace(spec, reduction=reduction, dtype=jnp.dtype(jnp.float32)))


def find_stats(loops: PlainLoops, values: jax.Array, stored: jax.Array) -> Stats:
    """Return the statistics of rows of float32, which are stored in another dtype or unit."""
    width = values.shape[-1]
    if stored.dtype != jnp.bfloat16 or width & (width - 1) or not loops.spec.centered:
        return reference.statistics(loops, values, None)
    # The mean of equal bfloat16 is exact, by sums of 8 + 14 bits and a division by a power of two.
    # Other rows vary by more than its rounding. So the low part of the mean, whose sum over lanes
    # takes as long as a copy of a narrow row, may be left out.
    scaling = Scaling(None, None, None)
    shift = groups.mean(loops, loops.split(values), scaling)
    if width == LANES:  # the matrix unit sums such rows, in float32, while the others are busy
        ones = jnp.ones((LANES, LANES), stored.dtype)
        sums = jnp.dot(stored, ones, preferred_element_type=jnp.float32)
        shift = loops.split(sums * (1 / LANES))
    scaling = scaling._replace(shift=shift)
    var = groups.mean(loops, groups.elements(loops, values, scaling) ** 2, scaling)
    return Stats(scaling, jnp.zeros_like(var), var)


def forward_piece(loops: PlainLoops, stored, scale, bias) -> jax.Array:
    """Normalize rows."""
    values = stored.astype(jnp.float32)
    return reference.apply(loops, values, find_stats(loops, values, stored), scale, bias)


def backward_piece(loops: PlainLoops, stored, dy, scale) -> Inputs:
    """Return the gradients of rows, in float32, and of a scale and bias for each sublane."""
    values = stored.astype(jnp.float32)
    residuals = Residuals(values, find_stats(loops, values, stored), scale, scale)
    return reference.backward(loops, residuals, (dy, None, None))


def each_piece(x, config: Config, function: Callable) -> None:
    """Call ``function(at, unit)`` for the slice of each piece of a block of x.

    ``unit`` has the power of two that each row must be multiplied with, so that no sum of squares
    leaves the range of float32. It is None where no row of the block needs one. Epsilon is the
    same in any unit that is not 1, see engine/exponents.py.
    """
    pieces = x.shape[0] // config.piece
    at = lambda i: pl.ds(i * config.piece, config.piece)
    run = lambda unit: pl.loop(0, pieces)(lambda i: function(at(i), unit(i)))
    if x.dtype == jnp.float32:  # its range is what full_range is for
        run(lambda i: None)
        return
    size = lambda i: jnp.abs(x[at(i)].astype(jnp.float32))
    per_lane = lambda i: size(i).reshape(-1, SUBLANES, x.shape[1]).max(0)
    zeros = jnp.zeros((SUBLANES, x.shape[1]), jnp.float32)
    largest = jax.lax.fori_loop(0, pieces, lambda i, a: jnp.maximum(a, per_lane(i)), zeros)
    usual = jnp.max(largest) < 2.0**LARGE
    pl.when(usual)(lambda: run(lambda i: None))
    pl.when(jnp.logical_not(usual))(
        lambda: run(lambda i: of_largest(size(i).max(1, keepdims=True), lambda e: 2.0**-e))
    )


def scaled(stored: jax.Array, unit: jax.Array | None) -> jax.Array:
    """Return what is stored in its unit, or as it is.

    The dtype stays, so that a row takes the same steps beside any other rows.
    """
    return stored if unit is None else (stored.astype(jnp.float32) * unit).astype(stored.dtype)


def of_piece(loops: PlainLoops, param, at) -> jax.Array:
    """Return a scale or bias for a piece: of its own, or the one that all rows share."""
    return param[...] if param.shape[-2] == SUBLANES else loops.split(param[at])


def add_to(param, at, value: jax.Array) -> None:
    """Add to the gradient of a param that all rows share, or set the one of a piece."""
    if param.shape[-2] == SUBLANES:
        param[...] += value
    else:
        param[at] = value.reshape(-1, value.shape[-1])


def forward_kernel(x, scale, bias, y, *, loops: PlainLoops, config: Config):
    """Normalize a block of rows."""

    def each(at, unit):
        params = (of_piece(loops, param, at) for param in (scale, bias))
        y[at] = forward_piece(loops, scaled(x[at], unit), *params).astype(y.dtype)

    each_piece(x, config, each)


def add_kernel(x, residual, scale, bias, y, total, *, loops: PlainLoops, config: Config):
    """Add a block of rows to another, and normalize the sum."""

    @pl.loop(0, config.rows // config.piece)
    def _(i):
        at = pl.ds(i * config.piece, config.piece)
        total[at] = wide_sum(x[at], residual[at]).astype(total.dtype)

    forward_kernel(total, scale, bias, y, loops=loops, config=config)


def backward_kernel(
    x, dy, *refs, loops: PlainLoops, config: Config, n: int
):  # refs: dtotal if it is given, scale, dx, dscale, dbias
    """Compute the gradients of a block of rows; those of scale and bias add up over all blocks."""
    *dtotal, scale, dx, dscale, dbias = refs
    step = pl.program_id(1)

    @pl.when(step == 0)
    def _():
        dscale[...] = jnp.zeros_like(dscale)
        dbias[...] = jnp.zeros_like(dbias)

    def each(at, unit):
        own_x, own_dy = x[at], dy[at].astype(jnp.float32)
        if n % config.rows:  # after the last row there may be anything
            row = step * config.rows + at.start + lax.broadcasted_iota(jnp.int32, own_x.shape, 0)
            own_x, own_dy = (jnp.where(row < n, a, jnp.zeros_like(a)) for a in (own_x, own_dy))
        found = backward_piece(loops, scaled(own_x, unit), own_dy, of_piece(loops, scale, at))
        own_dx = scaled(found.x, unit)
        dx[at] = wide_sum(own_dx, *(a[at] for a in dtotal)).astype(dx.dtype)
        add_to(dscale, at, found.scale)
        add_to(dbias, at, found.bias)

    each_piece(x, config, each)


def wide_sum(*arrays: jax.Array) -> jax.Array:
    """Return the sum of arrays in float32."""
    return sum(a.astype(jnp.float32) for a in arrays[1:]) + arrays[0].astype(jnp.float32)


class Rows:
    """How arrays (..., N, 1, 1, D) and params (..., 1, 1, 1, D) pass through a kernel.

    Arrays pass as (B, N, D), in blocks of rows. Params (B, 1, 8, D) stay next to the cores while
    the blocks of a batch pass. A batch of few rows, whose params are about as large, would fill no
    block: params are then made as large as x, and pass with it, as (1, B N, D).
    """

    def __init__(self, x: jax.Array, arrays: int, results: int):
        *batch, n, _, _, self.width = x.shape
        self.given, self.batch, self.n = x.shape, math.prod(batch), n
        self.per_row = self.batch > 1 and n < LEAST
        if self.per_row:
            self.batch, self.n, arrays = 1, self.batch * n, 2 * results
        self.config = config_for(self.n, self.width, arrays)

    def of(self, a: jax.Array) -> jax.Array:
        """Return an array as it passes."""
        return a.reshape(self.batch, self.n, self.width)

    def of_param(self, a: jax.Array) -> jax.Array:
        """Return a param as it passes."""
        if self.per_row:
            return self.of(jnp.broadcast_to(a, self.given))
        return jnp.broadcast_to(
            a.reshape(self.batch, 1, 1, self.width), (self.batch, 1, SUBLANES, self.width)
        )

    def summed(self, a: jax.Array, param: jax.Array) -> jax.Array:
        """Return the gradient of a param, from what a kernel gives."""
        if self.per_row:
            return a.reshape(self.given).sum(-4, keepdims=True)
        return a.sum(2).reshape(param.shape)

    def call(self, kernel, arrays, params, dtypes, *, interpret: bool) -> list[jax.Array]:
        """Run a kernel that returns arrays of these dtypes, and params of float32 for None."""
        rows, width, given = self.config.rows, self.width, (*arrays, *params)
        block = pl.BlockSpec((None, rows, width), lambda b, i: (b, i, 0))
        whole = pl.BlockSpec((None, 1, SUBLANES, width), lambda b, i: (b, 0, 0, 0))
        ins = [*map(self.of, arrays), *map(self.of_param, params)]
        array, param = ins[0].shape, ins[-1].shape
        results = [
            like(param if dtype is None else array, dtype or jnp.float32, *given)
            for dtype in dtypes
        ]
        spec = lambda a: block if len(a.shape) == 3 else whole
        return pl.pallas_call(
            kernel,
            grid=(self.batch, pl.cdiv(self.n, rows)),
            in_specs=list(map(spec, ins)),
            out_specs=list(map(spec, results)),
            out_shape=results,
            interpret=interpret,
        )(*ins)


def forward(static: Static, x, scale, bias, *, interpret: bool = False) -> jax.Array:
    """Return the output."""
    rows = Rows(x, arrays=2, results=1)
    loops = loops_over(static.spec, rows.config, rows.width)
    kernel = partial(forward_kernel, loops=loops, config=rows.config)
    (y,) = rows.call(kernel, [x], [scale, bias], [static.spec.dtype], interpret=interpret)
    return y


def forward_of_sum(
    static: Static, x, residual, scale, bias, *, interpret: bool = False
) -> list[jax.Array]:
    """Return the output for x + residual, and this sum."""
    rows = Rows(x, arrays=4, results=2)
    loops = loops_over(static.spec, rows.config, rows.width)
    kernel = partial(add_kernel, loops=loops, config=rows.config)
    dtypes = [static.spec.dtype, x.dtype]
    return rows.call(kernel, [x, residual], [scale, bias], dtypes, interpret=interpret)


def backward(static: Static, x, scale, dy, dtotal=None, *, interpret: bool = False) -> Inputs:
    """Return the gradients with respect to x, scale and bias.

    ``dtotal`` is the gradient with respect to x by another way, which is added.
    """
    arrays = [x, dy, *([] if dtotal is None else [dtotal])]
    rows = Rows(x, arrays=1 + len(arrays), results=3)
    loops = loops_over(static.spec, rows.config, rows.width)
    kernel = partial(backward_kernel, loops=loops, config=rows.config, n=rows.n)
    dx, *params = rows.call(kernel, arrays, [scale], [x.dtype, None, None], interpret=interpret)
    return Inputs(dx, *(rows.summed(param, scale) for param in params))
