"""Applying Moments to data, given ones or its own, as the public functions do it."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm import validation
from jaxnorm.application import Rule, apply, own, shared_axes
from jaxnorm.axes import Axes, Pooling, number, resolve
from jaxnorm.dtypes import compute_dtype, real
from jaxnorm.engine.derivatives import own_statistics
from jaxnorm.engine.plan import IMPLEMENTATIONS, Plan, select
from jaxnorm.frame import Frame, make_frame, nothing_saved
from jaxnorm.kernels.placement import known, sharded
from jaxnorm.sets import Sets
from jaxnorm.statistics import Moments, assemble, moments_of


def normalize(
    x: jax.Array,
    /,
    moments: Moments,
    *,
    scale=None,
    bias=None,
    epsilon: float = 1e-5,
    where=None,
    correction: float = 0,
    epsilon_in: str = "var",
    dtype=None,
) -> jax.Array:
    """``(x - mean) / sqrt(var + epsilon) * scale + bias`` with given Moments, for example a running average.

    Args:
      x: floating or complex array.
      moments: mean and variance that broadcast against ``x``. An axis of size g against one of size C, with g dividing
        C, holds the Moments of g equal blocks, as :func:`moments` returns them for ``(g [c])``.
      scale: factor that broadcasts against ``x``.
      bias: summand that broadcasts against ``x``.
      epsilon: added to the variance.
      where: mask or weights; the output is 0 where they are 0, whatever ``x`` holds there.
      correction: 0 uses the biased variance, 1 the unbiased one (needs ``moments.count``).
      epsilon_in: ``"var"`` as above, ``"std"`` for ``/ (sqrt(var) + epsilon)``.
      dtype: dtype of the result; that of ``x`` by default.

    Returns:
      An array of the shape of ``x``. Inside, at least float32. A mean is known to the precision of its dtype; where it
      is millions of times the standard deviation, :func:`standardize` is more exact.

    Raises:
      TypeError: integer or boolean ``x``.
      ValueError: shapes that do not fit, negative ``epsilon`` or variance.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> x = jnp.array([[1.0, 3.0], [5.0, 9.0]])
    >>> jn.normalize(x, jn.moments(x, "n [c]"), epsilon=0.0).tolist()
    [[-1.0, 1.0], [-1.0, 1.0]]
    """
    x = validation.floating(x)
    if not isinstance(moments, Moments):
        raise TypeError(f"normalize takes Moments: got {type(moments).__name__}. Make them with jaxnorm.moments or jaxnorm.Moments.")
    validation.variance(moments.var)
    rule = make_rule(x, epsilon, correction, epsilon_in, dtype)
    where = validation.mask(where, x.shape)
    blocks = _blocks(moments, x.shape)
    scale, bias = (_fitting(name, value, x.shape) for name, value in (("scale", scale), ("bias", bias)))
    rule, moments = _static(rule, moments)
    return _normalize(rule, blocks, x, moments, where, scale, bias)


def standardize(
    x: jax.Array,
    /,
    axes: Axes,
    *,
    scale=None,
    bias=None,
    epsilon: float = 1e-5,
    where=None,
    centered: bool = True,
    correction: float = 0,
    epsilon_in: str = "var",
    axis_name=None,
    full_range: bool = False,
    implementation: str | None = None,
    dtype=None,
    **sizes: int,
) -> jax.Array:
    """Normalizes ``x`` by its own statistics over ``axes``: :func:`moments` and :func:`normalize` in one.

    More exact than the two in turn, since the mean is never rounded to one number, and with a derivative that keeps
    only ``x`` and a few numbers per set.

    Args:
      x: floating or complex array.
      axes: the pooled axes: an int, ints, or a pattern such as ``"n [h w] (g [c])"``.
      scale: factor that broadcasts against ``x``.
      bias: summand that broadcasts against ``x``.
      epsilon: added to the variance; 0 is allowed, and a set without spread then gives ``bias``, and gradient 0. With another
        its gradient is multiplied by 1 / sqrt(epsilon), but by less where epsilon is below 1.2e-38, the smallest normal
        float32, or below 1.2e-38 times the square of the largest element.
      where: boolean mask or float weights. What is masked out counts for nothing, outputs 0 and gets gradient 0, even
        NaN. A set of which nothing is left is 0 everywhere.
      centered: False divides by the root mean square and subtracts nothing.
      correction: 0 for the biased variance, 1 for the unbiased one; a set of no more elements has variance 0.
      epsilon_in: ``"var"`` for ``sqrt(var + epsilon)``, ``"std"`` for ``sqrt(var) + epsilon``.
      axis_name: name (or names) of a device or vmap axis to pool over, weighted by count.
      full_range: first divides each set by a power of two, which keeps numbers of any size (1e-30, 3e38) exact, for 1.2 to
        2 times the work in plain JAX (bfloat16 input and ``epsilon`` below 1e-30 always do).
      implementation: None chooses; ``"xla"`` is plain JAX, ``"native"`` a CPU kernel, see :mod:`jaxnorm.kernels`.
      dtype: dtype of the result; that of ``x`` by default.
      **sizes: sizes of split axes in a pattern.

    Returns:
      An array of the shape of ``x``.

    Raises:
      TypeError: integer or boolean ``x``.
      ValueError: axes, pattern, mask or parameters that do not fit ``x``; a negative ``epsilon``.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> jn.standardize(jnp.array([[1.0, 3.0], [5.0, 9.0]]), "n [c]", epsilon=0.0).tolist()
    [[-1.0, 1.0], [-1.0, 1.0]]
    """
    validated = _validated(
        x,
        axes,
        scale=scale,
        bias=bias,
        epsilon=epsilon,
        where=where,
        centered=centered,
        correction=correction,
        epsilon_in=epsilon_in,
        axis_name=axis_name,
        full_range=full_range,
        dtype=dtype,
        **sizes,
    )
    return fused(*validated, implementation=implementation)


def plan(
    x: jax.Array,
    /,
    axes: Axes,
    *,
    scale=None,
    bias=None,
    epsilon: float = 1e-5,
    where=None,
    centered: bool = True,
    correction: float = 0,
    epsilon_in: str = "var",
    axis_name=None,
    full_range: bool = False,
    implementation: str | None = None,
    dtype=None,
    **sizes: int,
) -> Plan:
    """Which implementation :func:`standardize` would run for these arguments, and why it would not run the others.

    Arguments are those of :func:`standardize`.

    Returns:
      A Plan, which prints itself: ``implementation`` is the name, ``others`` holds the reason for each other name.

    Raises:
      TypeError: as :func:`standardize`.
      ValueError: as :func:`standardize`; an implementation that cannot take these arguments.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> jn.plan(jnp.ones((4, 3)), "n [c]", implementation="xla")
    xla
      not native: implementation='xla' is asked for
    """
    options = {"epsilon": epsilon, "where": where, "centered": centered, "correction": correction, "epsilon_in": epsilon_in}
    options |= {"axis_name": axis_name, "full_range": full_range, "dtype": dtype}
    return _selected(implementation, *_validated(x, axes, scale=scale, bias=bias, **options, **sizes))


def _validated(
    x,
    axes,
    *,
    scale=None,
    bias=None,
    epsilon=1e-5,
    where=None,
    centered=True,
    correction=0,
    epsilon_in="var",
    axis_name=None,
    full_range=False,
    dtype=None,
    **sizes,
) -> tuple[Sets, Rule, jax.Array, Any, Any, Any]:
    """Sets, rule, x, where, scale and bias."""
    x = validation.floating(x)
    sets = Sets(resolve(axes, x.shape, sizes), axis_name, bool(centered))
    where = validation.mask(where, x.shape)
    rule = make_rule(x, epsilon, correction, epsilon_in, dtype, full_range)
    scale, bias = (_fitting(name, value, x.shape) for name, value in (("scale", scale), ("bias", bias)))
    return sets, rule, x, where, scale, bias


def fused(sets: Sets, rule: Rule, x, where, scale, bias, implementation: str | None = None) -> jax.Array:
    """The output, of arguments that have been validated."""
    return _run(sets, rule, x, where, scale, bias, implementation, moments=False)[0]


def fused_with_moments(sets: Sets, rule: Rule, x, where, scale, bias, implementation: str | None = None) -> tuple[jax.Array, Moments]:
    """Output and Moments, of arguments that have been validated."""
    return _run(sets, rule, x, where, scale, bias, implementation, moments=True)


def _run(sets: Sets, rule: Rule, x, where, scale, bias, implementation: str | None, *, moments: bool) -> tuple:
    selected = _selected(implementation, sets, rule, x, where, scale, bias).implementation
    if isinstance(rule.epsilon, jax.core.Tracer):
        return _in_two_steps(sets, rule, x, where, scale, bias)
    return _fused(sets, rule, selected, x, where, scale, bias, moments=moments)


def _selected(implementation: str | None, sets: Sets, rule: Rule, x, where, scale, bias) -> Plan:
    return select(implementation, IMPLEMENTATIONS, "jaxnorm.kernels.native", x, sets, rule, where, scale, bias)


def _in_two_steps(sets: Sets, rule: Rule, x, where, scale, bias) -> tuple[jax.Array, Moments]:
    """The same where epsilon is traced."""
    found = moments_of(sets, x, where)
    rule, spread = _static(rule, found)
    return _normalize(rule, _blocks(found, x.shape), x, spread, where, scale, bias), found


def _static(rule: Rule, moments: Moments) -> tuple[Rule, Moments]:
    """The same rule and Moments; an epsilon that is traced is added to the variance instead."""
    if not isinstance(rule.epsilon, jax.core.Tracer):
        return rule, moments
    var = jnp.asarray(moments.var)
    return replace(rule, epsilon=0.0), replace(moments, var=var + rule.epsilon.astype(var.dtype))


def make_rule(x: jax.Array, epsilon=1e-5, correction=0, epsilon_in="var", dtype=None, full_range=False) -> Rule:
    dtype = validation.output_dtype(dtype, x)
    rule = Rule(validation.epsilon(epsilon), validation.correction(correction), validation.epsilon_in(epsilon_in), dtype, bool(full_range))
    if isinstance(rule.epsilon, jax.core.Tracer) and (rule.correction or rule.epsilon_in == "std" or rule.full_range):
        raise TypeError("epsilon must be a static number beside correction, epsilon_in='std' and full_range: got a traced value.")
    return rule


def _fitting(name: str, value, shape: tuple[int, ...]) -> jax.Array | None:
    if value is None:
        return None
    value = validation.floating(value, name)
    validation.fits(name, value.shape, shape)
    return value


def _blocks(moments: Moments, shape: tuple[int, ...]) -> Pooling:
    """How ``shape`` splits so that every axis of the Moments broadcasts against it."""
    given = jnp.broadcast_shapes(jnp.shape(moments.mean), jnp.shape(moments.var), jnp.shape(moments.count))
    padded = (1,) * (len(shape) - len(given)) + given
    divides = len(given) == len(shape) and all(s > 0 and c % s == 0 for s, c in zip(given, shape, strict=True) if s != c)
    if not divides:
        validation.fits("moments", given, shape)
    parts = tuple((c,) if s in (1, c) else (s, c // s) for s, c in zip(padded, shape, strict=True))
    return Pooling(shape, parts, ())


@partial(jax.jit, static_argnums=(0, 1, 2), static_argnames="moments")
def _fused(sets: Sets, rule: Rule, implementation: str, x, where, scale, bias, *, moments: bool = False):
    sets = sets if moments or implementation == "native" else sets.by_channel(x.dtype, scale, bias)
    pooling = sets.pooling
    where, scale, bias = (None if a is None else a.reshape(pooling.fit(a.shape)) for a in (where, scale, bias))
    shape = x.shape
    whole = implementation != "native" and jax.default_backend() == "cpu" and known(x) and not sharded(x)
    if whole and where is None:
        sets, (x, scale, bias) = sets.in_line(x, scale, bias)
    sets = replace(sets, whole=whole, alone=number(*(sets.pooling.split[axis] for axis in shared_axes(sets, scale, bias))) <= 1)
    lowest = rule.lowest_power(x.dtype)
    if implementation == "native":
        from jaxnorm.kernels import native  # takes long to import, for what most never need

        y, found = native.standardize(sets, rule, lowest, moments, x, scale, bias)
    else:
        frame = make_frame(sets, x, where, lowest)
        y, *found = own_statistics(sets, rule, own, x, where, frame, (), scale, bias)
        found = (frame, *found)
    return y.reshape(shape), jax.tree.map(lambda leaf: leaf.reshape(pooling.kept), assemble(*found)) if moments else None


@partial(jax.jit, static_argnums=(0, 1))
def _normalize(rule: Rule, blocks: Pooling, x, moments: Moments, where, scale, bias):
    where, scale, bias = (None if a is None else a.reshape(blocks.fit(a.shape)) for a in (where, scale, bias))
    dtype = compute_dtype(x.dtype)
    count, var = (_fit_blocks(blocks, leaf).astype(real(dtype)) for leaf in (moments.count, moments.var))
    mean = _fit_blocks(blocks, moments.mean).astype(dtype)
    step = nothing_saved(partial(apply, Sets(blocks), rule))
    return step(where, Frame(count, None, mean), x, jnp.zeros_like(mean), var, scale, bias)


def _fit_blocks(blocks: Pooling, leaf) -> jax.Array:
    """Moments of blocks, reshaped to broadcast against the split shape."""
    leaf = jnp.asarray(leaf)
    padded = (1,) * (len(blocks.shape) - leaf.ndim) + leaf.shape
    parts = zip(padded, blocks.shape, blocks.parts, strict=True)
    return leaf.reshape([s for size, full, part in parts for s in (part if size == full else (size, *(1,) * (len(part) - 1)))])
