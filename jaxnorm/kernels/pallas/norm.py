"""Norms by the Pallas kernels, and what they take on each platform."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.engine.collectives import varying_axes
from jaxnorm.engine.exponents import fits_any_unit
from jaxnorm.engine.primitives import Kernels, zeros
from jaxnorm.engine.spec import Operands, Spec
from jaxnorm.kernels import placement
from jaxnorm.kernels import plain as formulas
from jaxnorm.kernels.layout import Layout
from jaxnorm.kernels.norm import Found, NormKernels, layout_of
from jaxnorm.kernels.pallas import tpu_rows
from jaxnorm.kernels.static import Static

DTYPES = ("float32", "bfloat16")
CAPABILITY = (9, 0)  # of a GPU: Hopper
VERSION = (0, 12)  # of JAX, whose Mosaic GPU stores an array as it lies in registers


def obstacle(x: jax.Array, spec: Spec, operands: Operands) -> str | None:
    """Return why the kernels cannot take these arguments, in words; None if they can."""
    layout = layout_of(x, spec, operands, DTYPES)
    if isinstance(layout, str):
        return layout
    if operands.where is not None:
        return "takes no mask"
    if spec.full_range or not spec.epsilon_hides_squares(jnp.float32):
        least = spec.least_epsilon(jnp.float32)
        return (
            f"takes neither full_range nor an epsilon below {least:.0e}: got epsilon={spec.epsilon}"
        )
    if x.dtype == jnp.bfloat16 and not fits_any_unit(spec):
        return (
            "takes no bfloat16 with epsilon_in='std' or 'max', or with an epsilon above 32 for all "
            f"elements of a group: got {spec.epsilon} for each of {layout.p * layout.d}"
        )
    if spec.batch_invariant:
        return "was not tried on a device for batch_invariant=True"
    if placement.platform() == "gpu":
        return _not_shared(spec, operands) or _gpu_obstacle(layout, spec)
    if not of_rows(layout):
        sizes = [jnp.dtype(dtype).itemsize for dtype in (x.dtype, spec.dtype, x.dtype)]
        return _kernels("tpu", layout).obstacle(layout, spec, sizes)
    if layout.d > tpu_rows.WIDEST:
        return f"takes rows of {tpu_rows.WIDEST} elements or fewer: got {layout.d}"
    return None


def of_rows(layout: Layout) -> bool:
    """Return whether groups are rows, else channels of images."""
    return layout.p == layout.g == 1


def _not_shared(spec: Spec, operands: Operands) -> str | None:
    """Return why rows that have each a scale or bias of their own are not taken."""
    for name, a in (("scale", operands.scale), ("bias", operands.bias)):
        shape = () if a is None else spec.reduction.fit(a.shape)
        if any(size != 1 for axis, size in enumerate(shape) if axis not in spec.axes):
            return f"takes a scale and bias on a GPU that all rows share: got {name} of {shape}"
    return None


def _gpu_obstacle(layout: Layout, spec: Spec) -> str | None:
    """Return why a GPU does not take groups, whatever their scale and bias."""
    if not of_rows(layout):
        return f"takes rows alone on a GPU: got {spec.axes} of {spec.reduction.split_shape}"
    if jax.__version_info__ < VERSION:
        return f"takes JAX {VERSION[0]}.{VERSION[1]} or newer on a GPU: got {jax.__version__}"
    capability = placement.capability()
    if capability is not None and capability < CAPABILITY:
        least, found = (".".join(map(str, each)) for each in (CAPABILITY, capability))
        return f"takes GPUs of compute capability {least} or newer: got {found or 'none'}"
    return _kernels("gpu", layout).obstacle(layout.n, layout.d)


def _kernels(platform: str, layout: Layout) -> Any:
    """Return the module of the kernels for a platform and a layout."""
    if not of_rows(layout):
        return import_module(f"{__package__}.tpu_channels")
    # Mosaic GPU takes long to import, and older versions of JAX lack some of it
    return tpu_rows if platform == "tpu" else import_module(f"{__package__}.gpu_rows")


def _recompute(static: Static, x: jax.Array) -> bool:
    """Return whether backward recomputes the statistics.

    It reads x anyway. Stored, the statistics of a row would take 128 elements of float32 each.
    """
    return not static.moments


def by_platform(
    kernel: Callable, plain: Callable, platforms: tuple[str, ...] = ("cpu", "tpu", "gpu")
) -> Kernels:
    """Return a kernel ``(static, *arguments, platform=, interpret=)`` by platform.

    On a CPU the kernel for a TPU is interpreted. Plain JAX, of arranged arrays too, stands in for
    the interpreter where arrays vary over the axes of a mesh, which it cannot follow. It stands in
    for a kernel where a program that is made on one platform for another finds none, too.
    """

    def run(static: Static, *arguments, platform: str, interpret: bool = False):
        if interpret and any(map(varying_axes, jax.tree.leaves(arguments))):
            return plain(static, *arguments)
        if platform == "gpu" and _gpu_obstacle(static.layout, static.spec) is not None:
            return plain(static, *arguments)
        return kernel(static, *arguments, platform=platform, interpret=interpret)

    interpreted = partial(run, platform="tpu", interpret=True)
    return {
        platform: interpreted if platform == "cpu" else partial(run, platform=platform)
        for platform in platforms
    }


def _forward(static: Static, arguments, *, platform: str, interpret: bool) -> Found:
    """Return the output and, where they are asked for, the statistics."""
    if static.moments:  # no kernel computes them for their own sake
        return _plain(static, arguments)
    zero = zeros(static.stats_shape(arguments[0]), jnp.float32, *jax.tree.leaves(arguments))
    y = _kernels(platform, static.layout).forward(static, *arguments[:3], interpret=interpret)
    return Found(y, None, None, zero, None)


def _plain(static: Static, arguments) -> Found:
    x, *rest = arguments
    return Found(*formulas.plain(static, (x.reshape(static.shape), *rest)))


def _backward(static: Static, residuals, cotangents, *, platform: str, interpret: bool):
    """Return the gradients with respect to x, scale and bias."""
    if static.moments:
        return _plain_backward(static, residuals, cotangents)
    x, scale, dy = residuals[0], residuals[-2], cotangents[0]
    run = _kernels(platform, static.layout).backward
    return run(static, x, scale, dy, interpret=interpret)


def _plain_backward(static: Static, residuals, cotangents):
    (x, *rest), (dy, *dstats) = residuals, cotangents
    x, dy = (a.reshape(static.shape) for a in (x, dy))
    return formulas.plain_backward(static, (x, *rest), (dy, *dstats))


KERNELS = NormKernels(
    "jaxnorm_pallas",
    forward=by_platform(_forward, _plain),
    backward=by_platform(_backward, _plain_backward),
    recompute=_recompute,
)
forward, derivative = KERNELS.forward, KERNELS.derivative
