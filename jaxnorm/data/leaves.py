"""Single leaves of a batch: checks of their elements, and errors that name the leaf."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxnorm.arguments.axes import Axes, Reduction, resolve
from jaxnorm.data.host.arguments import is_real_number, mask, numbers
from jaxnorm.data.trees import prefix_of, sizes_in


class Elements(NamedTuple):
    """A leaf of a batch, checked: an array, its reduction, and its mask or None."""

    x: np.ndarray
    reduction: Reduction
    where: np.ndarray | None


def elements(leaf, axes: Axes, sizes: Mapping[str, int], where, with_sketch: bool) -> Elements:
    """Return a leaf of a batch for reducing; booleans count as 0 and 1.

    Raises:
      TypeError: the array holds no real numbers.
      ValueError: axes or a mask that do not fit; weights, where quantiles are fitted.
    """
    # asarray would drop the mask of a masked array silently; `numbers` refuses such an array
    x = leaf if isinstance(leaf, np.ma.MaskedArray) else np.asarray(leaf)
    x = numbers(x.view(np.uint8) if x.dtype == bool else x)
    if np.iscomplexobj(x):
        parts = "Split it into its real and imaginary parts."
        raise TypeError(f"x must be real: got {x.dtype}. {parts}")
    if not x.ndim:
        remedy = "Lists are trees; make one an array, np.asarray(list)."
        raise ValueError(f"an array must have an axis to reduce: got one number. {remedy}")
    reduction, where = resolve(axes, x.shape, sizes_in(axes, dict(sizes))), mask(where, x.shape)
    if with_sketch and where is not None and not np.isin(where, (0, 1)).all():
        raise ValueError(
            "quantiles need a mask, of elements that count or do not: got weights other than 0 "
            "and 1. Fit the quantiles without them."
        )
    return Elements(x, reduction, where)


def with_remedy(error: Exception, leaves: Mapping[str, Any], path: str) -> Exception:
    """Return the error of a leaf without numbers, with the way to leave that leaf out."""
    dtypes: dict[str, Any] = {other: getattr(leaf, "dtype", None) for other, leaf in leaves.items()}
    kind = dtypes[path].kind if isinstance(dtypes[path], np.dtype) else ""
    # kinds of strings, objects, dates and durations: data sets hold them next to numbers
    if kind not in tuple("SUTOMm"):
        return error
    fit = [
        other
        for other, dtype in dtypes.items()
        if dtype is None or (isinstance(dtype, np.dtype) and is_real_number(dtype))
    ]
    given = ", ".join(f"{other!r}: 0" for other in fit or ["x"])
    text = str(error).partition(" Cast it")[0]
    cast = " Cast it to numbers, or leave it out" if kind in "OMm" else " Leave it out"
    return TypeError(f"{text}{cast}: name the leaves to fit, axes={{{given}}}.")


def check_leaves(
    leaves: Mapping[str, Any], axes: Mapping[str, Axes], before: Mapping[str, Any]
) -> None:
    """Refuse a batch that lacks a leaf named in ``axes``, or has other leaves than ``before``."""
    if not leaves and list(axes) == [""]:
        raise ValueError("a batch must hold an array: this one holds none.")
    if before and (differing := sorted(set(before) ^ set(leaves))):
        are = "is" if len(differing) == 1 else "are"
        raise ValueError(f"every batch must have the same leaves: {differing} {are} not in all.")
    named = {
        prefix: any(prefix_of({prefix: 0}, path) == prefix for path in leaves) for prefix in axes
    }
    if missing := [prefix for prefix, found in named.items() if not found]:
        are = "is" if len(missing) == 1 else "are"
        raise ValueError(f"axes must name leaves of the batch: {missing} {are} not among them.")


def check_shape(path: str, old: tuple[int, ...], new: tuple[int, ...]) -> None:
    """Refuse statistics whose shape differs from the statistics so far."""
    if old != new:
        shapes = f"statistics of shape {new} after {old}"
        must = f"{_label(path)} must keep its shape but for the reduction axes"
        raise ValueError(f"{must}: got {shapes}.")


def label(shape: tuple[int, ...], feature: int) -> str:
    """Return the indices of a feature along the axes that are not reduced.

    >>> label((1, 3, 4), 6)
    '1,2'
    """
    sizes = [size for size in shape if size > 1]
    return ",".join(map(str, np.unravel_index(feature, sizes)))


def naming_leaf(path: str, error: Exception) -> Exception:
    """Return an error with the leaf's name before its message.

    The result is a plain TypeError or ValueError, since subclasses may take other arguments.
    """
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(f"{_label(path)}: {error}" if path else str(error))


def _label(path: str) -> str:
    return f"leaf {path!r}" if path else "a batch"
