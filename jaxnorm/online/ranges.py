"""Minimum, maximum and quantiles of all observations so far, for pytrees of arrays."""

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import integer
from jaxnorm.arguments.options import AxisName
from jaxnorm.engine.collectives import hashable
from jaxnorm.online import batches, quantiles, samples
from jaxnorm.online.batches import Tree
from jaxnorm.online.samples import Range

__all__ = ["Range", "denormalize", "init", "merge", "normalize", "quantile", "update"]


def init(specs: Tree, *, size: int = 1024) -> Tree:
    """Return the ranges before any observation.

    Args:
      specs: a pytree of arrays, numbers or :class:`jax.ShapeDtypeStruct`. Each has the shape and
        dtype of *one* element, without batch axes.
      size: how many elements of each feature are sampled. A feature takes ``8 * size + 12`` bytes
        in float32: 8 KiB by default.

    Returns:
      The same pytree with an empty :class:`Range` for each leaf. Its dtype is the leaf's, and at
      least float32.

    Raises:
      TypeError: a leaf of integers, booleans or complex numbers; a size that is no integer.
      ValueError: a size below 1.

    >>> import jax.numpy as jnp
    >>> from jaxnorm.online import ranges
    >>> state = ranges.init({"position": jnp.zeros(3), "speed": jnp.zeros(())}, size=100)
    >>> state["position"].min.shape, state["position"].values.shape
    ((3,), (3, 100))
    """
    size = _size(size)
    return jax.tree_util.tree_map_with_path(partial(_empty, size), specs)


def update(
    state: Tree,
    batch: Tree,
    key: jax.Array,
    *,
    weights: ArrayLike | None = None,
    axis_name: AxisName = None,
) -> Tree:
    """Merge a batch into the ranges, so that each element counts once.

    Every element draws a random key, and the sample of a feature is the elements with the ``size``
    smallest keys. Each element so far is in the sample with the same probability, in any order of
    the data. The memory of an update is that of the batch and the sample.

    Args:
      state: a state from :func:`init`, :func:`update` or :func:`merge`.
      batch: a pytree with the structure of ``specs``. Its leaves have any number of batch axes in
        front.
      key: a key of :mod:`jax.random`, another one for each update. With the same key, elements at
        the same positions of two batches stay or go together.
      weights: booleans, or floats that are 0 or 1, over the first batch axes, for all leaves. An
        element with weight 0 counts for nothing, even if it is NaN.
      axis_name: name (or names) of a device or vmap axis over which the batch is spread. All leaves
        share one collective. The key may be the same on each device.

    Returns:
      The new state, which covers all devices and is equal on each. Where the batch of a feature, on
      any device, has an element that is not finite, ``state`` keeps its values, as in
      :func:`jaxnorm.online.update`.

    Raises:
      TypeError: leaves of integers, booleans or complex numbers; integer weights; no key.
      ValueError: another structure, other shapes, weights that do not fit or are not 0 or 1.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm.online import ranges
    >>> state = ranges.init(jnp.zeros(()))
    >>> state = ranges.update(state, jnp.array([3.0, 1.0]), jax.random.key(0))
    >>> state = ranges.update(state, jnp.array([6.0]), jax.random.key(1))
    >>> float(state.min), float(state.max), int(state.count)
    (1.0, 6.0, 3)
    """
    before, structure = _flatten(state)
    leaves = _leaves(structure, before, batch)
    weights = None if weights is None else validation.as_array(weights, "weights")
    masks = [_mask(weights, leaf, old) for leaf, old in zip(leaves, before, strict=True)]
    return structure.unflatten(_update(hashable(axis_name), before, leaves, masks, _key(key)))


