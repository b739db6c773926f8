"""Running statistics over the microbatches of a batch, and over all batches of a population."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.arguments.dtypes import complex_beside, compute_dtype, real_dtype
from jaxnorm.core.running import merged_into
from jaxnorm.core.statistics import Moments
from jaxnorm.flax_common.choices import check_named, choices, is_chosen

Seen = dict[str, Moments]  # by the path of the norm
Progress = bool | Callable[[int, Seen], Any] | None
# which norms, by their paths
Only = str | Iterable[str] | Callable[[str], bool] | None


class Collected(NamedTuple):
    """The Moments of the microbatches so far, and the state at the start of the batch.

    Attributes:
      moments: the Moments of the microbatches so far.
      mean: the running mean when the batch began.
      var: the running variance when the batch began.
    """

    moments: Moments
    mean: jax.Array
    var: jax.Array


def as_moments(mean: jax.Array, var: jax.Array) -> Moments:
    """Return running statistics as Moments.

    Modules do not store how many elements their statistics come from. The count, 1, only says that
    the statistics are known.
    """
    return Moments(jnp.ones((), jnp.float32), mean, var)


def nothing(mean: jax.Array, var: jax.Array) -> Collected:
    """Return a Collected without any microbatch, for a norm with these running statistics.

    It is abstract if the statistics are abstract, with their shardings. No buffer occurs twice in
    it, because buffers may be donated.
    """
    if isinstance(mean, jax.ShapeDtypeStruct):
        like = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=mean.sharding)
        return jax.tree.map(like, jax.eval_shape(nothing, mean, var))
    # Stored statistics may be half precision; the Moments of microbatches are float32
    # at least.
    dtype = compute_dtype(mean.dtype)
    count, variance = (jnp.zeros(mean.shape, real_dtype(dtype)) for _ in range(2))
    return Collected(
        Moments(count, jnp.zeros(mean.shape, dtype), variance), jnp.copy(mean), jnp.copy(var)
    )


def collect(seen: Collected, mean: jax.Array, var: jax.Array, batch: Moments) -> Collected:
    """Return ``seen`` with one more microbatch merged in.

    The Moments of the microbatch have the shape of the running ``mean`` and ``var``.
    """
    # The state starts out real. The first complex microbatch makes its mean complex.
    old = jax.tree.map(lambda a, new: a.astype(complex_beside(a.dtype, new)), seen.moments, batch)
    fits = jax.tree.map(lambda new, a: jnp.broadcast_to(new, a.shape).astype(a.dtype), batch, old)
    moments = merged_into(old, jax.tree.map(lambda leaf: leaf[None], lax.stop_gradient(fits)))
    return Collected(moments, *at_start(seen, mean, var))


def at_start(
    seen: Collected | None, mean: jax.Array, var: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the running mean and variance as they were when the batch began.

    Without ``seen`` the batch is no microbatch, and begins here.
    """
    if seen is None:
        return mean, var
    # A feature whose microbatches were all masked out has not begun its batch.
    begun = seen.moments.count > 0
    # Only the first microbatch finds the running statistics as they were before the
    # batch. Later microbatches find statistics in which this batch is blended already.
    start = jnp.where(begun, seen.mean.astype(complex_beside(seen.mean.dtype, mean)), mean)
    return start, jnp.where(begun, seen.var, var)


def has_begun(seen: Collected | None) -> jax.Array | bool:
    """Return whether an earlier microbatch of this batch had an element that counts."""
    return False if seen is None else (seen.moments.count > 0).any()


def restart(when, fresh: Any, seen: Any) -> Any:
    """Return ``fresh`` where ``when`` says that a batch begins, and ``seen`` elsewhere."""
    # Abstract trees consist of shapes and dtypes, in which fresh and seen agree.
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(fresh)):
        return fresh
    return jax.tree.map(lambda new, old: jnp.where(when, new, old), fresh, seen)


def chosen(only: Only, paths: Iterable[str]) -> set[str]:
    """Return the paths that ``only`` names, and all paths below them; all paths for None.

    Raises:
      ValueError: ``only`` names an unknown path, or no path at all.
    """
    paths = list(paths)
    own = (lambda path, _: only(path)) if callable(only) else only
    taken = choices("only", own)
    check_named("only", taken, paths, "norms with running statistics")
    found = {path for path in paths if is_chosen(taken, path, None)}
    if not found:
        raise ValueError(
            f"only must leave norms to calibrate: it takes none of {', '.join(paths)}."
        )
    return found


def gather(
    step: Callable[[Seen, Any], Seen], batches: Iterable, seen: Seen, progress: Progress
) -> Seen:
    """Return the Moments after all batches, each merged in by ``step``.

    Raises:
      TypeError: ``batches`` is one array.
      ValueError: no norm has seen an element.
    """
    # An array is iterable too, but its rows are examples, not batches.
    if hasattr(batches, "shape"):
        raise TypeError(
            f"batches must be an iterable of batches: got one array, of shape {batches.shape}. Put "
            "it in a list."
        )
    number = 0
    for number, batch in enumerate(_tracked(batches) if progress is True else batches, 1):
        seen = step(seen, batch)
        if callable(progress):
            progress(number, seen)
    # Whether the norms of a model use their batch shows only in what they have seen.
    if not any(bool((moments.count > 0).any()) for moments in seen.values()):
        if not number:
            raise ValueError(
                "batches must hold at least one batch: got none. An iterator can be read only once."
            )
        raise ValueError(
            "a BatchNorm or SwitchableNorm of the model must use the statistics of its batch: none "
            "has seen any. "
            "Pass what puts the model into training mode, for example train=True. "
            "Flax's own norms count only as jaxnorm's: adopt them. "
            "Layers that linen lifts, by nn.scan or nn.vmap, must lift the collection "
            "batch_moments too."
        )
    return seen


def begin(found: Iterable[tuple[str, jax.Array, jax.Array]], seen: Seen | None) -> Seen:
    """Return the Moments that the norms of a model start from: ``seen``, or empty ones.

    Args:
      found: path, mean and variance of each norm.
      seen: Moments by path from an earlier call, or None.

    Raises:
      TypeError: running statistics are abstract.
      ValueError: ``seen`` belongs to another model.
    """
    found = list(found)
    if abstract := [path for path, mean, _ in found if isinstance(mean, jax.ShapeDtypeStruct)]:
        names = ", ".join(map(repr, abstract))
        raise TypeError(
            f"running statistics must be arrays: the statistics of {names} are abstract. "
            "Initialize or restore the model first."
        )
    fresh = {path: nothing(mean, var).moments for path, mean, var in found}
    if seen is None:
        return fresh
    if fresh.keys() != seen.keys():
        raise ValueError(
            f"seen must be of the norms of this model, {', '.join(fresh)}: got {', '.join(seen)}."
        )
    return dict(seen)


def replaced(moments: Moments, mean: jax.Array, var: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the mean and variance of a population as new running statistics.

    They keep the dtypes of the running ones; a mean may become complex. Features that saw no
    element keep their old values.
    """
    known, dtype = moments.count > 0, complex_beside(mean.dtype, moments.mean)
    return jnp.where(known, moments.mean.astype(dtype), mean.astype(dtype)), jnp.where(
        known, moments.var.astype(var.dtype), var
    )


def _tracked(batches: Iterable) -> Iterable:
    try:
        from rich.progress import track
    except ImportError as error:
        raise ImportError(
            "progress=True needs the package rich: pip install 'jaxnorm[experiments]', or pass a "
            "function."
        ) from error
    return track(batches, description="batches")
