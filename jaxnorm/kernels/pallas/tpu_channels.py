"""Instance and group norm of channels on a TPU: x is read once for the output.

x and dy are read once for the gradients. Arrays pass as (P, N, C): positions, images, channels. XLA
lays out what convolutions make in this order, for 128 channels or more and 8 images or more, so
that nothing is copied between a convolution and a norm. Elsewhere XLA may have to copy.

Whole images of some channels are copied to the memory next to the cores (VMEM), while those before
are worked on. A loop takes pieces of them whose values fit in the registers. What is done with a
piece are the formulas of engine/reference.py, in several passes, see passes.py.
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxnorm.engine import reference
from jaxnorm.engine.reference import Inputs, Residuals, Stats
from jaxnorm.engine.scaling import find_scaling
from jaxnorm.engine.spec import Spec
from jaxnorm.kernels.layout import Layout
from jaxnorm.kernels.pallas.passes import Passes, by_unit, passes_over
from jaxnorm.kernels.pallas.tpu_rows import LANES, SUBLANES, scaled
from jaxnorm.kernels.placement import like
from jaxnorm.kernels.static import Static

MIB = 2**20
# MiB of VMEM that a program may use, by kind of device: all of a core, and up to v4 the default.
VMEM = {
    "TPU v2": 16,
    "TPU v3": 16,
    "TPU v4": 16,
    "TPU v5 lite": 128,
    "TPU v5e": 128,
    "TPU v5": 64,
    "TPU v5p": 64,
    "TPU v6 lite": 128,
    "TPU v6e": 128,
    "TPU7x": 64,
}
FEWEST_CHANNELS, FEWEST_IMAGES = LANES, SUBLANES
WIDEST = 1024  # channels that a matrix sums by groups: 1600 took 36 s to compile
SHARE = 7 / 8  # of the VMEM for blocks: the rest is for params, and for what XLA keeps there
SPARE = 2 * MIB  # for params, sums and registers that are spilled: 0.6 were counted


def vmem() -> int:
    """Return how many bytes of VMEM this device has, or the least of all where it is no TPU."""
    kind = jax.devices()[0].device_kind if jax.default_backend() == "tpu" else ""
    return VMEM.get(kind, min(VMEM.values())) * MIB


@dataclass(frozen=True)
class Config:
    """How images are divided.

    Attributes:
      images: images of a block.
      channels: channels of a block, of whole groups.
      piece: positions of a piece of a block.
    """

    images: int
    channels: int
    piece: int


def config_for(p: int, c: int, d: int, sizes: Sequence[int], room: int) -> Config | None:
    """Return how images (P, N, C) in groups of d channels are divided, for any N.

    It is None if blocks of arrays whose elements have these sizes in bytes do not fit twice in
    VMEM, of which there are ``room`` bytes.

    >>> config_for(49, 512, 16, (4, 4, 4), 16 * MIB)
    Config(images=80, channels=128, piece=7)
    >>> config_for(56 * 56, 256, 8, (4, 4, 4), 16 * MIB)
    """
    # The least of both is what a register of this dtype holds. A block of 2**19 elements keeps
    # memory busy while a step begins. A piece of 2**16 elements fills the 64 registers.
    width = width_of(c, d)
    least = SUBLANES * 4 // min(sizes)
    position = -(-width // LANES) * LANES  # elements of VMEM of one image
    left = int(room * SHARE) - _spare(width, d)
    fit = left // (2 * sum(sizes) * p * position) // least
    if fit <= 0:
        return None
    images = min(fit, max(1, 2**19 // (p * position) // least)) * least
    return Config(images, width, _piece(p, 2**16 // (images * position)))


def width_of(c: int, d: int) -> int:
    """Return how many of c channels a block has: whole registers of whole groups, or all."""
    return next((k for k in range(LANES, c, LANES) if c % k == 0 and k % d == 0), c)


def _spare(width: int, d: int) -> int:
    """Return how many bytes of VMEM a kernel needs besides its blocks."""
    # groups of channels are summed by a matrix, made in float32 and taken in bfloat16
    return SPARE + (0 if d in (1, width) else 6 * width**2)


def _piece(p: int, most: int) -> int:
    """Return into pieces of how many positions p are divided, about as many as the most.

    >>> _piece(49, 6), _piece(59, 6), _piece(12, 40)
    (7, 6, 12)
    """
    whole = [k for k in range(most // 2 + 1, most * 5 // 4 + 1) if p % k == 0]  # without a rest
    return whole[-1] if whole else max(1, min(p, most))


def obstacle(layout: Layout, spec: Spec, sizes: Sequence[int]) -> str | None:
    """Return why the kernels cannot take images of this layout, in words; None if they can."""
    n, p, g, d = layout[:4]
    if n == 1 and d == 1:
        return f"takes no batch norm: got {spec.axes} of {spec.reduction.split_shape}"
    if g * d < FEWEST_CHANNELS:
        return f"takes images of {FEWEST_CHANNELS} channels or more: got {g * d}"
    if n < FEWEST_IMAGES:
        return f"takes {FEWEST_IMAGES} images or more: got {n}"
    if 1 < d < width_of(g * d, d) > WIDEST:
        return f"takes no groups of {d} of {g * d} channels, which fill no {WIDEST} or fewer"
    if config_for(p, g * d, d, sizes, vmem()) is None:
        return (
            f"takes images that fit in {vmem() // MIB} MiB of memory next to the cores: got {p} "
            "positions"
        )
    return None


def statistics(loops: Passes, values: jax.Array) -> Stats:
    """Return the statistics of each group, which take the passes of :func:`passes_of`."""
    scaling = find_scaling(loops, values, None)
    # without its derivative, since sums asked for in there would not be seen out here
    return Stats(scaling, *inspect.unwrap(reference.estimate)(loops, values, scaling))


def passes_of(spec: Spec) -> Sequence[int]:
    """Return how many sums the statistics need, by pass: the shift, low mean and squares."""
    return (1, 2) if spec.centered else (1,)


def forward_kernel(x, scale, bias, y, *, loops: Passes):
    """Normalize a block of images."""

    def run(unit):
        def formula(loops, at):
            values = scaled(x[at], unit).astype(jnp.float32)
            params = (a[...][None] for a in (scale, bias))
            return reference.apply(loops, values, statistics(loops, values), *params)

        own = loops.after(formula, passes_of(loops.spec))

        def each(at):
            y[at] = own.run(formula, at).astype(y.dtype)

        own.each_piece(each)

    by_unit(loops, x, run)


def backward_kernel(x, dy, scale, dx, dscale, dbias, *, loops: Passes, n: int, shared: bool):
    """Compute the gradients of a block of images.

    The gradients of a shared scale and bias add up over all blocks.
    """
    step = pl.program_id(1)
    if shared:

        @pl.when(step == 0)
        def _():
            dscale[...] = jnp.zeros_like(dscale)
            dbias[...] = jnp.zeros_like(dbias)

    def add(param, value):
        if not shared:
            param[...] = value
            return
        # after the last image there may be anything
        image = step * value.shape[0] + lax.broadcasted_iota(jnp.int32, value.shape, 0)
        param[...] += jnp.where(image < n, value, 0) if n % value.shape[0] else value

    def run(unit):
        gain = jnp.broadcast_to(scale[...], x.shape[1:])[None]

        def formula(loops, at):
            values = scaled(x[at], unit).astype(jnp.float32)
            residuals = Residuals(values, statistics(loops, values), gain, gain)
            return reference.backward(loops, residuals, (dy[at].astype(jnp.float32), None, None))

        own = loops.after(formula, (*passes_of(loops.spec), 2))

        def each(at):
            found = own.run(formula, at)
            dx[at] = scaled(found.x, unit).astype(dx.dtype)

        own.each_piece(each)
        found = own.run(formula, pl.ds(0, 1))  # of any piece
        add(dscale, found.scale[0])
        add(dbias, found.bias[0])

    by_unit(loops, x, run)


class Images:
    """How arrays (..., N, P, G, D) and params (..., N or 1, 1, G, D) pass through a kernel.

    Arrays pass as (P, N, C), where N counts the images of all batches. Params pass as (1, C) where
    all images share them, else as (N, C).
    """

    def __init__(self, x: jax.Array, scale: jax.Array, *sizes: int):
        *batch, n, self.p, g, self.d = self.given = x.shape
        self.n, self.c = math.prod(batch) * n, g * self.d
        self.per_image = (*batch, n, 1, g, self.d)
        self.shared = scale.size == self.c
        config = config_for(self.p, self.c, self.d, sizes, vmem())
        assert config is not None
        least = SUBLANES * 4 // min(sizes)
        images = min(config.images, -(-self.n // least) * least)
        self.config = replace(config, images=images)
        block = self.p * images * -(-config.channels // LANES) * LANES
        self.bytes = 2 * sum(sizes) * block + _spare(config.channels, self.d)

    def loops(self, spec: Spec) -> Passes:
        """Return the loops over a block."""
        shape = (self.p, self.config.images, self.config.channels)
        return passes_over(spec, shape, self.d, self.config.piece)

    def of(self, a: jax.Array) -> jax.Array:
        """Return an array as it passes."""
        return a.reshape(self.n, self.p, self.c).transpose(1, 0, 2)

    def as_given(self, a: jax.Array) -> jax.Array:
        """Return an array that has passed as it was given."""
        return a.transpose(1, 0, 2).reshape(self.given)

    def of_param(self, a: jax.Array) -> jax.Array:
        """Return a param as it passes."""
        a = a if self.shared else jnp.broadcast_to(a, self.per_image)
        return a.reshape(-1, self.c)

    def param_as_given(self, a: jax.Array, param: jax.Array) -> jax.Array:
        """Return the gradient of a param, from what a kernel gives."""
        if self.shared:
            return a.sum(0).reshape(param.shape)
        a = a.reshape(self.per_image)
        return a if a.shape == param.shape else a.sum(-4, keepdims=True)

    def call(self, kernel, arrays, params, results, *, interpret: bool) -> list[jax.Array]:
        """Run a kernel, the shapes of whose results say whether they are arrays or params."""
        images, width = self.config.images, self.config.channels
        block = pl.BlockSpec((self.p, images, width), lambda j, i: (0, i, j))
        per_image = pl.BlockSpec((images, width), lambda j, i: (i, j))

        def spec(a):
            if len(a.shape) == 3:
                return block
            if not self.shared:
                return per_image
            return pl.BlockSpec((a.shape[0], width), lambda j, i: (0, j))

        ins = [*map(self.of, arrays), *map(self.of_param, params)]
        return pl.pallas_call(
            kernel,
            grid=(self.c // width, pl.cdiv(self.n, images)),
            in_specs=list(map(spec, ins)),
            out_specs=list(map(spec, results)),
            out_shape=results,
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=self.bytes),
            interpret=interpret,
        )(*ins)


def forward(static: Static, x, scale, bias, *, interpret: bool = False) -> jax.Array:
    """Return the output."""
    dtype = jnp.dtype(static.spec.dtype or x.dtype)
    images = Images(x, scale, x.dtype.itemsize, dtype.itemsize)
    kernel = partial(forward_kernel, loops=images.loops(static.spec))
    y = like((images.p, images.n, images.c), dtype, x, scale, bias)
    return images.as_given(images.call(kernel, [x], [scale, bias], [y], interpret=interpret)[0])


def backward(static: Static, x, scale, dy, *, interpret: bool = False) -> Inputs:
    """Return the gradients with respect to x, scale and bias."""
    images = Images(x, scale, *(a.dtype.itemsize for a in (x, dy, x)))
    loops = images.loops(static.spec)
    kernel = partial(backward_kernel, loops=loops, n=images.n, shared=images.shared)
    given = x, dy, scale
    of_params = like(
        (images.config.images if images.shared else images.n, images.c), jnp.float32, *given
    )
    results = [like((images.p, images.n, images.c), x.dtype, *given), of_params, of_params]
    dx, *params = images.call(kernel, [x, dy], [scale], results, interpret=interpret)
    return Inputs(images.as_given(dx), *(images.param_as_given(a, scale) for a in params))
