"""The tutorials' LeNet, with a norm in its dense or its convolutional part."""

from collections.abc import Callable
from functools import partial

import jax
from flax import linen as nn

from jaxnorm import linen as jn

IMAGE = (-3, -2, -1)  # height, width, channels

# norm -> the module that stands before each tanh; takes (evaluating, batch-norm momentum)
DENSE: dict[str, Callable[[bool, float], nn.Module] | None] = {
    "none": None,
    "batch": lambda evaluating, momentum: jn.BatchNorm(evaluating, momentum=momentum),
    "layer": lambda evaluating, momentum: jn.LayerNorm(),
    "rms": lambda evaluating, momentum: jn.RMSNorm(),
    "group": lambda evaluating, momentum: jn.GroupNorm(num_groups=4),
}
CONV: dict[str, Callable[[bool, float], nn.Module] | None] = {
    **DENSE,
    "layer": lambda evaluating, momentum: jn.LayerNorm(reduction_axes=IMAGE, feature_axes=IMAGE),
    "rms": lambda evaluating, momentum: jn.RMSNorm(reduction_axes=IMAGE, feature_axes=IMAGE),
    "group": lambda evaluating, momentum: jn.GroupNorm(num_groups=2),
    "instance": lambda evaluating, momentum: jn.InstanceNorm(),
    "switchable": lambda evaluating, momentum: jn.SwitchableNorm(evaluating, momentum=momentum),
}
PLACES = {"dense": DENSE, "conv": CONV}
RUNNING = ("batch", "switchable")  # norms that keep running statistics


class LeNet(nn.Module):
    """conv 6@5x5 - pool - conv 16@5x5 - pool - dense 120 - dense 84 - dense 10, tanh after each but the last.

    ``norm`` stands before the tanh of the layers named by ``variant`` ("dense" or "conv").
    """

    norm: str = "none"
    variant: str = "dense"
    momentum: float = 0.99

    @nn.compact
    def __call__(self, images: jax.Array, *, evaluating: bool) -> jax.Array:
        activate = partial(self._activate, evaluating)
        x = images
        for features in (6, 16):
            x = pool(activate("conv", nn.Conv(features, (5, 5), padding="VALID")(x)))
        x = x.reshape(len(x), -1)
        for features in (120, 84):
            x = activate("dense", nn.Dense(features)(x))
        return nn.Dense(10)(x)

    def _activate(self, evaluating: bool, place: str, x: jax.Array) -> jax.Array:
        make = PLACES[place][self.norm] if place == self.variant else None
        return nn.tanh(x if make is None else make(evaluating, self.momentum)(x))


def pool(x: jax.Array) -> jax.Array:
    """2 x 2 max pooling by reshape: its gradient is much faster on a CPU than that of a windowed reduction."""
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels).max((2, 4))