def merge(*states: Tree) -> Tree:
    """Return the ranges of the elements of several states, as if one had seen them all.

    The states must have seen *different* elements, with different keys. An element that two states
    have seen counts twice.

    Args:
      states: states from :func:`update`, of the same specs and size.

    Raises:
      TypeError: no state at all, or leaves that are not a Range.
      ValueError: states that differ in structure, shapes, size or dtypes.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm.online import ranges
    >>> empty = ranges.init(jnp.zeros(()))
    >>> a = ranges.update(empty, jnp.array([3.0, 1.0]), jax.random.key(0))
    >>> b = ranges.update(empty, jnp.array([5.0]), jax.random.key(1))
    >>> float(ranges.quantile(ranges.merge(a, b), 0.5))
    3.0
    """
    if not states:
        raise TypeError("merge takes states, one at least: got none.")
    (first, structure), *others = (_flatten(state) for state in states)
    for number, (leaves, other) in enumerate(others, 2):
        shapes = [
            [(leaf.values.shape, str(leaf.values.dtype)) for leaf in each]
            for each in (first, leaves)
        ]
        if other != structure:
            raise ValueError(
                f"states must have one structure: got {structure}, and {other} in number {number}."
            )
        if shapes[0] != shapes[1]:
            raise ValueError(
                "states must have samples of the same shapes and dtypes: got "
                f"{shapes[0]}, and {shapes[1]} in number {number}."
            )
    return structure.unflatten(
        [
            reduce(_merge, ranges)
            for ranges in zip(first, *(leaves for leaves, _ in others), strict=True)
        ]
    )


def quantile(state: Tree, rank: float) -> Tree:
    """Return a quantile of each feature.

    While a feature has had no more elements than its sample holds, the quantile is exact: that of
    ``numpy.quantile``, with linear interpolation. Afterwards its rank is off by a standard error of
    ``sqrt(rank * (1 - rank) / size)``. With the default size these are 1.6 % for the median and
    0.3 % for rank 0.01, so that the quantile 0.01 is the true quantile of a rank from 0.007 to
    0.013 in two of three cases. The quantiles of :class:`jaxnorm.data.Normalizer`, on the host,
    have an error of 0.1 % at most.

    Args:
      state: a state from :func:`update`.
      rank: from 0 to 1. Rank 0 is the minimum and rank 1 the maximum of all elements.

    Returns:
      A pytree like the specs, of arrays in the dtype of the state. A feature without data is NaN.

    Raises:
      TypeError: a rank that is no static number.
      ValueError: a rank outside [0, 1].

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm.online import ranges
    >>> state = ranges.update(ranges.init(0.0), jnp.arange(101.0), jax.random.key(0))
    >>> float(ranges.quantile(state, 0.25))
    25.0
    """
    before, structure = _flatten(state)
    rank = validation.number("rank", rank, 1)
    return structure.unflatten([quantiles.quantile(leaf, rank) for leaf in before])


def normalize(
    batch: Tree,
    state: Tree,
    *,
    mode: str = "quantile",
    ranks: tuple[float, float] = (0.01, 0.99),
    clip: float | None = None,
    floor: float = 1e-6,
) -> Tree:
    """Normalize each leaf to a range: ``(2 * x - low - high) / max(high - low, floor)``.

    This is -1 at ``low`` and 1 at ``high``, the quantiles or the extremes of a feature. A constant
    feature becomes 0. :meth:`jaxnorm.data.Normalizer.normalize` computes the same by its modes of
    these names. The state is a constant under differentiation.

    Args:
      batch: a pytree as :func:`update` takes it.
      state: a state from :func:`update`. A feature without data so far is returned unchanged.
      mode: ``"quantile"`` or ``"min_max"``.
      ranks: the ranks of ``low`` and ``high`` in mode "quantile". A few outliers do not change
        them.
      clip: the largest absolute value of the result, such as 1.
      floor: the smallest width ``high - low`` to divide by.

    Returns:
      A pytree with the shapes and dtypes of ``batch``.

    Raises:
      TypeError: leaves of integers, booleans or complex numbers.
      ValueError: another structure, other shapes, another mode, ranks that are not two from 0 to 1
        in rising order, a negative ``clip``, a ``floor`` that is not above 0.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm.online import ranges
    >>> state = ranges.update(ranges.init(0.0), jnp.arange(101.0), jax.random.key(0))
    >>> x = jnp.array([0.0, 50.0, 100.0, 1e6])
    >>> ranges.normalize(x, state, mode="min_max").tolist()
    [-1.0, 0.0, 1.0, 19999.0]
    >>> ranges.normalize(x, state, ranks=(0.25, 0.75), clip=1.5).tolist()
    [-1.5, 0.0, 1.5, 1.5]
    """
    limit = None if clip is None else validation.number("clip", clip)
    return _map(
        _normalize, batch, state, quantiles.ends(mode, ranks), quantiles.divisible(floor), limit
    )


