"""Prepare the arguments of a norm once, then run it.

call = prepare(x, reduction, features, scale=scale, bias=bias, epsilon=epsilon, where=where)
y = run(call)
y, moments = run_with_moments(call)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import Reduction
from jaxnorm.arguments.features import aligned
from jaxnorm.arguments.options import AxisName, EpsilonIn, Param
from jaxnorm.core.plan import Plan, describe_derivative, forward, forward_of_sum, select
from jaxnorm.core.rounding import (
    Rounding,
    after_norm,
    check_input_rounding,
    in_input_dtype,
    with_offset,
)
from jaxnorm.core.statistics import Moments, from_stats
from jaxnorm.engine.segments import Segments
from jaxnorm.engine.sharding import by_compiler, split_operands
from jaxnorm.engine.spec import Operands, Spec

OF_CORRECTION = " 0 divides by n, 1 by n - 1."


@dataclass(frozen=True)
class Call:
    """A norm and its arguments, all of them checked.

    Attributes:
      spec: the static arguments.
      operands: the arrays.
      implementation: the name that the caller asks for; None for the rule of core/plan.py.
      finish: function of the engine's output, see core/rounding.py; None for none.
      in_input_dtype: whether x is normalized by arithmetic in its own dtype, without the engine.
    """

    spec: Spec
    operands: Operands
    implementation: str | None = None
    finish: Callable[[jax.Array], jax.Array] | None = None
    in_input_dtype: bool = False

    def finished(self, y: jax.Array) -> jax.Array:
        """Return the output of the norm, given the engine's."""
        return y if self.finish is None else self.finish(y)

    def select(self) -> Plan:
        """Return which implementation runs.

        Raises:
          ValueError: the one that is asked for cannot take these arguments.
        """
        operation = "norm" if self.spec.ordinary and not self.in_input_dtype else None
        return select(self.implementation, operation, self.operands.x, self.spec, self.operands)

    def plan(self) -> Plan:
        """Return the plan, which also says how gradients are computed.

        Nothing is computed for it.
        """
        found = self.select()
        types = jax.eval_shape(partial(split_operands, self.spec), self.operands)
        return replace(
            found, derivative=describe_derivative(found.implementation, self.spec, types)
        )


def prepare(
    x: jax.Array,
    reduction: Reduction,
    features: tuple[int, ...] | None = None,
    *,
    scale: Param = None,
    scale_offset: float = 0,
    rounding: Rounding = "once",
    bias: Param = None,
    epsilon: ArrayLike = 1e-5,
    where: Param = None,
    mask_name: str = "where",
    centered: bool = True,
    correction: float = 0,
    epsilon_in: EpsilonIn = "var",
    axis_name: AxisName = None,
    full_range: bool = False,
    implementation: str | None = None,
    dtype: DTypeLike | None = None,
    batch_invariant: bool = False,
    segments: ArrayLike | None = None,
    num_segments: int | None = None,
    adjust: Callable | None = None,
    param: Any = None,
    exponent_axes: tuple[int, ...] = (),
    formula: Callable | None = None,
    factor: jax.Array | None = None,
    x_dtype: jnp.dtype | None = None,
) -> Call:
    """Check the arguments of a norm, and return them as a call.

    Args:
      x: a floating or complex array.
      reduction: its reduction axes. There may be none: every element is then a group of its own.
      features: the axes along which scale and bias lie, whose shape they have; None where they
        broadcast against ``x``.
      scale: the gain, less ``scale_offset``.
      scale_offset: a number that is added to the scale.
      rounding: where half precision is rounded, see core/rounding.py.
      bias: the shift.
      epsilon: added to the variance, or what epsilon_in says; it may be traced.
      where: boolean mask or float weights.
      mask_name: what errors call ``where``.
      centered: whether the mean is subtracted.
      correction: number that is subtracted from the count in the variance.
      epsilon_in: whether epsilon is added to the variance or to its root, or is the least root.
      axis_name: device or vmap axes that are reduced as well.
      full_range: whether each group is divided by a power of two first.
      implementation: the name that the caller asks for.
      dtype: of the output.
      batch_invariant: whether the bits of a group must not depend on the other groups.
      segments: ids along the first reduction axis.
      num_segments: how many segments there are.
      adjust: function that changes the statistics before they are applied, see :class:`Spec`.
      param: the last argument of ``adjust`` or ``formula``: an array or several.
      exponent_axes: the axes along which all groups have one scale exponent.
      formula: function that makes the output of the statistics, see :class:`Spec`.
      factor: array of the shape of ``x``, float32 at least and finite wherever an element is
        masked, by which the output is multiplied.
      x_dtype: the dtype of the array that ``x`` was computed from, to which the normalized x is
        rounded, and which the output has by default; that of ``x`` by default.

    Raises:
      TypeError: arguments of a wrong kind.
      ValueError: arguments that do not fit.
    """
    if where is not None:
        where = validation.mask(where, x.shape, mask_name)
    scale, bias = _parameters(x.shape, features, scale, bias)
    if type(scale_offset) is not int or scale_offset:  # a call without one takes no time for it
        scale = with_offset(scale, scale_offset, x.dtype, rounding)
    finish = None
    x_dtype = x.dtype if x_dtype is None else x_dtype
    if rounding != "once" or factor is not None:
        finish, scale, bias, dtype = after_norm(
            rounding, x_dtype, where, segments, scale=scale, bias=bias, factor=factor, dtype=dtype
        )
    elif x_dtype != x.dtype and dtype is None:
        dtype = x_dtype
    spec, traced_epsilon = make_spec(
        reduction,
        x,
        scale,
        bias,
        epsilon=epsilon,
        correction=correction,
        epsilon_in=epsilon_in,
        dtype=dtype,
        centered=centered,
        axis_name=axis_name,
        full_range=full_range,
        batch_invariant=batch_invariant,
        adjust=adjust,
        exponent_axes=exponent_axes,
        formula=formula,
    )
    ids = None
    if segments is not None or num_segments is not None:
        spec, ids = spec.along(segments, num_segments)
    if rounding == "input":
        check_input_rounding(spec, x)
    operands = Operands(x, where, scale, bias, ids, traced_epsilon, param)
    return Call(spec, operands, implementation, finish, rounding == "input")


