"""Classify images: the tutorials' LeNet, and an MLP.

LeNet has its norm in the dense or in the convolutional part.
"""

from collections.abc import Callable
from functools import partial

import jax
from flax import linen as nn

from jaxnorm import linen as jn

# height, width, channels
IMAGE = (-3, -2, -1)

# a function of (evaluating, momentum of running statistics) that returns a norm
MakeNorm = Callable[[bool, float], Callable[[jax.Array], jax.Array]]

# the norm before each tanh, by its name
DENSE: dict[str, MakeNorm] = {
    "none": lambda evaluating, momentum: lambda x: x,
    "batch": lambda evaluating, momentum: jn.BatchNorm(evaluating, momentum=momentum),
    "layer": lambda evaluating, momentum: jn.LayerNorm(),
    "rms": lambda evaluating, momentum: jn.RMSNorm(),
    "group": lambda evaluating, momentum: jn.GroupNorm(num_groups=4),
}
CONV: dict[str, MakeNorm] = {
    **DENSE,
    "layer": lambda evaluating, momentum: jn.LayerNorm(reduction_axes=IMAGE, feature_axes=IMAGE),
    "layer-channels": DENSE["layer"],
    "rms": lambda evaluating, momentum: jn.RMSNorm(reduction_axes=IMAGE, feature_axes=IMAGE),
    "group": lambda evaluating, momentum: jn.GroupNorm(num_groups=2),
    "instance": lambda evaluating, momentum: jn.InstanceNorm(),
    "switchable": lambda evaluating, momentum: jn.SwitchableNorm(evaluating, momentum=momentum),
}
VARIANTS = {"dense": DENSE, "conv": CONV, "deep": CONV}
# norms that keep running statistics
RUNNING = ("batch", "switchable")


class LeNet(nn.Module):
    """The tutorials' LeNet, with tanh after every layer but the last.

    Its layers are conv 6@5x5, pool, conv 16@5x5, pool, dense 120, dense 84 and dense
    10. ``variant`` says which layers have a norm before their tanh: "dense" or "conv".
    The variant "deep" is "conv" with three more convolutions 3x3 after each of the two.
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

    def _activate(self, evaluating: bool, part: str, x: jax.Array) -> jax.Array:
        norm = self.norm if (part == "dense") == (self.variant == "dense") else "none"
        return nn.tanh(VARIANTS[part][norm](evaluating, self.momentum)(x))


class MLP(nn.Module):
    """An MLP 784-1000-1000-10 with a norm before each relu, and none on the logits.

    It is the network of Ba et al. 2016, section 6.6.
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
    """Return the maximum of every 2 x 2 pixels."""
    # the gradient of a reshape and a maximum is much faster on a CPU than the gradient
    # of a windowed reduction
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels).max((2, 4))
