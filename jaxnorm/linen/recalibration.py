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
from jaxnorm.linen.edited import (
    Variables,
    check_module,
    check_variables,
    frozen_like,
    naming_call,
)


def accumulate(variables: Variables, when: jax.Array | bool = True) -> Variables:
    """Return variables that make the following batches microbatches of one batch.

    The variables have one more collection, ``batch_moments``, in which the norms merge the Moments
    of their inputs. The running statistics are then always the old ones blended *once* with all
    microbatches so far. Keep the collection from one microbatch to the next
    (``mutable=["batch_stats", "batch_moments"]``). Call this function again where the next batch
    begins. Call :func:`stop_accumulating` to go back to one blend per call.

    With ``momentum=0`` and a single call of this function, the running statistics cover all
    elements seen: they are cumulative.

    Args:
      variables: the variables of a model with :class:`BatchNorm`, :class:`SwitchableNorm` or
        :class:`EvoNormB0`.
      when: whether a batch begins here. It may be traced, for example
        ``optimizer.has_updated(state)`` of ``optax.MultiSteps``.

    Returns:
      New variables. Lifted transformations, such as ``nn.scan`` over layers, must carry the new
      collection as they carry ``batch_stats``.

    Raises:
      ValueError: the variables have no running statistics.

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
    return frozen_like(variables, {**variables, COLLECTION: _collection(fresh)})


def stop_accumulating(variables: Variables) -> Variables:
    """Return the variables without the collection that :func:`accumulate` added.

    The running statistics stay as they are.
    """
    kept = {name: value for name, value in variables.items() if name != COLLECTION}
    return frozen_like(variables, kept)


def population(
    model: nn.Module,
    variables: Mapping[str, Any],
    batches: Iterable[Any],
    *,
    only: Only = None,
    seen: Seen | None = None,
    progress: Progress = None,
    **arguments: Any,
) -> Seen:
    """Return the Moments of every norm's inputs over all batches, merged by count.

    The norms are the model's modules with running statistics, such as :class:`BatchNorm`.

    Args:
      model: the model.
      variables: its variables.
      batches: the inputs of the model, batch by batch; a tuple holds several positional arguments.
      only: the norms to calibrate: a path such as ``"block/norm"``, several paths, or a function
        that takes a path and returns whether to include it. A path includes all norms below it.
        None takes all. The other norms follow ``arguments``.
      seen: the result of an earlier call, or the last value that ``progress`` received, to continue
        from.
      progress: True shows a progress bar, which needs the package ``rich``. A function is called as
        ``progress(number of batches, seen)``.
      **arguments: further arguments of ``model.apply`` for every batch. They must make the norms
        use the statistics of their batch, for example ``train=True``.

    Returns:
      A dict of Moments by the path of the norm, such as ``"block/BatchNorm_0"``. It is a pytree,
      and :func:`recalibrate` takes it as ``seen``.

    Raises:
      TypeError: the variables are abstract, as ``jax.eval_shape`` returns them, or no dict; the
        model is no module of linen.
      ValueError: the model has no running statistics, or its norms do not use the statistics of
        their batch; ``seen`` belongs to another model; ``only`` names no norm.
      TypeError or ValueError: a batch does not fit variables or model, whose error is the cause.
    """

    @jax.jit
    def step(variables, seen: Seen, batch) -> Seen:
        given = batch if isinstance(batch, tuple) else (batch,)
        collected = {
            path: Collected(seen[path], mean, var) for path, mean, var in _norms(variables, only)
        }
        found = {**variables, COLLECTION: _collection(collected)}
        # The model moves batch_stats too, but every batch starts from the same
        # variables.
        with naming_call(population, model, given, arguments):
            _, updated = model.apply(
                found, *given, mutable=["batch_stats", COLLECTION], **arguments
            )
        return {path: new.moments for path, new in _collected(updated[COLLECTION]).items()}

    check_module("recalibrate", model)
    check_variables(variables)
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
) -> Variables:
    """Return variables whose running statistics are the statistics of the population.

    Use it after the weights were averaged or otherwise changed. The Moments of all batches are
    merged by count, not blended. Meanwhile each norm uses the statistics of its batch, so large
    batches are better. With ``batches=()`` the result depends on ``seen`` alone.

    Args:
      model: the model.
      variables: its variables, for example with the averaged parameters of stochastic weight
        averaging.
      batches: the inputs of the model, batch by batch; a tuple holds several positional arguments.
      only: the norms to calibrate, as in :func:`population`. The other norms keep their statistics.
        So do norms of :func:`freeze` and norms built with ``use_running_average=True``, which see
        nothing.
      seen: Moments to continue from, as in :func:`population`.
      progress: True or a function, as in :func:`population`.
      **arguments: further arguments of ``model.apply``, such as ``train=True``.

    Returns:
      New variables. Features that saw no element keep their statistics.

    Raises:
      TypeError: as in :func:`population`.
      ValueError: as in :func:`population`.

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
        new_mean, stats[(*at, "var")] = replaced(found[path], mean, var)
        if (*at, "mean") in stats:
            stats[(*at, "mean")] = new_mean
    return frozen_like(variables, {**variables, "batch_stats": unflatten_dict(stats)})


def _norms(
    variables: Mapping[str, Any], only: Only = None
) -> Iterator[tuple[str, jax.Array, jax.Array]]:
    """Return path, mean and variance of every norm with running statistics that ``only`` names.

    The variance stands for the mean, whose shape it has, of a norm that keeps no mean.
    """
    stats = flatten_dict(variables.get("batch_stats", {}))
    # Other modules, such as SpectralNorm, keep other names in batch_stats.
    paths = [path[:-1] for path in stats if path[-1] == "var"]
    if not paths:
        raise ValueError(
            "variables must have running statistics, mean and var in batch_stats: found none. Pass "
            "the variables that init returns."
        )
    taken = chosen(only, map("/".join, paths))
    return (
        ("/".join(path), stats.get((*path, "mean"), stats[(*path, "var")]), stats[(*path, "var")])
        for path in paths
        if "/".join(path) in taken
    )


def _collection(seen: Mapping[str, Collected]) -> dict[str, Any]:
    # A model that is a norm itself has the path "".
    return unflatten_dict(
        {(*path.split("/"), "seen") if path else ("seen",): value for path, value in seen.items()}
    )


def _collected(collection: Mapping[str, Any]) -> dict[str, Collected]:
    return {"/".join(path[:-1]): value for path, value in flatten_dict(collection).items()}
