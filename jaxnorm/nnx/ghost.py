"""Batch norm of each chunk of a batch: ghost batch norm."""

from typing import Any

import jax

from jaxnorm.arguments.keywords import known_keywords, with_keywords_of
from jaxnorm.core.running import follow_each
from jaxnorm.core.statistics import Moments
from jaxnorm.flax_common.arguments import across
from jaxnorm.flax_common.calls import by_running
from jaxnorm.nnx.batch import BatchNorm, assign, is_evaluating, seen_by, update
from jaxnorm.nnx.calls import inputs
from jaxnorm.norms.ghost import chunked_axes, in_chunks, virtual_size

__all__ = ["GhostBatchNorm"]


class GhostBatchNorm(BatchNorm):
    """Ghost batch normalization (Hoffer et al. 2017, arXiv 1705.08741).

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``. In training, consecutive examples along
    axis 0 form chunks, and each chunk is normalized by its own mean and variance. Evaluation,
    parameters and state are those of :class:`BatchNorm`: checkpoints of one fit the other.

    Each call in training moves the running statistics once for each chunk, one after the other, as
    TabNet does. With k chunks the old value keeps the weight ``momentum**k``. After
    :func:`accumulate` they are blended once, with the Moments of all chunks merged.
    :func:`recalibrate` merges them too: the population's variance includes the differences between
    chunks.

    Args:
      num_features: number of features: the size of the feature axis of ``x``, or the product of the
        sizes if there are several.
      virtual_batch_size: the largest number of examples in a chunk. N examples are cut into
        ``ceil(N / virtual_batch_size)`` chunks of nearly equal sizes, as in TabNet: 300 examples
        with 128 are three chunks of 100. Exactly one of this and ``num_chunks`` must be given.
      num_chunks: the number of chunks, which are cut as ``torch.chunk`` does; see
        :func:`jaxnorm.ghost_batch_norm`.

    It also takes the other arguments of :class:`BatchNorm`, with the meanings and defaults they
    have there: ``use_running_average``, ``axis``, ``momentum``, ``epsilon``, ``dtype``,
    ``param_dtype``, ``use_bias``, ``use_scale``, ``bias_init``, ``scale_init``, ``axis_name``,
    ``axis_index_groups``, ``use_fast_variance``, ``promote_dtype``, ``rngs``, ``bias_metadata``,
    ``scale_metadata``, ``unbiased`` and ``skip_constant``. ``momentum`` and ``unbiased`` apply to
    each chunk.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> norm = nnx.GhostBatchNorm(1, virtual_batch_size=2, momentum=0.5, rngs=Rngs(0))
    >>> y = norm(jnp.array([[1.0], [3.0], [10.0], [30.0]]))
    >>> y[:, 0].round(3).tolist(), norm.mean[...].tolist()  # 0, 1, 10.5
    ([-1.0, 1.0, -1.0, 1.0], [10.5])
    """

    def __init__(
        self,
        num_features: int,
        *,
        virtual_batch_size: int | None = None,
        num_chunks: int | None = None,
        **options: Any,
    ) -> None:
        """Take the arguments of :class:`BatchNorm` and the sizes of chunks."""
        super().__init__(num_features, **options)
        self.virtual_batch_size, self.num_chunks = virtual_batch_size, num_chunks

    __init__.__signature__ = with_keywords_of(__init__, BatchNorm.__init__)  # type: ignore[attr-defined]

    @known_keywords
    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """Normalize ``x``, and update the running statistics in training.

        Args:
          x: the array to normalize, with the batch as axis 0; integers and booleans become floats.
          use_running_average: overrides the attribute of this name; None, the default, leaves it.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        features = chunked_axes(x.ndim, self.axis, "axis")
        size = virtual_size(x.shape[0], self.virtual_batch_size, self.num_chunks)
        stats = (self.mean[...], self.var[...])
        x, options, (mean, var) = inputs(self, x, features, mask, *stats)
        if is_evaluating(self, use_running_average):
            return by_running(x, features, options, mean, var)
        y, chunks = in_chunks(x, size, features, axis_name=across(self), **options)
        self._update_by(chunks)
        return y

    def _update_by(self, chunks: Moments) -> None:
        """Move the running statistics towards the statistics of each chunk in turn."""
        if seen_by(self) is not None:
            update(self, chunks.merge(0))
            return
        stacked = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0], -1), chunks)
        new = follow_each(
            self.mean[...],
            self.var[...],
            stacked,
            momentum=self.momentum,
            unbiased=self.unbiased,
            skip_constant=self.skip_constant,
        )
        # Running statistics are state, so no gradient flows into them.
        assign(self, *jax.lax.stop_gradient(new))
