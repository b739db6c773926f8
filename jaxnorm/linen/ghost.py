"""Batch norm of each chunk of a batch: ghost batch norm."""

from dataclasses import field

import jax
from flax import linen as nn

from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.core.running import follow_each
from jaxnorm.core.statistics import Moments
from jaxnorm.flax_common.arguments import across
from jaxnorm.flax_common.calls import by_running
from jaxnorm.linen.batch import COLLECTION, BatchNorm, evaluates, running, update
from jaxnorm.linen.calls import inputs
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

    Attributes:
      virtual_batch_size: the largest number of examples in a chunk. N examples are cut into
        ``ceil(N / virtual_batch_size)`` chunks of nearly equal sizes, as in TabNet: 300 examples
        with 128 are three chunks of 100. Exactly one of this and ``num_chunks`` must be given.
      num_chunks: the number of chunks, which are cut as ``torch.chunk`` does; see
        :func:`jaxnorm.ghost_batch_norm`.
      use_running_average: as in :class:`BatchNorm`, and so are all others.
      axis: the feature axis, or axes, which are not reduced; the last axis by default. The batch,
        axis 0, is none of them.
      momentum: weight of the old value in the running statistics, for each chunk; 0.99 by default.
      epsilon: added to the variance, inside the root; 1e-5 by default.
      dtype: dtype of the output; by default the dtype to which ``x`` and the parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      use_bias: whether to add a learned bias; True by default.
      use_scale: whether to multiply by a learned scale; True by default.
      bias_init: initializer of the bias; zeros by default.
      scale_init: initializer of the scale; ones by default.
      axis_name: name, or names, of device axes over which to compute the statistics as well; None
        by default. Chunks of the same number on all devices share statistics.
      axis_index_groups: groups of indices along ``axis_name``, as in :class:`BatchNorm`.
      use_fast_variance: has no effect; accepted because Flax has it.
      force_float32_reductions: whether the running statistics are stored in float32, as in
        :class:`BatchNorm`.
      unbiased: whether to average the unbiased variance of each chunk, as PyTorch and TabNet do;
        False by default.
      skip_constant: whether to pass over chunks in which a feature has variance 0; False by
        default.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> norm = nn.GhostBatchNorm(virtual_batch_size=2, momentum=0.5, use_running_average=False)
    >>> x = jnp.array([[1.0], [3.0], [10.0], [30.0]])
    >>> variables = norm.init(jax.random.key(0), x)
    >>> y, state = norm.apply(variables, x, mutable=["batch_stats"])
    >>> y[:, 0].round(3).tolist(), state["batch_stats"]["mean"].tolist()  # 0, 1, 10.5
    ([-1.0, 1.0, -1.0, 1.0], [10.5])
    """

    virtual_batch_size: int | None = field(default=None, kw_only=True)
    num_chunks: int | None = field(default=None, kw_only=True)

    @known_keywords
    @nn.compact
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
          use_running_average: see the class. Give it here or to the constructor, not to both.
          mask: boolean mask or float weights that broadcast against ``x``. Elements where it is 0
            do not count, even if they are NaN, and their outputs are 0.

        Returns:
          The normalized array, of the shape of ``x``.
        """
        evaluating = evaluates(self, use_running_average)
        features = chunked_axes(x.ndim, self.axis, "axis")
        size = virtual_size(x.shape[0], self.virtual_batch_size, self.num_chunks)
        mean, var = running(self, x, features)
        x, options = inputs(self, x, features, mask)
        if evaluating:
            return by_running(x, features, options, mean.value, var.value)
        y, chunks = in_chunks(x, size, features, axis_name=across(self), **options)
        self._update_by(chunks, mean, var)
        return y

    def _update_by(self, chunks: Moments, mean: nn.Variable, var: nn.Variable) -> None:
        """Move the running statistics towards the statistics of each chunk in turn."""
        if self.is_initializing():
            return
        if self.has_variable(COLLECTION, "seen"):
            update(self, mean, var, chunks.merge(0))
            return
        stacked = jax.tree.map(lambda leaf: leaf.reshape(-1, *mean.value.shape), chunks)
        mean.value, var.value = follow_each(
            mean.value,
            var.value,
            stacked,
            momentum=self.momentum,
            unbiased=self.unbiased,
            skip_constant=self.skip_constant,
        )
