"""Running statistics of a batch from its microbatches, and of a population from its batches."""

from collections.abc import Iterable
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx

from jaxnorm.flax_common.inputs import naming_inputs
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
from jaxnorm.nnx.batch import BatchMoments, BatchNorm, SwitchableNorm, assign, is_frozen
from jaxnorm.nnx.calls import check_module
from jaxnorm.nnx.conditional_batch import Running
from jaxnorm.nnx.evonorm import EvoNormB0
from jaxnorm.nnx.flax_versions import get_value, set_value
from jaxnorm.nnx.renorm import KerasBatchRenorm

WITH_RUNNING = BatchNorm | SwitchableNorm | EvoNormB0 | KerasBatchRenorm | Running


def accumulate(model: nnx.Module, when: jax.Array | bool = True) -> None:
    """Make the following batches microbatches of one batch.

    Every :class:`BatchNorm`, :class:`SwitchableNorm` and :class:`EvoNormB0` gets a variable
    ``batch_moments``, in which it merges the Moments of its inputs. The running statistics are then
    always the old ones blended *once* with all microbatches so far. Call this function again where
    the next batch begins. Call :func:`stop_accumulating` to go back to one blend per call.

    With ``momentum=0`` and a single call of this function, the running statistics cover all
    elements seen: they are cumulative.

    Args:
      model: the model, which is modified.
      when: whether a batch begins here. It may be traced.

    Raises:
      ValueError: the model has no running statistics.

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
        if is_frozen(norm):
            continue
        fresh = nothing(*_stats(norm))
        if (variable := getattr(norm, "batch_moments", None)) is None:
            norm.batch_moments = BatchMoments(fresh)
        else:
            set_value(variable, restart(when, fresh, get_value(variable)))


def stop_accumulating(model: nnx.Module) -> None:
    """Remove the variables that :func:`accumulate` added.

    The running statistics stay as they are.
    """
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
    """Return the Moments of every norm's inputs over all batches, merged by count.

    The norms are the model's modules with running statistics, such as :class:`BatchNorm`. During
    the calls they use the statistics of their batch. Norms that are left out and other modules,
    such as dropout, keep their mode. Afterwards the norms have their old running statistics and
    mode again.

    Args:
      model: the model.
      batches: the inputs of the model, batch by batch; a tuple holds several positional arguments.
      only: the norms to calibrate: a path such as ``"block/norm"``, several paths, or a function
        that takes a path and returns whether to include it. A path includes all norms below it.
        None takes all norms; but if some norms are in training and others are not, it takes those
        in training. Norms of :func:`freeze` are never taken.
      seen: the result of an earlier call, or the last value that ``progress`` received, to continue
        from.
      progress: True shows a progress bar, which needs the package ``rich``. A function is called as
        ``progress(number of batches, seen)``.
      **arguments: further arguments of every call of the model.

    Returns:
      A dict of Moments by the path of the norm, such as ``"block/norm"``. It is a pytree, and
      :func:`recalibrate` takes it as ``seen``.

    Raises:
      TypeError: the model is abstract, as ``nnx.eval_shape`` returns it, or no module of nnx.
      ValueError: the model has no running statistics, or never calls its norms; ``seen`` belongs to
        another model; ``only`` names no norm.
      TypeError or ValueError: a batch does not fit the model, whose error is the cause.
    """

    # chosen before the norms change their mode, which tells frozen norms from others
    taken = _chosen(model, only)

    @nnx.jit
    def step(model, seen: Seen, batch) -> Seen:
        # Moments are an argument and the result, so that progress can keep them after
        # each batch.
        for path, norm in _norms(model, taken).items():
            set_value(norm.batch_moments, Collected(seen[path], *_stats(norm)))
        state = {path: _state(norm) for path, norm in _norms(model).items()}
        given = batch if isinstance(batch, tuple) else (batch,)
        with naming_inputs(model, None, given, arguments):
            model(*given, **arguments)
        # Batch renorm depends on its running statistics, so every batch starts from the same.
        for path, norm in _norms(model).items():
            _restore(norm, state[path])
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
    """Set the running statistics to the statistics of the population.

    Use this after the weights were averaged or otherwise changed. The Moments of all batches are
    merged by count, not blended. Meanwhile each norm uses the statistics of its batch, so large
    batches are better. With ``batches=()`` the result depends on ``seen`` alone.

    Args:
      model: the model, which is modified. Features that saw no element keep their statistics.
      batches: the inputs of the model, batch by batch; a tuple holds several positional arguments.
      only: the norms to calibrate, as in :func:`population`. A frozen norm keeps its statistics and
        normalizes by them.
      seen: Moments to continue from, as in :func:`population`.
      progress: True or a function, as in :func:`population`.
      **arguments: further arguments of every call of the model.

    Raises:
      TypeError: as in :func:`population`.
      ValueError: as in :func:`population`.

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
    """Return the running mean and variance; they are abstract if the model is.

    The variance stands for the mean, whose shape it has, of a norm that keeps no mean.
    """
    return get_value(getattr(norm, "mean", norm.var)), get_value(norm.var)


