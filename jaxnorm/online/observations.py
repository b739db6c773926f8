"""Running statistics of all observations so far, for pytrees of arrays."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.dtypes import compute_dtype, real_dtype
from jaxnorm.arguments.options import AxisName
from jaxnorm.core import normalization
from jaxnorm.core.running import merged_into
from jaxnorm.core.statistics import Moments, check_moments, moments
from jaxnorm.engine.collectives import hashable, rows_of_devices
from jaxnorm.engine.xla import prevent_folding
from jaxnorm.online import batches
from jaxnorm.online.batches import Tree


def init(specs: Tree) -> Tree:
    """Return the statistics before any observation.

    Args:
      specs: a pytree of arrays, numbers or :class:`jax.ShapeDtypeStruct`. Each has the shape and
        dtype of *one* element, without batch axes.

    Returns:
      The same pytree with a :class:`Moments` of count 0 for each leaf. Its dtype is the leaf's, and
      at least float32.

    Raises:
      TypeError: a leaf of integers or booleans.

    >>> import jax.numpy as jnp
    >>> from jaxnorm import online
    >>> state = online.init({"position": jnp.zeros(3), "speed": jnp.zeros(())})
    >>> state["position"].count.tolist()
    [0.0, 0.0, 0.0]
    """
    return jax.tree_util.tree_map_with_path(_empty, specs)


def update(
    state: Tree, batch: Tree, *, weights: ArrayLike | None = None, axis_name: AxisName = None
) -> Tree:
    """Merge a batch into the statistics, so that each element counts once.

    Args:
      state: a state from :func:`init` or :func:`update`.
      batch: a pytree with the structure of ``specs``. Its leaves have any number of batch axes in
        front.
      weights: booleans or float weights over the first batch axes, for all leaves. A float says how
        much an element counts. An element with weight 0 counts for nothing, even if it is NaN.
      axis_name: name (or names) of a device or vmap axis over which the batch is spread. All leaves
        share one collective.

    Returns:
      The new state, which covers all devices and is equal on each. Counts are exact up to 2**56
      elements. Where the statistics of the batch are not finite, ``state`` keeps its values, as in
      :func:`jaxnorm.ema`.

    Raises:
      TypeError: leaves of integers or booleans, integer weights.
      ValueError: another structure, other shapes, weights that do not fit.

    >>> import jax.numpy as jnp
    >>> from jaxnorm import online
    >>> state = online.init(jnp.zeros(()))
    >>> state = online.update(state, jnp.array([1.0, 2.0]))
    >>> state = online.update(state, jnp.array([6.0]))
    >>> float(state.count), float(state.mean)
    (3.0, 3.0)
    """
    before, structure = _flatten(state)
    leaves = _leaves(structure, before, batch)
    weights = None if weights is None else jnp.asarray(weights)
    masks = [
        batches.mask(weights, leaf, old.mean) for leaf, old in zip(leaves, before, strict=True)
    ]
    return structure.unflatten(_update(hashable(axis_name), before, leaves, masks))


def normalize(
    batch: Tree, state: Tree, *, clip: float | None = None, epsilon: float = 1e-5
) -> Tree:
    """Normalize each leaf: ``(x - mean) / sqrt(var + epsilon)``.

    Args:
      batch: a pytree as :func:`update` takes it.
      state: a state from :func:`update`. A leaf without observations so far is returned unchanged.
      clip: the largest absolute value of the result.
      epsilon: added to the variance.

    Returns:
      A pytree with the shapes and dtypes of ``batch``.

    Raises:
      TypeError: leaves of integers or booleans.
      ValueError: another structure, other shapes, a negative ``clip`` or ``epsilon``.

    >>> import jax.numpy as jnp
    >>> from jaxnorm import online
    >>> state = online.update(online.init(jnp.zeros(())), jnp.array([1.0, 3.0]))
    >>> online.normalize(jnp.array([2.0, 100.0]), state, clip=10.0).tolist()
    [0.0, 10.0]
    """
    limit = None if clip is None else validation.number("clip", clip)
    epsilon = validation.number("epsilon", epsilon)

    def apply(x, moments):
        # jaxnorm.normalize gives 0 for a count of 0, and an agent's first inputs would be lost
        seen = jnp.broadcast_to(moments.count > 0, jnp.shape(moments.mean))
        y = normalization.normalize(x, moments, epsilon=epsilon)
        y = jnp.where(seen.reshape((1,) * (x.ndim - seen.ndim) + seen.shape), y, x)
        return y if limit is None else _clip(y, limit)

    return _map(apply, batch, state)


def _clip(y: jax.Array, limit: float) -> jax.Array:
    """Clip values to ``limit``; complex numbers keep their direction."""
    if not jnp.iscomplexobj(y):
        return jnp.clip(y, -limit, limit)
    # The absolute value of y may be beyond the range of its dtype, so y is divided by its larger
    # part first. The result does not depend on `size`, which therefore needs no gradient: through
    # abs it would be NaN at 0.
    size = jax.lax.stop_gradient(jnp.maximum(jnp.abs(y.real), jnp.abs(y.imag)))
    direction = jnp.where(size > 0, y / jnp.where(size > 0, size, 1).astype(y.dtype), 1)
    length = jnp.abs(direction)
    return jnp.where(length * size <= limit, y, direction * (limit / length).astype(y.dtype))


def denormalize(batch: Tree, state: Tree, *, epsilon: float = 1e-5) -> Tree:
    """Invert :func:`normalize` without ``clip``: ``y * sqrt(var + epsilon) + mean`` for each leaf.

    Args:
      batch: a result of :func:`normalize`, or a network's prediction of one.
      state: a state from :func:`update`.
      epsilon: as in :func:`normalize`.

    Returns:
      A pytree with the shapes and dtypes of ``batch``.

    Raises:
      TypeError: leaves of integers or booleans.
      ValueError: another structure, other shapes, a negative ``epsilon``.

    >>> import jax.numpy as jnp
    >>> from jaxnorm import online
    >>> state = online.update(online.init(jnp.zeros(())), jnp.array([1.0, 3.0]))
    >>> online.denormalize(jnp.array([0.0]), state).tolist()
    [2.0]
    """
    epsilon = validation.number("epsilon", epsilon)

    def apply(y, moments):
        # not 1 / inverse_root, which is Inf where variance and epsilon are both 0
        root = jnp.sqrt(jnp.where(moments.count > 0, moments.var + epsilon, 1)).astype(
            moments.mean.dtype
        )
        wide = np.promote_types(y.dtype, root.dtype)
        lead = (1,) * (y.ndim - root.ndim)
        root, mean, low = (
            leaf.astype(wide).reshape(lead + leaf.shape)
            for leaf in (root, moments.mean, moments.low.mean)
        )
        # the low part goes first: added to the mean itself, it would be lost in rounding
        return (y.astype(wide) * root + prevent_folding(low) + mean).astype(y.dtype)

    return _map(apply, batch, state)


def debiased(momentum: ArrayLike, step: ArrayLike) -> jax.Array:
    """Return the momentum that makes :func:`jaxnorm.ema` forget its initial value.

    It is ``momentum * (1 - momentum**(step - 1)) / (1 - momentum**step)``: 0 at step 1, and
    ``momentum`` in the limit. With it, the running average is at each step a weighted mean of the
    batches so far. It equals Adam's average divided by ``1 - momentum**step`` (Kingma & Ba 2015,
    arXiv 1412.6980). With ``momentum`` 1 it is the plain mean of all batches.

    Args:
      momentum: weight of the old value in the limit, in [0, 1].
      step: 1 at the first batch, 2 at the second; may be traced.

    Returns:
      One float32 number.

    Raises:
      ValueError: momentum outside [0, 1]; a step below 1 (a traced one counts as 1).

    >>> from jaxnorm import online
    >>> [round(float(online.debiased(0.9, step)), 3) for step in (1, 2, 3)]
    [0.0, 0.474, 0.631]
    >>> round(float(online.debiased(1.0, 4)), 3)
    0.75
    """
    step = validation.check_values(
        validation.as_array(step, "step"),
        lambda at: at >= 1,
        "step must be at least 1, that of the first batch",
    )
    momentum = jnp.asarray(validation.momentum(momentum), jnp.float32)
    step = jnp.maximum(jnp.asarray(step, jnp.float32), 1)
    # momentum 0 would give log -inf, and NaN when step 1 multiplies it by 0
    log = jnp.log(jnp.clip(momentum, 1e-30, 1.0))
    # expm1 keeps the digits that 1 - momentum**step loses for a momentum near 1
    ratio = jnp.expm1((step - 1) * log) / jnp.where(log < 0, jnp.expm1(step * log), -1.0)
    return jnp.where(log < 0, momentum * ratio, (step - 1) / step)


def _empty(path, spec) -> Moments:
    shape, dtype = batches.element(path, spec)
    return Moments(
        jnp.zeros(shape, real_dtype(dtype)),
        jnp.zeros(shape, dtype),
        jnp.zeros(shape, real_dtype(dtype)),
    )


def _flatten(state: Tree) -> tuple[list[Moments], Any]:
    leaves, structure = jax.tree.flatten(state, is_leaf=lambda node: isinstance(node, Moments))
    for leaf in leaves:
        check_moments("every leaf of state", leaf)
    return leaves, structure


def _leaves(structure, before: list[Moments], batch: Tree) -> list[jax.Array]:
    return batches.leaves(structure, [old.mean for old in before], batch)


def _map(apply, batch: Tree, state: Tree) -> Tree:
    before, structure = _flatten(state)
    leaves = _leaves(structure, before, batch)
    return structure.unflatten([apply(leaf, old) for leaf, old in zip(leaves, before, strict=True)])


@partial(jax.jit, static_argnums=0)
def _update(
    axis_name, before: list[Moments], leaves: list[jax.Array], masks: list
) -> list[Moments]:
    parts = [_of(old, leaf, mask) for old, leaf, mask in zip(before, leaves, masks, strict=True)]
    return [
        merged_into(old, part)
        for old, part in zip(before, _gathered(parts, axis_name), strict=True)
    ]


def _of(old: Moments, leaf: jax.Array, mask: jax.Array | None) -> Moments:
    """Return the Moments of a leaf over its batch axes, in the dtypes of the state."""
    # a leaf of one element has no batch axis; moments needs one
    if leaf.ndim == old.mean.ndim:
        leaf, mask = leaf[None], None if mask is None else mask[None]
    leaf = leaf if compute_dtype(leaf.dtype) == old.mean.dtype else leaf.astype(old.mean.dtype)
    found = moments(leaf, tuple(range(leaf.ndim - old.mean.ndim)), where=mask)
    return jax.tree.map(lambda new, state: new.reshape(state.shape), found, old)


def _gathered(parts: list[Moments], axis_name) -> list[Moments]:
    """Stack the Moments of all devices along a new first axis, in one collective."""
    if axis_name is None:
        return jax.tree.map(lambda leaf: leaf[None], parts)
    # one collective takes leaves of several dtypes as one vector, of the dtype they promote to
    with jax.numpy_dtype_promotion("standard"):
        row, restore = ravel_pytree(parts)
        # rows of devices in other groups are 0: Moments of count 0, which a merge ignores
        return jax.vmap(restore)(rows_of_devices(row, axis_name))
