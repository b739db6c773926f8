"""Classify images: the tutorials' LeNet, and an MLP.

LeNet has its norm in the dense or in the convolutional part.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import linen as nn

from jaxnorm import linen as jn
from jaxnorm.norms.table import Norm, available_norms

# height, width, channels
IMAGE = (-3, -2, -1)

# a function of (evaluating, momentum of running statistics) that returns a norm
MakeNorm = Callable[[bool, float], Callable[[jax.Array], jax.Array]]

# norms of graphs, whose nodes would be the examples of a batch
OF_GRAPHS = ("graph", "pair")


def _by_name(row: Norm, options: dict[str, Any]) -> MakeNorm:
    def make(evaluating: bool, momentum: float) -> Callable[[jax.Array], jax.Array]:
        running = {"use_running_average": evaluating, "momentum": momentum} if row.running else {}
        return jn.norm(row.name, **running, **options)

    return make


def _table(positions: bool, options: dict[str, dict[str, Any]]) -> dict[str, MakeNorm]:
    """Return the norms of the table that a network can have before its tanh, by name.

    Without positions, those that need positions are left out.
    """
    found: dict[str, MakeNorm] = {"none": lambda evaluating, momentum: lambda x: x}
    for name, row in available_norms().items():
        fits = row.linen is not None and row.call == "y = norm(x)" and name not in OF_GRAPHS
        if fits and (positions or not row.positions):
            found[name] = _by_name(row, options.get(name, {}))
    return found


WHOLE = {"reduction_axes": IMAGE, "feature_axes": IMAGE}
# the norm before each tanh, by its name
GHOST = {"virtual_batch_size": 16}
DENSE = _table(False, {"group": {"num_groups": 4}, "ghost_batch": GHOST})
GROUPS = {"num_groups": 2}
CONV = _table(
    True,
    {"group": GROUPS, "evonorm_s0": GROUPS, "ghost_batch": GHOST, "layer": WHOLE, "rms": WHOLE},
)
CONV["layer-channels"] = DENSE["layer"]
VARIANTS = {"dense": DENSE, "conv": CONV, "deep": CONV}
# norms that keep running statistics
RUNNING = tuple(name for name, row in available_norms().items() if row.running)


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
