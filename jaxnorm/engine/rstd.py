"""What deviations are multiplied by: 1 / sqrt(var + epsilon), and its derivative."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.engine.groups import Frame, power_of_two, total_weight
from jaxnorm.engine.spec import Spec
from jaxnorm.engine.xla import flat


def rstd(spec: Spec, frame: Frame, var: jax.Array) -> jax.Array:
    """1 / sqrt(var + epsilon), in the units of the frame."""
    return flat(partial(inverse_root, spec))(var, scaled_epsilon(spec, frame, var.dtype), total_weight(spec, frame))


def scaled_epsilon(spec: Spec, frame: Frame, dtype) -> jax.Array:
    """epsilon in the units of the frame, and 0 only if it is 0."""
    info = jnp.finfo(dtype)
    if spec.epsilon == 0 or frame.power is None:
        return jnp.asarray(max(spec.epsilon, float(info.tiny)) if spec.epsilon else 0, dtype)
    fraction, exponent = math.frexp(spec.epsilon)
    exponents = exponent - spec.power_of_epsilon * frame.power.astype(jnp.int32)
    return fraction * power_of_two(jnp.maximum(exponents, info.minexp + 1), dtype)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def inverse_root(spec: Spec, var: jax.Array, epsilon: jax.Array, count) -> jax.Array:
    """1 / sqrt(var + epsilon) or 1 / (sqrt(var) + epsilon); 0 where that would divide by zero."""
    var = var * _unbias(spec, var, count)
    total = var + epsilon if spec.epsilon_in == "var" else jnp.sqrt(var) + epsilon
    safe = total if spec.epsilon > 0 else jnp.where(total == 0, 1, total)
    root = lax.rsqrt(safe) if spec.epsilon_in == "var" else 1 / safe
    return root if spec.epsilon > 0 else jnp.where(total == 0, 0, root)


@inverse_root.defjvp
def _inverse_root_jvp(spec, primals, tangents):
    var, epsilon, count = primals
    r = inverse_root(spec, var, epsilon, count)
    return r, ((-0.5 * tangents[0] * _steepness(spec, var, r, count)) * r) * r  # in turn: r**3 underflows for data of size 1e13


def _steepness(spec: Spec, var, r, count) -> jax.Array:
    """q in d r = -1/2 q r r d var, where r is :func:`inverse_root`; 0 for sqrt(var) where there is no spread."""
    unbias = _unbias(spec, var, count)
    if spec.epsilon_in == "var":
        return r * unbias
    var = var * unbias
    return jnp.where(var > 0, lax.rsqrt(jnp.where(var > 0, var, 1)), 0) * unbias


def _unbias(spec: Spec, var, count):
    if spec.correction == 0:
        return 1
    count = jnp.asarray(count, var.dtype)
    return jnp.where(count > spec.correction, count / jnp.where(count > spec.correction, count - spec.correction, 1), 0)