def _parameters(
    shape: tuple[int, ...], features: tuple[int, ...] | None, scale: Param, bias: Param
) -> list[jax.Array | None]:
    """Return scale and bias as they broadcast against x of a shape."""
    if features is not None:
        return aligned(shape, features, scale=scale, bias=bias)
    return [validation.param("scale", scale, shape), validation.param("bias", bias, shape)]


def make_spec(
    reduction: Reduction,
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    epsilon: ArrayLike,
    correction: float = 0,
    epsilon_in: EpsilonIn = "var",
    dtype: DTypeLike | None = None,
    centered: bool = True,
    axis_name: AxisName = None,
    full_range: bool = False,
    batch_invariant: bool = False,
    segments: Segments | None = None,
    adjust: Callable | None = None,
    exponent_axes: tuple[int, ...] = (),
    formula: Callable | None = None,
) -> tuple[Spec, jax.Array | None]:
    """Return the static arguments, checked, and the epsilon if it is traced.

    Kernels and compiled programs need a static one, which then is part of the spec.
    """
    traced: Any = None
    if isinstance(epsilon, jax.core.Tracer):
        traced, epsilon = validation.number_or_traced("epsilon", epsilon), 0.0
        correction = validation.number("correction", correction, remedy=OF_CORRECTION)
        if correction or validation.epsilon_in(epsilon_in) == "std":
            raise TypeError(
                "epsilon must be a static number beside correction and epsilon_in='std': got a "
                "traced value."
            )
    dtypes = tuple(None if a is None else a.dtype for a in (x, scale, bias))
    static: Any = (dtype, epsilon, correction, epsilon_in, axis_name, centered, full_range)
    rest = (batch_invariant, segments, adjust, exponent_axes, formula)
    make: Callable[..., Spec] = _spec
    try:
        hash((static, rest))
    except TypeError:  # an array as epsilon, a list of axis names
        make = _spec.__wrapped__
    return make(reduction, dtypes, *static, *rest), traced


@lru_cache(maxsize=4096, typed=True)
def _spec(
    reduction: Reduction,
    dtypes: tuple,
    dtype,
    epsilon,
    correction,
    epsilon_in,
    axis_name,
    centered,
    full_range,
    batch_invariant,
    segments,
    adjust,
    exponent_axes,
    formula,
) -> Spec:
    """Return the spec. Arguments are checked when they come for the first time."""
    names = ("x", "scale", "bias")
    given = {name: each for name, each in zip(names, dtypes, strict=True) if each is not None}
    correction = validation.number("correction", correction, remedy=OF_CORRECTION)
    output = validation.output_dtype(dtype, **given)
    epsilon_in = validation.epsilon_in(epsilon_in)
    epsilon = validation.number("epsilon", epsilon)
    return Spec(
        reduction,
        axis_name=axis_name,
        centered=validation.flag("centered", centered),
        epsilon=epsilon,
        correction=correction,
        epsilon_in=epsilon_in,
        dtype=output,
        full_range=validation.flag("full_range", full_range),
        batch_invariant=validation.flag("batch_invariant", batch_invariant),
        segments=segments,
        adjust=adjust,
        exponent_axes=exponent_axes,
        formula=formula,
    )


def run(call: Call) -> jax.Array:
    """Return the output of a prepared call."""
    implementation = call.select().implementation
    if call.in_input_dtype:
        return call.finished(in_input_dtype(call.spec, call.operands))
    return call.finished(_run(call.spec, implementation, call.operands))


def run_with_moments(call: Call) -> tuple[jax.Array, Moments]:
    """Return the output of a prepared call, and the Moments of its groups."""
    implementation = call.select().implementation
    y, moments = _run_with_moments(call.spec, implementation, call.operands)
    return call.finished(y), moments


def run_of_sum(call: Call, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the output for ``x + residual`` instead of x, and this sum.

    Both have one shape.
    """
    # XLA shards segments: the sum is a step of its own.
    if call.operands.ids is not None or call.in_input_dtype:
        total = call.operands.x + residual
        return run(replace(call, operands=call.operands._replace(x=total))), total
    implementation = call.select().implementation
    y, total = _run_of_sum(call.spec, implementation, call.operands, residual)
    return call.finished(y), total


@partial(jax.jit, static_argnums=(0, 1))
def _run(spec: Spec, implementation: str, operands: Operands) -> jax.Array:
    def each(operands: Operands) -> jax.Array:
        operands = split_operands(spec, operands)
        return forward(implementation, spec, operands, moments=False)[0]

    return by_compiler(each, operands)(operands)


@partial(jax.jit, static_argnums=(0, 1))
def _run_with_moments(
    spec: Spec, implementation: str, operands: Operands
) -> tuple[jax.Array, Moments]:
    operands = split_operands(spec, operands)
    y, stats = forward(implementation, spec, operands, moments=True)
    return y, from_stats(spec, stats)


@partial(jax.jit, static_argnums=(0, 1))
def _run_of_sum(
    spec: Spec, implementation: str, operands: Operands, residual: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return forward_of_sum(implementation, spec, split_operands(spec, operands), residual)
