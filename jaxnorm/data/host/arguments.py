"""Checks of NumPy arguments; their errors use the words of arguments/validation.py."""

import math

import numpy as np


def numbers(x, name: str = "x") -> np.ndarray:
    """Return ``x`` as an array whose dtype float64 (or complex128) can hold."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name} must not be a masked array: pass {name}.data, and where=~{name}.mask."
        )
    x = np.asarray(x)
    if x.dtype.kind not in "iufc" and not is_extended(x.dtype):
        raise TypeError(
            f"{name} must be floating point or integer: got {x.dtype}. Cast it first, for example "
            "with .astype(np.float32)."
        )
    # float32 holds all numbers of the shorter dtypes that NumPy lacks
    return x if x.dtype.kind != "V" else x.astype(np.float32)


def is_extended(dtype: np.dtype) -> bool:
    """Return whether a dtype is a number below 32 bits that NumPy lacks: bfloat16, float8."""
    # such dtypes come from ml_dtypes as kind V, which records and raw bytes have too
    return dtype.kind == "V" and dtype.names is None and np.can_cast(dtype, np.float64)


def is_real_number(dtype: np.dtype) -> bool:
    """Return whether a dtype holds real numbers, or booleans, which count as 0 and 1."""
    return dtype.kind in "biuf" or is_extended(dtype)


def mask(where, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return a boolean mask, or non-negative float weights, that broadcast against ``shape``."""
    if where is None:
        return None
    where = np.asarray(where)
    where = where.astype(np.float32) if is_extended(where.dtype) else where
    if where.dtype.kind not in "bf":
        raise TypeError(
            f"where must be boolean or float weights: got {where.dtype}. Cast it first, for "
            "example with .astype(bool)."
        )
    padded = (1,) * (len(shape) - where.ndim) + where.shape
    if where.ndim > len(shape) or any(s not in (1, t) for s, t in zip(padded, shape, strict=True)):
        raise ValueError(
            f"where must broadcast against x without growing it: where has shape {where.shape}, x "
            f"has shape {tuple(shape)}."
        )
    if where.dtype.kind == "f" and not (valid := (where >= 0) & (where < math.inf)).all():
        found = where[~valid].ravel()[0]
        raise ValueError(
            f"where, for x of shape {tuple(shape)}, must be finite and >= 0: found {found}."
        )
    return where
