"""Checks of the arguments of public functions.

Every error says what must hold, what was given, and the remedy.
"""

import math
from collections.abc import Callable
from functools import cache
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from jaxnorm.arguments.dtypes import checked_dtype, promoted


def as_array(x, name: str = "x") -> jax.Array:
    """Return ``x`` as it is if it is a JAX array, else as an array.

    A NumPy array is copied, since the caller may overwrite it later.
    """
    # jnp.asarray is avoided. It would copy traced values, raise under debug_nans for
    # NaN behind a mask, and compile a program for each shape of a NumPy array: 20 ms,
    # where device_put takes 0.3.
    if isinstance(x, jax.Array):
        return x
    if isinstance(x, np.ndarray | np.generic):
        check_fits_dtype(x, name)
    try:
        return (
            jax.device_put(x.copy()) if isinstance(x, np.ndarray | np.generic) else jnp.asarray(x)
        )
    except OverflowError as error:
        raise ValueError(
            f"{name} must fit in the integers of JAX: {error}. Set jax_enable_x64, or pass smaller "
            "numbers."
        ) from None
    except (TypeError, ValueError):
        kind = f"one of dtype {x.dtype}" if isinstance(x, np.ndarray) else type(x).__name__
        raise TypeError(f"{name} must be an array of numbers: got {kind}.") from None


def check_fits_dtype(x: np.ndarray | np.generic, name: str) -> None:
    """Raise a ValueError where JAX would change the value of a NumPy integer.

    JAX takes integers of 64 bits as integers of 32 bits.
    """
    held = jax.dtypes.canonicalize_dtype(x.dtype)
    if held != x.dtype and jnp.issubdtype(x.dtype, jnp.integer) and x.size:
        for value in (x.min(), x.max()):
            if not jnp.iinfo(held).min <= value <= jnp.iinfo(held).max:
                raise ValueError(
                    f"{name} must fit in {held}: found {value} of {x.dtype}. Set jax_enable_x64, "
                    "or pass smaller numbers."
                )


def floating(x, name: str = "x") -> jax.Array:
    """Return ``x`` as an array of a floating or complex dtype."""
    x = x if isinstance(x, jax.Array) else as_array(x, name)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError(
            f"{name} must be floating point: got {x.dtype}. Cast it first, for example with "
            ".astype(jnp.float32)."
        )
    return x


def real(x, name: str) -> jax.Array:
    """Return ``x`` as an array of a floating dtype that is not complex."""
    x = floating(x, name)
    if jnp.iscomplexobj(x):
        raise TypeError(f"{name} must be real: got {x.dtype}.")
    return x


def summands(x, residual) -> tuple[jax.Array, jax.Array]:
    """Return two arrays of one shape, cast to the dtype to which they promote."""
    x, residual = floating(x), floating(residual, "residual")
    if x.shape != residual.shape:
        raise ValueError(
            f"residual must have the shape of x: got {residual.shape} for x of shape {x.shape}."
        )
    if x.dtype == residual.dtype:
        return x, residual
    dtype = promoted(None, x, residual)
    return x.astype(dtype), residual.astype(dtype)


def check_fits(
    name: str, shape: tuple[int, ...], target: tuple[int, ...], target_name: str = "x"
) -> None:
    """Raise a ValueError unless ``shape`` broadcasts against ``target`` without growing it."""
    padded = (1,) * (len(target) - len(shape)) + tuple(shape)
    if len(shape) > len(target) or any(
        s not in (1, t) for s, t in zip(padded, target, strict=True)
    ):
        # shapes align at the end: a mask (b, t) for x of shape (b, t, c) lacks an axis
        leads = 0 < len(shape) < len(target) and tuple(shape) == tuple(target[: len(shape)])
        hint = (
            f" Did you mean {name}[..., {', '.join(['None'] * (len(target) - len(shape)))}]?"
            if leads
            else ""
        )
        raise ValueError(
            f"{name} must broadcast against {target_name} without growing it: {name} has shape "
            f"{tuple(shape)}, {target_name} has shape {tuple(target)}.{hint}"
        )


def param(name: str, value, shape: tuple[int, ...]) -> jax.Array | None:
    """Return a scale or bias that broadcasts against ``shape``."""
    if value is None:
        return None
    value = floating(value, name)
    check_fits(name, value.shape, shape)
    return value


