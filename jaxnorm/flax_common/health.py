"""The numbers of one norm in one batch."""

from dataclasses import dataclass, fields
from functools import partial

import jax


@partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "mean",
        "deviation",
        "offset",
        "collapsed",
        "mean_distance",
        "var_ratio",
        "dead",
        "exploding",
        "channel",
        "gain_min",
        "gain_max",
        "not_finite",
    ),
    meta_fields=(),
)
@dataclass(frozen=True)
class Health:
    """The numbers of one norm, float32 arrays of shape (), or (layers,) in a stack of layers.

    A group is what shares a mean and a variance: a channel in batch norm, a row in layer norm.

    Attributes:
      mean: the mean of all elements of the input; of complex elements its absolute value.
      deviation: the root of the mean variance of the groups.
      offset: the largest ``|mean| / deviation`` of a group. A variance computed in one pass, as
        ``E[x**2] - E[x]**2``, has a relative error of some ``6e-8 * offset**2`` in float32. None
        for norms that subtract no mean.
      collapsed: the share of groups whose variance, or mean square, is below epsilon.
      mean_distance: the largest distance of a running mean from the mean of the batch, in running
        deviations; None without running statistics.
      var_ratio: variance of the batch over running variance, for the channel where it is farthest
        from 1; None without running statistics.
      dead: the share of channels with variance 0, of those with more than one element.
      exploding: the largest root mean square of a channel over that of the median channel.
      channel: the index of that channel.
      gain_min: the least gain, with its offset; None without a gain.
      gain_max: the greatest gain.
      not_finite: the share of elements that are NaN or infinite. The other numbers leave them out.
    """

    mean: jax.Array
    deviation: jax.Array
    offset: jax.Array | None
    collapsed: jax.Array
    mean_distance: jax.Array | None
    var_ratio: jax.Array | None
    dead: jax.Array
    exploding: jax.Array
    channel: jax.Array
    gain_min: jax.Array | None
    gain_max: jax.Array | None
    not_finite: jax.Array


NUMBERS = tuple(field.name for field in fields(Health))
