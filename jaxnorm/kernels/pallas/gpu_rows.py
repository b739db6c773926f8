"""Layer and RMS norm of rows on a GPU: x is read once for the output, x and dy for the gradients.

A thread block loads some rows to its registers, runs the formulas of engine/reference.py on them,
stores the results and goes on to its next rows. Each warp has a whole row, or a half or a quarter
of one. Programs are made by Pallas's Mosaic GPU.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu

from jaxnorm.arguments.axes import unsplit
from jaxnorm.engine import groups, reference
from jaxnorm.engine.exponents import of_largest
from jaxnorm.engine.groups import Scaling
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.reference import Inputs, Residuals, Stats
from jaxnorm.engine.spec import Spec
from jaxnorm.kernels.placement import like
from jaxnorm.kernels.static import Static

plgpu: Any = mosaic_gpu  # JAX before 0.12 has less of it

LANES, WARPS = 32, 4  # threads of a warp, and warps of a thread block
EACH = 32  # elements of a block of rows that a thread holds
WIDEST = 4096  # of 8192, gradients need more registers than a thread has
CORES = 132  # of an H100
# thread blocks whose registers a core has room for
OUTPUT, GRADIENTS = 4, 2
SCRATCH = 8192  # bytes, for sums over warps


@dataclass(frozen=True)
class Config:
    """How rows are divided.

    Attributes:
      rows: rows that a thread block takes at a time.
      warps: warps that share a row.
      vector: neighbouring elements that a thread loads at once.
      blocks: thread blocks.
    """

    rows: int
    warps: int
    vector: int
    blocks: int

    @property
    def layout(self) -> Any:
        """The place of each element: the warp, the thread of the warp, its register."""
        row = LANES * self.vector  # of a warp
        tiles: tuple = ((WARPS // self.warps, row * self.warps), (row,), (self.vector,))
        # axes of tiles within tiles, from the last: registers, threads, parts of a row, rows
        dims = {1: (-3,), 2: (-4, -3), WARPS: (-3,)}[self.warps]
        tiling = fragmented_array.Tiling(tiles if self.warps > 1 else (tiles[0], tiles[2]))
        return plgpu.Layout.TILED(tiling, warp_dims=dims, lane_dims=(-2,), vector_dim=-1)


def obstacle(n: int, width: int) -> str | None:
    """Return why the kernels do not take n rows of this width; None if they do.

    >>> obstacle(32768, 100)
    'takes rows of a multiple of 32 elements: got 100'
    """
    if width > WIDEST:
        return f"takes rows of {WIDEST} elements or fewer: got {width}"
    warps = warps_of(width)
    if width % (warps * LANES):
        return f"takes rows of a multiple of {warps * LANES} elements: got {width}"
    if n < WARPS // warps:
        return f"takes {WARPS // warps} rows or more: got {n}"
    return None


def warps_of(width: int) -> int:
    """Return how many warps share a row."""
    return next((warps for warps in (1, 2) if width <= warps * LANES * EACH), WARPS)


def config_for(n: int, width: int, dtype, blocks: int) -> Config:
    """Return how n rows are divided among so many thread blocks at most.

    >>> config_for(32768, 4096, "float32", 528)
    Config(rows=1, warps=4, vector=4, blocks=528)
    """
    warps = warps_of(width)
    # a thread loads 16 bytes at once
    most = 16 // jnp.dtype(dtype).itemsize
    vector = math.gcd(most, width // (warps * LANES))
    at_once = WARPS // warps
    rows = at_once * max(1, min(EACH * LANES * warps // width, n // at_once))
    return Config(rows, warps, vector, min(blocks, pl.cdiv(n, rows)))


@dataclass(frozen=True)
class RowLoops(PlainLoops):
    """Loops over a block of rows in registers.

    Registers have no place for an array with an axis of size one. So the sum of a row stands at
    each of its elements; the compiler computes what follows once for a row.
    """

    def reduce_axes(self, values, axes, by=jnp.sum):
        """Reduce each row, or no axis."""
        return lax.broadcast_in_dim(by(values, 1), values.shape, (0,)) if axes else values

    def divide(self, total, count, nonconstant=None):
        """Return ``total / count``, which is exact where it has the digits of a float32."""
        # A GPU's division (div.full.f32) is wrong by up to 2 units of the last digit, but the mean
        # of equal elements must be exact. The compiler makes one operation of product and
        # difference, so that the remainder is exact. An infinite quotient has none.
        found = total / count
        remainder = total - found * count
        return found + jnp.where(remainder == remainder, remainder, 0) / count


def loops_over(spec: Spec, config: Config, width: int) -> RowLoops:
    """Return the loops over a block of rows."""
    reduction = unsplit((config.rows, width), (1,))
    return RowLoops(replace(spec, reduction=reduction, dtype=jnp.dtype(jnp.float32)))


class Block:
    """The rows that a thread block takes of arrays (B, N, D), and its params, of (B, D)."""

    def __init__(self, x, config: Config):
        self.n, self.width, self.config = x.shape[1], x.shape[2], config
        self.batch, self.block = lax.axis_index("batch"), lax.axis_index("block")
        self.steps = pl.cdiv(pl.cdiv(self.n, config.rows) - self.block, config.blocks)

    def start(self, step):
        """Return the first row of a step."""
        return (self.block + step * self.config.blocks) * self.config.rows

    def at(self, step):
        """Return the index of the rows of a step.

        The last block of rows begins early enough to be whole, and takes some rows again.
        """
        start = jnp.minimum(self.start(step), self.n - self.config.rows)
        return self.batch, pl.ds(start, self.config.rows)

    def is_new(self, step) -> jax.Array:
        """Return where the rows of a step were in no step before."""
        shape = (self.config.rows, self.width)
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=self.config.layout)
        return row + self.at(step)[1].start >= self.start(step)

    def load(self, ref, step) -> jax.Array:
        """Load the rows of a step, as float32."""
        part = ref.at[self.at(step)]
        loaded = plgpu.load(part, layout=self.config.layout, optimized=False)
        return loaded.astype(jnp.float32)

    def store(self, ref, step, values: jax.Array) -> None:
        """Store the rows of a step."""
        plgpu.store(ref.at[self.at(step)], values.astype(ref.dtype), optimized=False)

    def param(self, ref) -> jax.Array:
        """Load a scale or bias for the elements of a block of rows."""
        layout = self.config.layout.reduce(0)
        loaded = plgpu.load(ref.at[self.batch], layout=layout, optimized=False)
        return lax.broadcast_in_dim(loaded, (self.config.rows, self.width), (1,))

    def zeros(self) -> jax.Array:
        """Return zeros for the elements of a block of rows."""
        empty = jnp.zeros((self.config.rows, self.width), jnp.float32)
        return plgpu.layout_cast(empty, self.config.layout)

    def store_sum(self, ref, values: jax.Array) -> None:
        """Store the sum over the rows of a block, in an array (B, blocks, D)."""
        if self.config.rows == 1:
            plgpu.store(ref.at[self.batch, pl.ds(self.block, 1)], values, optimized=False)
        else:
            plgpu.store(ref.at[self.batch, self.block], values.sum(0), optimized=False)


def in_unit(loops: RowLoops, values: jax.Array, stored) -> tuple[jax.Array, jax.Array | float]:
    """Return rows in a unit in which no sum of squares leaves the range of float32, and the unit.

    Epsilon is the same in any unit that is not 1, see engine/exponents.py.
    """
    if stored == jnp.float32:  # its range is what full_range is for
        return values, 1.0
    largest = loops.reduce_axes(jnp.abs(values), (1,), jnp.max)
    unit = of_largest(largest, lambda exponent: 2.0**-exponent)
    return values * unit, unit


def find_stats(loops: RowLoops, values: jax.Array) -> Stats:
    """Return the statistics of rows of float32."""
    # the scaling of reference.statistics, without its stop_gradient, which Mosaic GPU lacks
    scaling = Scaling(None, None, None)
    if loops.spec.centered:
        scaling = scaling._replace(shift=groups.mean(loops, values, scaling))
    return Stats(scaling, *reference.estimate(loops, values, scaling))


def forward_kernel(x, scale, bias, y, *, loops: RowLoops, config: Config):
    """Normalize the rows of a thread block."""
    block = Block(x, config)

    @pl.loop(0, block.steps)
    def _(step):
        values, _ = in_unit(loops, block.load(x, step), x.dtype)
        stats = find_stats(loops, values)
        params = map(block.param, (scale, bias))
        block.store(y, step, reference.apply(loops, values, stats, *params))


def backward_kernel(x, dy, scale, dx, dscale, dbias, *, loops: RowLoops, config: Config):
    """Compute the gradients of the rows of a thread block; those of scale and bias add up."""
    block = Block(x, config)

    def each(step, sums):
        values, unit = in_unit(loops, block.load(x, step), x.dtype)
        own_dy, param = block.load(dy, step), block.param(scale)
        residuals = Residuals(values, find_stats(loops, values), param, param)
        found = reference.backward(loops, residuals, (own_dy, None, None))
        block.store(dx, step, found.x * unit)
        more = found[1:]
        if block.n % config.rows:
            new = block.is_new(step)
            more = [jnp.where(new, a, jnp.zeros_like(a)) for a in more]
        return tuple(total + a for total, a in zip(sums, more, strict=True))

    sums = lax.fori_loop(0, block.steps, each, (block.zeros(), block.zeros()))
    for ref, total in zip((dscale, dbias), sums, strict=True):
        block.store_sum(ref, total)


class Rows:
    """How arrays (..., N, 1, 1, D) and params (..., 1, 1, 1, D) pass through a kernel.

    Arrays pass as (B, N, D), params as (B, D).
    """

    def __init__(self, x: jax.Array, dtype, on_core: int):
        *batch, self.n, _, _, self.width = x.shape
        self.batch = math.prod(batch)
        blocks = pl.cdiv(CORES * on_core, max(1, self.batch))
        self.config = config_for(self.n, self.width, dtype, blocks)

    def of(self, a: jax.Array) -> jax.Array:
        """Return an array as it passes."""
        return a.reshape(self.batch, self.n, self.width)

    def of_param(self, a: jax.Array) -> jax.Array:
        """Return a param as it passes."""
        return a.reshape(self.batch, self.width)

    def call(self, kernel, spec: Spec, arguments, results, interpret: bool) -> list[jax.Array]:
        """Run a kernel."""
        semantics = plgpu.LoweringSemantics.Warpgroup
        return plgpu.kernel(
            partial(kernel, loops=loops_over(spec, self.config, self.width), config=self.config),
            out_type=results,
            grid=(self.config.blocks, self.batch),  # the last may be any number, others 65535
            grid_names=("block", "batch"),
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=semantics, reduction_scratch_bytes=SCRATCH
            ),
            interpret=plgpu.InterpretGPUParams() if interpret else None,
        )(*arguments)


def forward(static: Static, x, scale, bias, *, interpret: bool = False) -> jax.Array:
    """Return the output."""
    rows = Rows(x, x.dtype, OUTPUT)
    y = like((rows.batch, rows.n, rows.width), static.spec.dtype, x, scale, bias)
    given = [rows.of(x), *map(rows.of_param, (scale, bias))]
    return rows.call(forward_kernel, static.spec, given, [y], interpret)[0]


def backward(static: Static, x, scale, dy, *, interpret: bool = False) -> Inputs:
    """Return the gradients with respect to x, scale and bias."""
    # sums over rows take 16 bytes of float32 at once
    rows = Rows(x, jnp.float32, GRADIENTS)
    sums = like((rows.batch, rows.config.blocks, rows.width), jnp.float32, x, dy, scale)
    results = [like((rows.batch, rows.n, rows.width), x.dtype, x, dy, scale), sums, sums]
    given = [rows.of(x), rows.of(dy), rows.of_param(scale)]
    dx, *params = rows.call(backward_kernel, static.spec, given, results, interpret)
    return Inputs(dx, *(param.sum(1).reshape(scale.shape) for param in params))
