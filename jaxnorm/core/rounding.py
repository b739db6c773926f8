"""Where half precision is rounded between a norm and its scale and bias.

With R the rounding to half precision and z the normalized x, ``rounding="once"`` gives
``R(z * scale + bias)``, as the engine computes it. ``"twice"`` gives ``R(R(R(z) * scale) + bias)``:
the arithmetic of a model that casts z back to the dtype of x before it applies its parameters.
``"input"`` continues so, and computes z itself in the dtype of x: each operation is rounded, but
for the sums over a group, as in a model written without a cast.

A factor multiplies what comes out in float32 at least, before the last rounding: a gate.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import unsplit
from jaxnorm.arguments.dtypes import compute_dtype, promoted, real_dtype
from jaxnorm.core.plan import usual_loops
from jaxnorm.engine.counts import group_weight
from jaxnorm.engine.groups import Scaling, inverse_root, mask_fill, mask_fill_split
from jaxnorm.engine.groups import mean as mean_of_group
from jaxnorm.engine.sharding import alongside, split_operands
from jaxnorm.engine.spec import Operands, Spec

Rounding = Literal["once", "twice", "input"]


def with_offset(
    scale: jax.Array | None, offset: float, dtype: DTypeLike, rounding: Rounding
) -> jax.Array | None:
    """Return the gain, ``offset + scale``.

    It is added up in the dtype of the statistics of ``dtype``, since half precision would round it
    to 8 or 11 bits; with ``rounding="twice"`` or ``"input"`` it is rounded so.
    """
    offset = validation.number("scale_offset", offset)
    if not offset:
        return scale
    if scale is None:
        raise ValueError(f"scale_offset must have a scale to be added to: got {offset}, no scale.")
    wide = promoted(None, real_dtype(compute_dtype(dtype)), compute_dtype(scale.dtype))
    gain = offset + scale.astype(wide)
    return gain if rounding == "once" else rounded(gain, scale.dtype).astype(scale.dtype)


class Finish(NamedTuple):
    """What the engine computes of a norm, and what comes after it.

    Attributes:
      finish: function of the engine's output that gives the output of the norm.
      scale: the gain that the engine applies.
      bias: the shift that the engine applies.
      dtype: dtype of the engine's output.
    """

    finish: Callable[[jax.Array], jax.Array]
    scale: jax.Array | None
    bias: jax.Array | None
    dtype: jnp.dtype


def after_norm(
    rounding: Any,
    x_dtype: jnp.dtype,
    where: jax.Array | None,
    segments: Any,
    *,
    factor: jax.Array | None,
    dtype: DTypeLike | None,
    **params: jax.Array | None,
) -> Finish:
    """Return what is left to the engine by the rounding, or of a norm with a factor.

    Raises:
      TypeError: the output cannot have this dtype.
      ValueError: the norm cannot be rounded so.
    """
    if rounding not in ("once", "twice", "input"):
        raise ValueError(f"rounding must be 'once', 'twice' or 'input': got {rounding!r}.")
    if segments is not None:
        raise ValueError(
            f"rounding={rounding!r} must have no segments: normalize without a scale first."
        )
    dtypes = {name: param.dtype for name, param in params.items() if param is not None}
    output = validation.output_dtype(dtype, x=x_dtype, **dtypes)
    finish = partial(scale_and_shift, factor=factor, where=where, dtype=output)
    if rounding != "once":  # the engine's output is the normalized x, in its dtype
        return Finish(partial(finish, **params), None, None, x_dtype)
    wide = promoted(None, compute_dtype(x_dtype), *dtypes.values())
    return Finish(partial(finish, scale=None, bias=None), **params, dtype=wide)


@partial(jax.jit, static_argnames="dtype")
def scale_and_shift(
    z: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    factor: jax.Array | None,
    where: jax.Array | None,
    dtype: jnp.dtype,
) -> jax.Array:
    """Return ``(z * scale + bias) * factor``.

    Here z and each result before the last have the dtype they have in jnp, and are rounded to it.
    Elements that the mask hides are 0.
    """
    scale, bias, factor, where = alongside(unsplit(z.shape, ()), z, scale, bias, factor, where)
    held, y = z.dtype, rounded(z, z.dtype)
    for operation, param in ((jnp.multiply, scale), (jnp.add, bias)):
        if param is not None:
            held = promoted(None, held, param.dtype)
            wide = promoted(None, y.dtype, held)
            y = rounded(operation(y.astype(wide), param.astype(wide)), held)
    if factor is not None:
        wide = promoted(None, y.dtype, factor.dtype)
        y = y.astype(wide) * factor.astype(wide)
    if where is not None:
        y = jnp.where(where.astype(bool), y, 0)
    return y.astype(dtype)


def check_input_rounding(spec: Spec, x: jax.Array) -> None:
    """Raise unless ``rounding="input"`` can compute what the spec asks for."""
    ordinary = {"correction": 0, "epsilon_in": "var", "full_range": False}
    for name, usual in ordinary.items():
        if (given := getattr(spec, name)) != usual:
            raise ValueError(f"rounding='input' must have {name}={usual!r}: got {given!r}.")
    if jnp.iscomplexobj(x):
        raise TypeError(f"rounding='input' must have a real x: got {x.dtype}.")


@partial(jax.jit, static_argnums=0)
def in_input_dtype(spec: Spec, operands: Operands) -> jax.Array:
    """Return the normalized x as arithmetic in its own dtype gives it.

    Each operation is rounded. The mean over a group is of sums in float32, as in ``jnp.mean``.
    """
    shape, dtype = operands.x.shape, jnp.dtype(spec.dtype)
    operands = split_operands(spec, operands)
    where, r = operands.where, partial(rounded, dtype=dtype)
    x = mask_fill_split(spec, operands.x, where).reshape(spec.reduction.split_shape)
    x = r(x)
    loops, weight = usual_loops(spec), None
    if where is not None:
        weight = group_weight(loops, where, None, x.dtype)
    scaling = Scaling(weight, None, None, where)
    mean = lambda values: r(mean_of_group(loops, values, scaling))

    if spec.centered:
        x = mask_fill(r(x - mean(x)), where)
    epsilon = jnp.asarray(spec.epsilon if operands.epsilon is None else operands.epsilon, dtype)
    total = r(mean(r(x * x)) + epsilon.astype(x.dtype))
    z = r(x * r(inverse_root(total, 0, positive=False)))
    return z.reshape(shape).astype(dtype)


def rounded(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Round values to a dtype, and return them in float32 at least.

    XLA may leave out a cast to half precision that another cast follows; it keeps a reduction of
    precision. The exponent stays that of float32, since a reduced one would make numbers below the
    smallest normal one 0.
    """
    wide = promoted(None, values.dtype, jnp.float32)
    if jnp.finfo(dtype).bits >= 32:
        return values.astype(wide)
    kind = jnp.finfo(wide)
    cast = values.astype(dtype).astype(wide)
    return lax.reduce_precision(cast, kind.nexp, jnp.finfo(dtype).nmant)
