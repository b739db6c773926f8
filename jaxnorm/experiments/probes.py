"""Measure a network in training.

The measures are its loss along the gradient, the drift of its layers, and the effect of
scaling its weights.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import jaxnorm as jn
from jaxnorm import linen
from jaxnorm.experiments.training import cross_entropy

Params = dict[str, Any]
# steps along the gradient, in learning rates
REACH = (0.25, 0.5, 1.0, 2.0, 4.0)
# factors by which weights are multiplied
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


def batch_loss(model: nn.Module, stats, batch) -> Callable[[Params], jax.Array]:
    """Return the training loss of one batch, as a function of the parameters."""

    def loss(params: Params) -> jax.Array:
        variables = {"params": params, "batch_stats": stats}
        logits = model.apply(variables, batch[0], evaluating=False, mutable=["batch_stats"])[0]
        return cross_entropy(logits, batch[1]).mean()

    return loss


# All probes share this one program, which takes longest to compile. With a copy in each
# probe, two of them in loops of XLA, the first snapshot of a deep LeNet with batch norm
# took 8.5 s instead of 3.1, and each further one 389 ms instead of 369.
@partial(jax.jit, static_argnums=0)
def loss_and_gradient(model: nn.Module, params: Params, stats, batch) -> tuple[jax.Array, Params]:
    """Return the training loss of one batch, and its gradient by the parameters."""
    return jax.value_and_grad(batch_loss(model, stats, batch))(params)


@jax.jit
def moved(params: Params, gradient: Params, steps: dict[str, float]) -> Params:
    """Move each module's parameters down the gradient by a step of its own."""
    return {
        name: jax.tree.map(lambda p, g, step=step: p - step * g, params[name], gradient[name])
        for name, step in steps.items()
    }


@jax.jit
def gradient_distances(there: Params, here: Params) -> tuple[jax.Array, jax.Array]:
    """Return how far the gradient ``there`` is from the gradient ``here``.

    Returns:
      The distance over all parameters, and for each layer the distance between the
      gradients by its weight, relative to the length of the one here.
    """
    weights = [(there[name]["kernel"], here[name]["kernel"]) for name in layers(here)]
    return norm(jax.tree.map(jnp.subtract, there, here)), jnp.stack(
        [norm(a - b) / norm(b) for a, b in weights]
    )


def along_gradient(
    model: nn.Module, params: Params, stats, batch, learning_rate: float
) -> dict[str, Any]:
    """Measure loss and gradient at points down the gradient, ``REACH`` learning rates away.

    The measures are those of Santurkar et al. 2018 (arXiv:1805.11604, section 3.1).

    Returns:
      A dict of ``losses``, of ``turns``, the distance of the gradient at each point
      from the gradient here ("predictiveness"), and of ``smoothness``, the largest of
      these distances per length of the step.
    """
    _, gradient = loss_and_gradient(model, params, stats, batch)
    steps, losses, distances = learning_rate * np.array(REACH), [], []
    for step in steps:
        loss, there = loss_and_gradient(
            model, moved(params, gradient, dict.fromkeys(params, float(step))), stats, batch
        )
        losses.append(float(loss))
        distances.append(float(gradient_distances(there, gradient)[0]))
    smoothness = (distances / (steps * float(length(gradient)))).max()
    return {"losses": np.array(losses), "turns": np.array(distances), "smoothness": smoothness}


def shift_of_gradients(
    model: nn.Module, params: Params, stats, batch, learning_rate: float
) -> np.ndarray:
    """Return how far each layer's gradient moves when all earlier layers make their step.

    The shift is relative to the length of the gradient. Santurkar et al. 2018
    (definition 2.1) define "internal covariate shift" by it.
    """
    _, gradient = loss_and_gradient(model, params, stats, batch)
    shifts = []
    for layer in range(len(layers(params))):
        steps = {name: learning_rate if position(params, name) < layer else 0.0 for name in params}
        _, there = loss_and_gradient(model, moved(params, gradient, steps), stats, batch)
        shifts.append(float(gradient_distances(there, gradient)[1][layer]))
    return np.array(shifts)


