"""Compute layer and RMS norm of float32 rows: CONTRIBUTING.md's example, in interpreted Pallas."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxnorm.engine.reference import summed_like
from jaxnorm.kernels.norm import Found, NormKernels, layout_of


def obstacle(x, spec, operands):
    """Return why the kernels cannot take these arguments, in words; None if they can."""
    layout = layout_of(x, spec, operands, ("float32",))
    if isinstance(layout, str):
        return layout
    if layout.p > 1 or layout.g > 1:
        return f"takes rows alone: got {spec.axes} of {spec.reduction.split_shape}"
    if operands.where is not None:
        return "takes no mask"
    if spec.correction or spec.epsilon_in != "var" or spec.lowest_exponent(x.dtype) is not None:
        return "takes neither correction, epsilon_in, full_range nor a tiny epsilon"
    return None


def rows(run, x, others, widths):
    """Run a program, whose results have these widths, for each row of x and of other arrays."""
    arrays = [jnp.broadcast_to(a, (*x.shape[:-1], a.shape[-1])) for a in (x, *others)]
    arrays = [a.reshape(-1, a.shape[-1]) for a in arrays]
    block = lambda width: pl.BlockSpec((1, width), lambda row: (row, 0))
    results = pl.pallas_call(
        run,
        grid=(len(arrays[0]),),
        in_specs=[block(a.shape[-1]) for a in arrays],
        out_specs=[block(width) for width in widths],
        out_shape=[jax.ShapeDtypeStruct((len(arrays[0]), w), jnp.float32) for w in widths],
        interpret=True,
    )(*arrays)
    return [a.reshape(*x.shape[:-1], a.shape[-1]) for a in results]


def forward_of_row(spec, x, scale, bias, y, shift, low_mean, var):
    mean = partial(jnp.mean, axis=-1, keepdims=True)
    shift[...] = mean(x[...]) if spec.centered else jnp.zeros_like(shift)
    u = x[...] - shift[...]
    low_mean[...] = mean(u) if spec.centered else jnp.zeros_like(low_mean)
    var[...] = mean(u**2) - low_mean[...] ** 2
    y[...] = (u - low_mean[...]) * jax.lax.rsqrt(var[...] + spec.epsilon) * scale[...] + bias[...]


def backward_of_row(spec, x, shift, low_mean, var, dy, scale, dlow_mean, dvar, dx, dscale):
    mean = partial(jnp.mean, axis=-1, keepdims=True)
    deviation, r = x[...] - shift[...] - low_mean[...], jax.lax.rsqrt(var[...] + spec.epsilon)
    g, slope = dy[...] * scale[...], 2 * dvar[...] / x.shape[-1]
    slope = slope - r**3 * mean(g * deviation)
    intercept = dlow_mean[...] / x.shape[-1] - r * mean(g) if spec.centered else 0.0
    dx[...] = g * r + intercept + slope * deviation
    dscale[...] = dy[...] * deviation * r


def run_forward(static, arguments):
    x, scale, bias, _ = arguments
    run = partial(forward_of_row, static.spec)
    return Found(*rows(run, x, (scale, bias), (x.shape[-1], 1, 1, 1)), exponent=None)


def run_backward(static, residuals, cotangents):
    (x, shift, low_mean, var, _, scale, _), (dy, dlow_mean, dvar) = residuals, cotangents
    zero = lambda a: jnp.zeros_like(var) if a is None else a
    others = (shift, low_mean, var, dy, scale, zero(dlow_mean), zero(dvar))
    dx, dscale = rows(partial(backward_of_row, static.spec), x, others, (x.shape[-1],) * 2)
    return dx, *(summed_like(static.loops, scale, values) for values in (dscale, dy))


kernels = NormKernels("toy_rows", forward={"cpu": run_forward}, backward={"cpu": run_backward})
forward, derivative = kernels.forward, kernels.derivative
