"""Ghost batch norm: batch norm of each chunk of a batch by itself.

Equal chunks are one reduction, in which the batch axis is split: ``"(k [n]) [h w] c"``. A last,
shorter chunk is a batch norm of its own.
"""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import canonical_axes, in_groups, integer, other_axes
from jaxnorm.arguments.features import aligned
from jaxnorm.arguments.keywords import by_keyword
from jaxnorm.arguments.options import NormOptions, Param
from jaxnorm.core.call import prepare, run_with_moments
from jaxnorm.core.statistics import Moments
from jaxnorm.engine.sharding import is_explicit, names_of


@by_keyword
def ghost_batch_norm(
    x: ArrayLike,
    /,
    *,
    size: int | None = None,
    num_chunks: int | None = None,
    feature_axes: int | tuple[int, ...] = -1,
    scale: Param = None,
    bias: Param = None,
    epsilon: ArrayLike = 1e-5,
    where: Param = None,
    **options: Unpack[NormOptions],
) -> tuple[jax.Array, Moments]:
    """Normalize each chunk of a batch by itself (Hoffer et al. 2017, arXiv 1705.08741).

    Ghost batch normalization: ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``, with a mean
    and variance for each chunk and feature. Chunks are consecutive examples along axis 0. A large
    batch then trains with the noise of a small one.

    Args:
      x: floating array ``(N, C)`` or ``(N, H, W, C)``; the batch is axis 0.
      size: number of examples in each chunk. The last chunk is shorter where ``size`` does not
        divide N. Exactly one of ``size`` and ``num_chunks`` must be given.
      num_chunks: number of chunks, of ``ceil(N / num_chunks)`` examples each, as ``torch.chunk``
        cuts them. The last chunk may be shorter, and there may be fewer chunks: 5 examples in 4
        chunks are 2, 2 and 1.
      feature_axes: the axes that are not reduced, in any order; not the batch.
      scale: gain of the shape of the feature axes, of any floating dtype. It is cast to the
        dtype of the statistics, which is float32 at least.
      bias: shift of the same shape as ``scale``, of any floating dtype, cast likewise.
      epsilon: added to the variance.
      where: boolean mask or float weights that broadcast against ``x``. Elements where it
        is 0 do not count, even if they are NaN, and their outputs are 0.
      **options: the options of every norm, see :class:`NormOptions`. With ``axis_name``, chunks of
        the same number on all devices share statistics.

    Returns:
      The output, of the shape of ``x``, and the Moments of the chunks. Axis 0 has one group for
      each chunk, the other reduced axes have size one. Each group has its count, so that
      ``merge(0)`` gives the Moments of the whole batch, whatever the sizes of the chunks are. A
      chunk of a single element has the output ``bias``.

    Raises:
      TypeError: integer ``x``; sizes that are no integers.
      ValueError: axes, mask or parameters that do not fit; both or none of the sizes, or one that
        is not positive; a shorter last chunk where the batch is explicitly sharded.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> x = jnp.array([[1.0], [3.0], [10.0], [30.0], [5.0]])
    >>> y, chunks = jn.ghost_batch_norm(x, size=2, epsilon=0.0)
    >>> y[:, 0].tolist(), chunks.mean[:, 0].tolist()
    ([-1.0, 1.0, -1.0, 1.0, 0.0], [2.0, 20.0, 5.0])
    >>> round(float(chunks.merge(0).mean[0, 0]), 4)  # the mean of all five
    9.8
    """
    x = validation.floating(x)
    features = chunked_axes(x.ndim, feature_axes)
    length = chunk_size(x.shape[0], size, num_chunks)
    return in_chunks(
        x, length, features, scale=scale, bias=bias, epsilon=epsilon, where=where, **options
    )


def chunked_axes(rank: int, feature_axes: Any, name: str = "feature_axes") -> tuple[int, ...]:
    """Return the feature axes of an array of examples.

    Raises:
      ValueError: they do not fit, or include the batch.
    """
    features = canonical_axes(feature_axes, rank, name)
    if 0 in features:
        raise ValueError(
            f"ghost batch norm must leave axis 0 to the batch: got {name}={feature_axes} for rank "
            f"{rank}."
        )
    return features


def chunk_size(examples: int, size: int | None, num_chunks: int | None, name: str = "size") -> int:
    """Return the number of examples of each chunk but the last, at least 1.

    Raises:
      TypeError: the number that is given is no integer.
      ValueError: both or none of the numbers are given, or one that is not positive.
    """
    if (size is None) == (num_chunks is None):
        raise ValueError(
            f"exactly one of {name} and num_chunks must be given: got {size} and {num_chunks}."
        )
    name, number = (name, size) if num_chunks is None else ("num_chunks", num_chunks)
    number = integer(number, f"{name} must be an integer")
    if number < 1:
        raise ValueError(f"{name} must be 1 or more: got {number}.")
    return number if num_chunks is None else max(-(-examples // number), 1)


def virtual_size(examples: int, largest: int | None, num_chunks: int | None) -> int:
    """Return the :func:`chunk_size` of chunks of nearly equal sizes, and ``largest`` at most."""
    size = chunk_size(examples, largest, num_chunks, "virtual_batch_size")
    if largest is None:
        return size
    return chunk_size(examples, None, max(-(-examples // size), 1))


def in_chunks(
    x: jax.Array,
    size: int,
    features: tuple[int, ...],
    *,
    scale: Param,
    bias: Param,
    where: Param,
    mask_name: str = "where",
    **options: Any,
) -> tuple[jax.Array, Moments]:
    """Normalize chunks of ``size`` examples and the rest, and return the Moments of all chunks.

    Sizes and axes must be right; all else is checked.
    """
    if where is not None:
        where = validation.mask(where, x.shape, mask_name)
    scale, bias = aligned(x.shape, features, scale=scale, bias=bias)

    def normalized(x: jax.Array, chunks: int, part: Callable) -> tuple[jax.Array, Moments]:
        reduced = tuple(axis for axis in other_axes(features, x.ndim) if axis)
        call = prepare(
            x,
            in_groups(x.shape, reduced, 0, chunks),
            scale=part(scale),
            bias=part(bias),
            where=part(where),
            mask_name=mask_name,
            **options,
        )
        return run_with_moments(call)

    examples = x.shape[0]
    chunks, rest = divmod(examples, size)
    if not chunks or not rest:  # an empty batch is one chunk too
        return normalized(x, max(chunks, 1), lambda array: array)
    if is_explicit(x) and names_of(x)[0] is not None:
        raise ValueError(
            "chunks of a batch that is explicitly sharded must be of one size: got chunks of "
            f"{size} and a last one of {rest}, of {examples} examples sharded over "
            f"{names_of(x)[0]!r}. Choose a size that divides the batch, or reshard x first."
        )
    pieces = (0, examples - rest, chunks), (examples - rest, examples, 1)
    parts = [
        normalized(x[start:stop], number, _part(x, start, stop)) for start, stop, number in pieces
    ]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def _part(x: jax.Array, start: int, stop: int) -> Callable[[Any], Any]:
    """Return a function that cuts these examples out of an array that broadcasts against x."""

    def cut(array: jax.Array | None) -> jax.Array | None:
        if array is None or array.ndim < x.ndim or array.shape[0] == 1:
            return array
        return lax.slice_in_dim(array, start, stop)

    return cut
