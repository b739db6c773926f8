"""Single leaves of a batch: summaries, floors of deviations, and errors that name the leaf."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxnorm.arguments.axes import Axes, resolve
from jaxnorm.data.host.arguments import is_real_number, mask, numbers
from jaxnorm.data.host.statistics import Summary, merge, summarize
from jaxnorm.data.transform import Floor, nonnegative, positive
from jaxnorm.data.trees import flatten, prefix_of, sizes_in


def summarized(leaf, axes: Axes, sizes: Mapping[str, int], where, threads: int) -> Summary:
    """Return the summary of an array; booleans count as 0 and 1.

    Raises:
      TypeError: the array holds no real numbers.
      ValueError: axes or a mask that do not fit.
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
    reduction = resolve(axes, x.shape, sizes_in(axes, dict(sizes)))
    return summarize(x, reduction, mask(where, x.shape), threads=threads)


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


def merge_summaries(old: Summary | None, new: Summary) -> Summary:
    """Merge two summaries into one."""
    if old is None:
        return new
    moments = merge(old.moments, new.moments)
    return Summary(moments, np.minimum(old.min, new.min), np.maximum(old.max, new.max))


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


def check_shape(path: str, old: Summary | None, new: Summary) -> None:
    """Refuse statistics whose shape differs from the statistics so far."""
    if old is not None and old.min.shape != new.min.shape:
        shapes = f"statistics of shape {new.min.shape} after {old.min.shape}"
        must = f"{_label(path)} must keep its shape but for the reduction axes"
        raise ValueError(f"{must}: got {shapes}.")


def label(shape: tuple[int, ...], feature: int) -> str:
    """Return the indices of a feature along the axes that are not reduced.

    >>> label((1, 3, 4), 6)
    '1,2'
    """
    sizes = [size for size in shape if size > 1]
    return ",".join(map(str, np.unravel_index(feature, sizes)))


def floors(floor, floor_relative, paths: Mapping[str, Any]) -> dict[str, Floor]:
    """Return the floor of each leaf, from one for all or a mapping from paths of leaves or trees.

    >>> floors({"state": 0.01}, 0.0, ["state", "image"])["state"].absolute
    0.01
    """
    absolute = _by_path("floor", floor, paths, positive)
    relative = _by_path("floor_relative", floor_relative, paths, nonnegative)
    usual = Floor()
    return {
        path: Floor(absolute.get(path, usual.absolute), relative.get(path, usual.relative))
        for path in paths
    }


def _by_path(name: str, given, paths: Mapping[str, Any], check) -> dict[str, float]:
    if not isinstance(given, Mapping):
        return dict.fromkeys(paths, check(name, given))
    values = {prefix: check(f"{name} of {prefix!r}", v) for prefix, v in flatten(given).items()}
    used = {path: prefix for path in paths if (prefix := prefix_of(values, path)) is not None}
    if unknown := sorted(set(values) - set(used.values())):
        raise ValueError(
            f"{name} must name leaves that are fitted: got {unknown}, fitted are {sorted(paths)}."
        )
    return {path: values[prefix] for path, prefix in used.items()}


def naming_leaf(path: str, error: Exception) -> Exception:
    """Return an error with the leaf's name before its message.

    The result is a plain TypeError or ValueError, since subclasses may take other arguments.
    """
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(f"{_label(path)}: {error}" if path else str(error))


def _label(path: str) -> str:
    return f"leaf {path!r}" if path else "a batch"
