"""Running statistics of a batch from its microbatches, and of a population from its batches."""

from collections.abc import Iterable
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx

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
from jaxnorm.nnx.batch import BatchMoments, BatchNorm, SwitchableNorm, assign
from jaxnorm.nnx.flax_versions import get_value, set_value


def accumulate(model: nnx.Module, when: jax.Array | bool = True) -> None:
    """Makes the batches that follow microbatches of one batch.

    Every :class:`BatchNorm` and :class:`SwitchableNorm` gets a variable ``batch_moments``, in which
    it merges what it sees. The running statistics are then at each time the old ones blended *once*
    with all microbatches so far. Call this again where the next batch begins, and
    :func:`stop_accumulating` to go back to one blend per call. With ``momentum=0`` and one call for
    all, the running statistics are those of all elements seen: cumulative.

    Args:
      model: the model, which is modified.
      when: whether a batch begins here; may be traced.

    Raises:
      ValueError: a model without running statistics.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> norm = nnx.BatchNorm(1, momentum=0.0, rngs=Rngs(0))
    >>> nnx.accumulate(norm)
    >>> for x in (jnp.array([[1.0], [2.0]]), jnp.array([[6.0]])):
    ...     y = norm(x)
    >>> norm.mean[...].tolist()
    [3.0]
    """
    for norm in _norms(model).values():
        fresh = nothing(*_stats(norm))
        if (variable := getattr(norm, "batch_moments", None)) is None:
            norm.batch_moments = BatchMoments(fresh)
        else:
            set_value(variable, restart(when, fresh, get_value(variable)))


def stop_accumulating(model: nnx.Module) -> None:
    """Takes away what :func:`accumulate` added; the running statistics stay as they are."""
    for norm in _norms(model).values():
        if hasattr(norm, "batch_moments"):
            del norm.batch_moments


def population(
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    only: Only = None,
    seen: Seen | None = None,
    progress: Progress = None,
    **arguments: Any,
) -> Seen:
    """The Moments of the inputs of every :class:`BatchNorm` and :class:`SwitchableNorm` over all
    batches, merged by count.

    Meanwhile these use the statistics of their batch; norms that are left out, and other modules,
    such as dropout, do as they are set. The running statistics of the norms and their mode are
    afterwards what they were.

    Args:
      model: the model.
      batches: what the model is called with, one after the other; a tuple holds several positional
        arguments.
      only: which norms: a path such as ``"block/norm"``, several, or a function from a path to
        whether it is one of them; a path stands for all norms below it. None takes all, but where
        some of them are in training and others are not, those in training alone: the others are
        frozen.
      seen: what an earlier call returned, or the last that ``progress`` got: it goes on from there.
      progress: True shows a bar (needs the package ``rich``); a function is called as
        ``progress(number of batches, seen)``.
      **arguments: further arguments of every call of the model.

    Returns:
      Moments by the path of the module, such as ``"block/norm"``: a pytree, for
      :func:`recalibrate`.

    Raises:
      TypeError: an abstract model, as of ``nnx.eval_shape``.
      ValueError: a model without running statistics, or one that never calls its norms; ``seen`` of
        another model; an ``only`` that names no norm.
    """

    taken = _chosen(model, only)

    @nnx.jit
    def step(model, seen: Seen, batch) -> Seen:
        for path, norm in _norms(model, taken).items():
            set_value(norm.batch_moments, Collected(seen[path], *_stats(norm)))
        model(*(batch if isinstance(batch, tuple) else (batch,)), **arguments)
        return {
            path: get_value(norm.batch_moments).moments
            for path, norm in _norms(model, taken).items()
        }

    before = begin(((path, *_stats(norm)) for path, norm in _norms(model, taken).items()), seen)
    with _collecting(model, taken):
        return gather(lambda seen, batch: step(model, seen, batch), batches, before, progress)


def recalibrate(
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    only: Only = None,
    seen: Seen | None = None,
    progress: Progress = None,
    **arguments: Any,
) -> None:
    """Sets the running statistics to those of the population, for weights that were averaged or
    changed otherwise.

    The Moments of all batches are merged by count, not blended; each norm uses the statistics of
    its batch meanwhile, so that large batches are better. Arguments, and what is raised, are those
    of :func:`population`. With ``batches=()`` it takes what has been ``seen``.

    Args:
      model: the model, which is modified. Statistics of features that saw nothing stay as they
        were.
      batches: what the model is called with, one after the other; a tuple holds several positional
        arguments.
      only: which norms, as in :func:`population`: a frozen one keeps its statistics, and normalizes
        by them.
      seen: where to go on from.
      progress: True or a function.
      **arguments: further arguments of every call of the model.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> norm = nnx.BatchNorm(1, rngs=Rngs(0))
    >>> nnx.recalibrate(norm, [jnp.array([[1.0], [2.0]]), jnp.array([[6.0]])])
    >>> norm.mean[...].tolist()
    [3.0]
    """
    taken = _chosen(model, only)
    found = population(model, batches, only=taken, seen=seen, progress=progress, **arguments)
    for path, norm in _norms(model, taken).items():
        assign(norm, *replaced(found[path], *_stats(norm)))


def _stats(norm: Any) -> tuple[jax.Array, jax.Array]:
    """The running mean and variance, which of an abstract model are abstract."""
    return get_value(norm.mean), get_value(norm.var)


def _chosen(model: nnx.Module, only: Only) -> set[str]:
    """The paths of the norms to calibrate: without ``only`` those in training, or all where none
    is.
    """
    norms = _norms(model)
    training = [path for path, norm in norms.items() if not norm.use_running_average]
    return chosen(training or None if only is None else only, norms)


def _norms(model: nnx.Module, paths: set[str] | None = None) -> dict[str, Any]:
    """Every norm with running statistics, or those of these paths, by its path."""
    found = {
        "/".join(map(str, path)): node
        for path, node in nnx.iter_graph(model)
        if isinstance(node, BatchNorm | SwitchableNorm)
    }
    if not found:
        raise ValueError(
            "the model must have a BatchNorm or SwitchableNorm of jaxnorm.nnx: found none in "
            f"{type(model).__name__}."
        )
    return found if paths is None else {path: norm for path, norm in found.items() if path in paths}


@contextmanager
def _collecting(model: nnx.Module, paths: set[str]):
    """The norms of these paths collect, and use the statistics of their batch; in the end all norms
    are as before, whatever happened.
    """
    norms = _norms(model)
    before = {
        path: (norm.use_running_average, *_stats(norm), getattr(norm, "batch_moments", None))
        for path, norm in norms.items()
    }
    try:
        for path in paths:
            norms[path].use_running_average = False
            norms[path].batch_moments = BatchMoments(nothing(*_stats(norms[path])))
        yield
    finally:
        for path, (mode, mean, var, seen) in before.items():
            norm = norms[path]
            norm.use_running_average = mode
            assign(norm, mean, var)
            if path in paths:
                del norm.batch_moments
            if seen is not None:
                norm.batch_moments = seen