def mask(
    where, shape: tuple[int, ...], name: str = "where", target_name: str = "x"
) -> jax.Array | None:
    """Return a boolean mask, or non-negative float weights, that broadcasts against ``shape``.

    It is a constant under differentiation.
    """
    if where is None:
        return None
    where = as_array(where, name)
    if where.dtype != jnp.bool_ and not jnp.issubdtype(where.dtype, jnp.floating):
        raise TypeError(
            f"{name} must be boolean or float weights: got {where.dtype}. Cast it first, for "
            "example with .astype(bool)."
        )
    check_fits(name, where.shape, shape, target_name)
    if where.dtype != jnp.bool_:
        message = f"{name}, for {target_name} of shape {tuple(shape)}, must be finite and >= 0"
        where = check_values(where, lambda w: (w >= 0) & (w < math.inf), message)
    return jax.lax.stop_gradient(where)


def segments(ids, num_segments, shape: tuple[int, ...]) -> jax.Array:
    """Return ids in [0, num_segments) along the last axis of ``shape``.

    They have one axis, or all of ``shape`` with ids for each row.
    """
    if ids is None or num_segments is None:
        given, missing = (
            ("segments", "num_segments") if num_segments is None else ("num_segments", "segments")
        )
        raise TypeError(
            f"segments and num_segments must be given together: got {given} alone. Pass "
            f"{missing}=..., too."
        )
    if (
        isinstance(num_segments, bool)
        or not hasattr(num_segments, "__index__")
        or isinstance(num_segments, jax.core.Tracer)
    ):
        raise TypeError(
            f"num_segments must be a static integer: got {num_segments!r} "
            f"({type(num_segments).__name__})."
        )
    if num_segments < 1:
        raise ValueError(f"num_segments must be at least 1: got {num_segments}.")
    # NumPy's ids may have 64 bits, of which JAX keeps 32: check them before the cast
    ids = ids if isinstance(ids, np.ndarray) else as_array(ids, "segments")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(
            f"segments must be integers, an id for each position: got {ids.dtype}. Cast them "
            "first, .astype(jnp.int32)."
        )
    by_row = len(ids.shape) == len(shape) and all(
        s in (1, size) for s, size in zip(ids.shape[:-1], shape, strict=False)
    )
    if ids.shape[-1:] != shape[-1:] or not (len(ids.shape) == 1 or by_row):
        both = f"{shape[-1:]}" if len(shape) == 1 else f"{shape[-1:]} or {shape}"
        raise ValueError(
            "segments must have the shape of the axes of x up to the first reduction axis, "
            f"{both}: got {ids.shape}."
        )
    message = f"segments must be ids from 0 to num_segments - 1 = {num_segments - 1}"
    ids = _wide(
        as_array(check_values(ids, lambda i: (i >= 0) & (i < num_segments), message), "segments")
    )
    return ids if len(ids.shape) == 1 else jnp.broadcast_to(ids, shape)


def _wide(array: jax.Array) -> jax.Array:
    """Cast integers to at least 32 bits.

    In a comparison with fewer bits, a number that does not fit would turn into another one.
    """
    return (
        array.astype(jnp.int32)
        if jnp.issubdtype(array.dtype, jnp.integer) and array.dtype.itemsize < 4
        else array
    )


def variance(name: str, var) -> Any:
    """Return a variance that is not negative.

    NaN and Inf pass, since they show in the output.
    """
    # ~(v < 0) and not v >= 0, which is false for NaN
    return check_values(var, lambda v: ~(v < 0), f"the variance of {name} must be >= 0")


def output_dtype(dtype, x: jnp.dtype, **params: jnp.dtype) -> jnp.dtype:
    """Return the dtype that an output is asked to have, by default the dtype of ``x``.

    The dtype must hold the normalized, scaled and shifted ``x``. All arguments are dtypes.
    """
    dtype = checked_dtype("dtype", x if dtype is None else dtype)
    is_complex = _is_complex(x)
    for name, param in params.items():
        if _is_complex(param) and not _is_complex(dtype):
            raise TypeError(
                f"{name} must be real for a real output: got {param} for one of {dtype}. "
                "Pass dtype=jnp.complex64."
            )
    if not jnp.issubdtype(dtype, jnp.complexfloating if is_complex else jnp.inexact):
        needed = "complex for complex x" if is_complex else "floating point"
        raise TypeError(
            f"dtype, that of the output, must be {needed}: got {dtype} for x of {x}. Cast "
            "the output instead."
        )
    return dtype


def _is_complex(dtype: jnp.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating)


def epsilon_in(value: str) -> str:
    """Return ``value`` if it is ``'var'``, ``'std'`` or ``'max'``."""
    if value not in ("var", "std", "max"):
        raise ValueError(
            "epsilon_in must be 'var' (added to the variance), 'std' (added to its root) or 'max' "
            f"(the least value of its root): got {value!r}."
        )
    return value


