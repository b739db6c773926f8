"""Classifiers of images: the tutorials' LeNet, with a norm in its dense or its convolutional part,
and an MLP.
"""

from collections.abc import Callable
from functools import partial

import jax
from flax import linen as nn

from jaxnorm import linen as jn

IMAGE = (-3, -2, -1)  # height, width, channels

# takes (evaluating, batch-norm momentum)
Make = Callable[[bool, float], Callable[[jax.Array], jax.Array]]

# norm -> what stands before each tanh
DENSE: dict[str, Make] = {
    "none": lambda evaluating, momentum: lambda x: x,
    "batch": lambda evaluating, momentum: jn.BatchNorm(evaluating, momentum=momentum),
    "layer": lambda evaluating, momentum: jn.LayerNorm(),
    "rms": lambda evaluating, momentum: jn.RMSNorm(),
    "group": lambda evaluating, momentum: jn.GroupNorm(num_groups=4),
}
CONV: dict[str, Make] = {
    **DENSE,
    "layer": lambda evaluating, momentum: jn.LayerNorm(reduction_axes=IMAGE, feature_axes=IMAGE),
    "layer-channels": DENSE["layer"],
    "rms": lambda evaluating, momentum: jn.RMSNorm(reduction_axes=IMAGE, feature_axes=IMAGE),
    "group": lambda evaluating, momentum: jn.GroupNorm(num_groups=2),
    "instance": lambda evaluating, momentum: jn.InstanceNorm(),
    "switchable": lambda evaluating, momentum: jn.SwitchableNorm(evaluating, momentum=momentum),
}
PLACES = {"dense": DENSE, "conv": CONV, "deep": CONV}
RUNNING = ("batch", "switchable")  # norms that keep running statistics


class LeNet(nn.Module):
    """conv 6@5x5 - pool - conv 16@5x5 - pool - dense 120 - dense 84 - dense 10, tanh after each but
    the last.

    ``norm`` stands before the tanh of the layers named by ``variant`` ("dense" or "conv"); "deep"
    is "conv" with three more convolutions 3 x 3 after each of the two.
    """

    norm: str = "none"
    variant: str = "dense"
    momentum: float = 0.99

    @nn.compact
    def __call__(self, images: jax.Array, *, evaluating: bool) -> jax.Array:
        activate = partial(self._activate, evaluating)
        x = images
        for features in (6, 16):
            x = activate("conv", nn.Conv(features, (5, 5), padding="VALID")(x))
            for _ in range(3 if self.variant == "deep" else 0):
                x = activate("conv", nn.Conv(features, (3, 3))(x))
            x = pool(x)
        x = x.reshape(len(x), -1)
        for features in (120, 84):
            x = activate("dense", nn.Dense(features)(x))
        return nn.Dense(10)(x)

    def _activate(self, evaluating: bool, place: str, x: jax.Array) -> jax.Array:
        norm = self.norm if (place == "dense") == (self.variant == "dense") else "none"
        return nn.tanh(PLACES[place][norm](evaluating, self.momentum)(x))


class MLP(nn.Module):
    """784-1000-1000-10 with a norm before each relu but not on the logits, as in Ba et al. 2016,
    section 6.6.
    """

    norm: str = "none"
    variant: str = "mlp"
    momentum: float = 0.99

    @nn.compact
    def __call__(self, images: jax.Array, *, evaluating: bool) -> jax.Array:
        x = images.reshape(len(images), -1)
        for _ in range(2):
            x = nn.Dense(1000)(x)
            x = nn.relu(DENSE[self.norm](evaluating, self.momentum)(x))
        return nn.Dense(10)(x)


def pool(x: jax.Array) -> jax.Array:
    """2 x 2 max pooling by reshape: its gradient is much faster on a CPU than that of a windowed
    reduction.
    """
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels).max((2, 4))