def denormalize(
    batch: Tree,
    state: Tree,
    *,
    mode: str = "quantile",
    ranks: tuple[float, float] = (0.01, 0.99),
    floor: float = 1e-6,
) -> Tree:
    """Undo :func:`normalize` without ``clip``: ``(y * max(high - low, floor) + low + high) / 2``.

    Args:
      batch: a result of :func:`normalize`, or a network's prediction of one.
      state: a state from :func:`update`.
      mode: as in :func:`normalize`.
      ranks: as in :func:`normalize`.
      floor: as in :func:`normalize`.

    Returns:
      A pytree with the shapes and dtypes of ``batch``.

    Raises:
      TypeError: leaves of integers, booleans or complex numbers.
      ValueError: as in :func:`normalize`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm.online import ranges
    >>> state = ranges.update(ranges.init(0.0), jnp.array([2.0, 6.0]), jax.random.key(0))
    >>> ranges.denormalize(jnp.array([-1.0, 0.0, 2.0]), state, mode="min_max").tolist()
    [2.0, 4.0, 8.0]
    """
    return _map(_denormalize, batch, state, quantiles.ends(mode, ranks), quantiles.divisible(floor))


def _empty(size: int, path, spec) -> Range:
    shape, dtype = batches.element(path, spec)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"specs{jax.tree_util.keystr(path)} must be real: got {dtype}, which has no order. "
            "Pass real and imaginary parts as two leaves."
        )
    return samples.empty(shape, dtype, size)


def _size(size: Any) -> int:
    number = integer(size, "size must be an integer, the elements of a sample")
    if number < 1:
        raise ValueError(f"size must be at least 1, the elements of a sample: got {number}.")
    return number


def _key(key: Any) -> jax.Array:
    dtype, ndim = getattr(key, "dtype", None), getattr(key, "ndim", None)
    is_new = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if (is_new and ndim == 0) or (dtype == jnp.uint32 and ndim == 1):
        return key
    kind = repr(key) if dtype is None else f"shape {key.shape}, {dtype}"
    raise TypeError(
        f"key must be one key of jax.random: got {kind}. Pass jax.random.key(0), and another one "
        "to each update."
    )


def _flatten(state: Tree) -> tuple[list[Range], Any]:
    leaves, structure = jax.tree.flatten(state, is_leaf=lambda node: isinstance(node, Range))
    for leaf in leaves:
        if not isinstance(leaf, Range):
            raise TypeError(
                f"every leaf of state must be a Range: got {type(leaf).__name__}. Take a state of "
                "ranges.init."
            )
    return leaves, structure


def _leaves(structure, before: list[Range], batch: Tree) -> list[jax.Array]:
    return batches.leaves(structure, [old.min for old in before], batch)


def _mask(weights: jax.Array | None, leaf: jax.Array, old: Range) -> jax.Array | None:
    mask = batches.mask(weights, leaf, old.min)
    if mask is None or mask.dtype == jnp.bool_:
        return mask
    message = "weights must be 0 or 1, since a sample has an element or has it not"
    return validation.check_values(mask, lambda w: (w == 0) | (w == 1), message)


def _map(apply, batch: Tree, state: Tree, *options) -> Tree:
    before, structure = _flatten(state)
    leaves = _leaves(structure, before, batch)
    return structure.unflatten(
        [apply(leaf, old, *options) for leaf, old in zip(leaves, before, strict=True)]
    )


_update = jax.jit(samples.update, static_argnums=0)
_merge = jax.jit(samples.merge)
_normalize = jax.jit(quantiles.normalize, static_argnums=(2, 3, 4))
_denormalize = jax.jit(quantiles.denormalize, static_argnums=(2, 3))