def health(model: nn.Module, params: Params, stats, images) -> dict[str, float]:
    """Return the numbers of each norm's input, by ``"path/number"``; see ``linen.diagnose``."""
    variables = {"params": params, "batch_stats": stats}
    return linen.diagnose(model, variables, images, evaluating=False).metrics()


@partial(jax.jit, static_argnums=0)
def before_activations(model: nn.Module, params: Params, stats, images) -> list[jn.Moments]:
    """Return the Moments of each feature before each nonlinearity, layer by layer."""
    variables = {"params": params, "batch_stats": stats}
    _, state = model.apply(
        variables,
        images,
        evaluating=False,
        mutable=["batch_stats", "intermediates"],
        capture_intermediates=True,
    )
    found = state["intermediates"]
    last: dict[int, jax.Array] = {}
    # A norm stands behind its layer and bears the same number. Norms come first in this
    # order, so that setdefault keeps their output for the layers that have one.
    for name in sorted(found, key=lambda name: name.startswith(("Conv", "Dense"))):
        if name.rpartition("_")[2].isdigit():
            last.setdefault(position(params, name), found[name]["__call__"][0])
    # the last layer gives the logits, which no nonlinearity follows
    hidden = [last[i] for i in sorted(last)][:-1]
    return [jn.moments(values, tuple(range(values.ndim - 1))) for values in hidden]


# jit: operation by operation, drifts took 5.2 s of the twenty of a run with 30
# snapshots, and compiled they take 0.2
@jax.jit
def drift(old: list[jn.Moments], new: list[jn.Moments]) -> jax.Array:
    """Return how far the features of each layer have moved, in deviations of the old ones.

    The distance is Wasserstein's between normal distributions, averaged over the
    features.
    """

    def moved(a: jn.Moments, b: jn.Moments) -> jax.Array:
        s, t = jnp.sqrt(a.var), jnp.sqrt(b.var)
        # Wasserstein's distance of order 2 between normal distributions, whose square
        # is the sum of the squared differences of means and of deviations
        return (jnp.sqrt((a.mean - b.mean) ** 2 + (s - t) ** 2) / jnp.maximum(s, 1e-6)).mean()

    return jnp.stack([moved(a, b) for a, b in zip(old, new, strict=True)])


def scaled_weights(model: nn.Module, params: Params, stats, batch) -> dict[str, np.ndarray]:
    """Return loss and gradient with the second layer's parameters times each of ``FACTORS``.

    The gradient is given by its length for the layer's weight.
    """
    name = layers(params)[1]
    losses, gradients = [], []
    for factor in FACTORS:
        scaled = params | {name: jax.tree.map(lambda p, factor=factor: factor * p, params[name])}
        loss, gradient = loss_and_gradient(model, scaled, stats, batch)
        losses.append(float(loss))
        gradients.append(float(length(gradient[name]["kernel"])))
    return {"losses": np.array(losses), "gradients": np.array(gradients)}


def length_of_second(params: Params) -> jax.Array:
    """Return the length of the weight that :func:`scaled_weights` scales."""
    return length(params[layers(params)[1]]["kernel"])


def layers(params: Params) -> list[str]:
    """Return the names of the layers that have weights, from the input on."""
    return sorted(
        (name for name in params if name.startswith(("Conv", "Dense"))),
        key=partial(position, params),
    )


def position(params: Params, name: str) -> int:
    """Return the depth of a module in the network.

    Convolutions and their norms have the depth of their numbers. Dense layers follow
    them.
    """
    number = int(name.rpartition("_")[2])
    return number + (
        sum(key.startswith("Conv") for key in params) if name.startswith("Dense") else 0
    )


def norm(tree) -> jax.Array:
    """Return the Euclidean length of all leaves together."""
    return jnp.sqrt(sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree)))


length = jax.jit(norm)