def momentum(value) -> Any:
    """Return a number in [0, 1], the weight of the old value; it may be traced."""
    return number_or_traced(
        "momentum",
        value,
        1,
        " It is the weight of the old value (1 - momentum in PyTorch's terms).",
    )


def flag(name: str, value: Any, remedy: str = "") -> bool:
    """Return ``value`` as a bool if it is one, of Python or NumPy."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    kind = repr(value)
    if isinstance(value, jax.core.Tracer):
        kind = "a traced value"
    elif getattr(value, "ndim", 0):
        kind = f"an array of shape {value.shape}"
    raise TypeError(f"{name} must be True or False: got {kind}.{remedy}")


def number_or_traced(name: str, value, most: float = math.inf, remedy: str = "") -> Any:
    """Return a finite number from 0 to ``most``.

    A traced number is checked under checkify.
    """
    if not isinstance(value, jax.core.Tracer):
        return number(name, value, most, remedy)
    if value.ndim or not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(
            f"{name} must be one floating point number: got shape {value.shape}, {value.dtype}."
        )
    return check_values(
        value, lambda v: (v >= 0) & (v <= most) & (v < math.inf), f"{name} must {_range(most)}"
    )


def number(name: str, value, most: float = math.inf, remedy: str = "") -> float:
    """Return a static, finite number from 0 to ``most``."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} must be a static number: got a traced value. Pass it as a Python number."
        )
    if isinstance(value, jax.Array | np.ndarray) and value.ndim == 0:
        value = value.item()
    # a bool is a Real: True as an epsilon is a mistake
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number: got {value!r} ({type(value).__name__}).")
    value = float(value)
    if not 0 <= value <= most or value == math.inf:
        raise ValueError(f"{name} must {_range(most)}: got {value}.{remedy}")
    return value


def _range(most: float) -> str:
    return "be finite and >= 0" if most == math.inf else f"lie in [0, {most}]"


def check_values(array, holds: Callable[[Any], Any], message: str) -> Any:
    """Return the array, and raise where ``holds`` is false.

    Concrete values raise a ValueError at once. Traced values raise under checkify, if the result is
    used.
    """
    if isinstance(array, jax.core.Tracer):
        return _checked()(array, jnp.all(holds(_wide(array))), message=message + ".")
    # NumPy, because inside a trace JAX would trace operations on concrete values too
    concrete = np.asarray(array)
    if not np.all(holds(concrete)):
        raise ValueError(f"{message}: found {concrete[~holds(concrete)].ravel()[0]}.")
    return array


@cache
def _checked() -> Callable[..., jax.Array]:
    """Return a function of an array and a boolean that returns the array.

    Under checkify it raises where the boolean is false.
    """
    # checkify.debug_check would be an effect. jax.export saves no program that has an
    # effect, and jit calls such a program from Python: a batch norm in evaluation would
    # take 94 us, not 7. The imports stand here, since importing this library needs none.
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir

    try:
        from jax._src.checkify import check_p, error_checks
    except ImportError:
        # JAX may move its internals
        return _checked_by_effect
    # the primitive is the identity, except under checkify, which calls the rule below
    primitive = Primitive("jaxnorm_checked")
    primitive.def_impl(lambda array, ok, *, message: array)
    primitive.def_abstract_eval(lambda array, ok, *, message: array)
    mlir.register_lowering(primitive, lambda context, array, ok, *, message: [array])
    batching.primitive_batchers[primitive] = lambda arrays, axes, *, message: (
        primitive.bind(*arrays, message=message),
        axes[0],
    )
    ad.primitive_jvps[primitive] = lambda primals, tangents, *, message: (
        primitive.bind(*primals, message=message),
        tangents[0],
    )

    # the arguments are the state of checkify, one or several by version of JAX, then
    # array and ok
    def rule(*arguments, message):
        *state, array, ok = arguments
        failed, _ = checkify.checkify(lambda ok: checkify.check(jnp.all(ok), message))(ok)
        leaves, structure = jax.tree.flatten(failed)
        return error_checks[check_p](*state, *leaves, err_tree=structure, debug=True)[0], array

    error_checks[primitive] = rule
    return primitive.bind


def _checked_by_effect(array: jax.Array, ok: jax.Array, *, message: str) -> jax.Array:
    """Check the array as :func:`_checked` does, with public functions alone."""
    checkify.debug_check(ok, message)
    return array
