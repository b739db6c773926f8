"""Running statistics of a batch from its microbatches, and of a population from its batches."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxnorm.flax_common.running import (
    Collected,
    Only,
    Progress,
    Seen,
    begin,
    chosen,
    gather,
    nothing,
    replaced,
    restart,
)
from jaxnorm.linen.batch import COLLECTION

Variables = Mapping[str, Any]


def accumulate(variables: Variables, when: jax.Array | bool = True) -> dict[str, Any]:
    """Variables with which the batches that follow are microbatches of one batch.

    They have one collection more, ``batch_moments``, in which the norms merge what they see. The
    running statistics are then at each time the old ones blended *once* with all microbatches so
    far. Keep the collection from one microbatch to the next (``mutable=["batch_stats",
    "batch_moments"]``), call this again where the next batch begins, and :func:`stop_accumulating`
    to go back to one blend per call. With ``momentum=0`` and one call for all, the running
    statistics are those of all elements seen: cumulative.

    Args:
      variables: those of a model with :class:`BatchNorm` or :class:`SwitchableNorm`.
      when: whether a batch begins here; may be traced, for example ``optimizer.has_updated(state)``
        of ``optax.MultiSteps``.

    Returns:
      New variables. Lifted transformations, such as ``nn.scan`` over layers, must carry the
      collection as they carry ``batch_stats``.

    Raises:
      ValueError: variables without running statistics.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> norm = nn.BatchNorm(momentum=0.0, use_running_average=False)
    >>> parts = [jnp.array([[1.0], [2.0]]), jnp.array([[6.0]])]
    >>> variables = nn.accumulate(norm.init(jax.random.key(0), parts[0]))
    >>> for x in parts:
    ...     y, updated = norm.apply(variables, x, mutable=["batch_stats", "batch_moments"])
    ...     variables |= updated
    >>> variables["batch_stats"]["mean"].tolist()
    [3.0]
    """
    fresh = {path: nothing(mean, var) for path, mean, var in _norms(variables)}
    if COLLECTION in variables:
        fresh = restart(when, fresh, _collected(variables[COLLECTION]))
    return {**variables, COLLECTION: _collection(fresh)}


def stop_accumulating(variables: Variables) -> dict[str, Any]:
    """Variables without what :func:`accumulate` added; the running statistics stay as they are."""
    return {name: value for name, value in variables.items() if name != COLLECTION}


def population(
    model: nn.Module,
    variables: Variables,
    batches: Iterable[Any],
    *,
    only: Only = None,
    seen: Seen | None = None,
    progress: Progress = None,
    **arguments: Any,
) -> Seen:
    """The Moments of the inputs of every :class:`BatchNorm` and :class:`SwitchableNorm` over all
    batches, merged by count.

    Args:
      model: the model.
      variables: its variables.
      batches: what the model is called with, one after the other; a tuple holds several positional
        arguments.
      only: which norms: a path such as ``"block/norm"``, several, or a function from a path to
        whether it is one of them; a path stands for all norms below it. None takes all. The others
        do what ``arguments`` make them do.
      seen: what an earlier call returned, or the last that ``progress`` got: it goes on from there.
      progress: True shows a bar (needs the package ``rich``); a function is called as
        ``progress(number of batches, seen)``.
      **arguments: further arguments of ``model.apply``, the same for every batch: ``train=True`` or
        whatever makes the norms use the statistics of their batch.

    Returns:
      Moments by the path of the module, such as ``"block/BatchNorm_0"``: a pytree, for
      :func:`recalibrate`.

    Raises:
      TypeError: abstract variables, as of ``jax.eval_shape``.
      ValueError: a model without running statistics, or whose norms do not use those of their
        batch; ``seen`` of another model; an ``only`` that names no norm.
    """

    @jax.jit
    def step(variables, seen: Seen, batch) -> Seen:
        given = batch if isinstance(batch, tuple) else (batch,)
        collected = {
            path: Collected(seen[path], mean, var) for path, mean, var in _norms(variables, only)
        }
        found = {**variables, COLLECTION: _collection(collected)}
        _, updated = model.apply(found, *given, mutable=["batch_stats", COLLECTION], **arguments)
        return {path: new.moments for path, new in _collected(updated[COLLECTION]).items()}

    variables = stop_accumulating(variables)
    return gather(
        lambda seen, batch: step(variables, seen, batch),
        batches,
        begin(_norms(variables, only), seen),
        progress,
    )


def recalibrate(
    model: nn.Module,
    variables: Variables,
    batches: Iterable[Any],
    *,
    only: Only = None,
    seen: Seen | None = None,
    progress: Progress = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Variables whose running statistics are those of the population, for weights that were
    averaged or changed otherwise.

    The Moments of all batches are merged by count, not blended; each norm uses the statistics of
    its batch meanwhile, so that large batches are better. Arguments, and what is raised, are those
    of :func:`population`. With ``batches=()`` it takes what has been ``seen``.

    Args:
      model: the model.
      variables: its variables, for example with the averaged parameters of stochastic weight
        averaging.
      batches: what the model is called with, one after the other; a tuple holds several positional
        arguments.
      only: which norms, as in :func:`population`. The others keep their statistics, as do those
        that are built with ``use_running_average=True``: frozen norms see nothing.
      seen: where to go on from.
      progress: True or a function.
      **arguments: further arguments of ``model.apply``, such as ``train=True``.

    Returns:
      New variables. Statistics of features that saw nothing stay as they were.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> norm, batches = nn.BatchNorm(), [jnp.array([[1.0], [2.0]]), jnp.array([[6.0]])]
    >>> variables = norm.init(jax.random.key(0), batches[0], use_running_average=False)
    >>> variables = nn.recalibrate(norm, variables, batches, use_running_average=False)
    >>> variables["batch_stats"]["mean"].tolist()
    [3.0]
    """
    found = population(
        model, variables, batches, only=only, seen=seen, progress=progress, **arguments
    )
    stats = flatten_dict(variables["batch_stats"])
    for path, mean, var in _norms(variables, only):
        at = tuple(path.split("/")) if path else ()
        stats[(*at, "mean")], stats[(*at, "var")] = replaced(found[path], mean, var)
    return {**variables, "batch_stats": unflatten_dict(stats)}


def _norms(variables: Variables, only: Only = None) -> Iterator[tuple[str, jax.Array, jax.Array]]:
    """Path, mean and variance of every norm with running statistics that ``only`` names."""
    stats = flatten_dict(variables.get("batch_stats", {}))
    paths = [path[:-1] for path in stats if path[-1] == "mean" and (*path[:-1], "var") in stats]
    if not paths:
        raise ValueError(
            "variables must have running statistics, mean and var in batch_stats: found none. Pass "
            "those of init."
        )
    taken = chosen(only, map("/".join, paths))
    return (
        ("/".join(path), stats[(*path, "mean")], stats[(*path, "var")])
        for path in paths
        if "/".join(path) in taken
    )


def _collection(seen: Mapping[str, Collected]) -> dict[str, Any]:
    return unflatten_dict(
        {(*path.split("/"), "seen") if path else ("seen",): value for path, value in seen.items()}
    )


def _collected(collection: Mapping[str, Any]) -> dict[str, Collected]:
    return {"/".join(path[:-1]): value for path, value in flatten_dict(collection).items()}