def _state(norm: Any) -> dict[str, jax.Array]:
    """Return the values of the running statistics of a norm, and of what counts with them."""
    return {
        name: get_value(variable)
        for name, variable in vars(norm).items()
        if isinstance(variable, nnx.BatchStat)
    }


def _restore(norm: Any, state: dict[str, jax.Array]) -> None:
    """Store values that :func:`_state` returned."""
    rest = dict(state)
    var = rest.pop("var")
    assign(norm, rest.pop("mean", var), var)
    for name, value in rest.items():
        getattr(norm, name)[...] = value


def _chosen(model: nnx.Module, only: Only) -> set[str]:
    """Return the paths of the norms to calibrate.

    Without ``only`` they are the norms in training, or all norms if none is in training. Frozen
    norms are never among them.
    """
    norms = {path: norm for path, norm in _norms(model).items() if not is_frozen(norm)}
    if not norms:
        raise ValueError(
            "a norm must not be frozen to be calibrated: freeze() has frozen all norms of "
            f"{type(model).__name__}. Call unfreeze() first."
        )
    training = [path for path, norm in norms.items() if not norm.use_running_average]
    return chosen(training or None if only is None else only, norms)


def _norms(model: nnx.Module, paths: set[str] | None = None) -> dict[str, Any]:
    """Return all norms with running statistics by their paths, or the norms at ``paths``."""
    found = {
        "/".join(map(str, path)): node
        for path, node in nnx.iter_graph(model)
        # a SPADE may normalize each example, and keeps no statistics then
        if isinstance(node, WITH_RUNNING) and node.var is not None
    }
    if not found:
        check_module("recalibrate", model)
        raise ValueError(
            "the model must have a BatchNorm or SwitchableNorm of jaxnorm.nnx: found none in "
            f"{type(model).__name__}."
        )
    return found if paths is None else {path: norm for path, norm in found.items() if path in paths}


@contextmanager
def _collecting(model: nnx.Module, paths: set[str]):
    """Let the norms at ``paths`` collect Moments and use the statistics of their batch.

    In the end all norms are as before, even after an error.
    """
    norms = _norms(model)
    before = {
        path: (norm.use_running_average, _state(norm), getattr(norm, "batch_moments", None))
        for path, norm in norms.items()
    }
    try:
        for path in paths:
            norms[path].use_running_average = False
            norms[path].batch_moments = BatchMoments(nothing(*_stats(norms[path])))
        yield
    finally:
        for path, (mode, state, seen) in before.items():
            norm = norms[path]
            norm.use_running_average = mode
            _restore(norm, state)
            if path in paths:
                del norm.batch_moments
            if seen is not None:
                norm.batch_moments = seen
