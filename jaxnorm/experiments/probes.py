"""Measures of a network in training: its loss along the gradient, drift of its layers, what scaling
its weights does.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import jaxnorm as jn
from jaxnorm.experiments.training import cross_entropy

Params = dict[str, Any]
REACH = (0.25, 0.5, 1.0, 2.0, 4.0)  # steps along the gradient, in learning rates
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the weights


def batch_loss(model: nn.Module, stats, batch) -> Callable[[Params], jax.Array]:
    """The training loss of one batch as a function of the parameters."""

    def loss(params: Params) -> jax.Array:
        variables = {"params": params, "batch_stats": stats}
        logits = model.apply(variables, batch[0], evaluating=False, mutable=["batch_stats"])[0]
        return cross_entropy(logits, batch[1]).mean()

    return loss


@partial(jax.jit, static_argnums=0)
def loss_and_gradient(model: nn.Module, params: Params, stats, batch) -> tuple[jax.Array, Params]:
    """Of one batch. Every probe calls this one program: a copy in each takes longer to compile, and
    a loop of it several times to run.
    """
    return jax.value_and_grad(batch_loss(model, stats, batch))(params)


@jax.jit
def moved(params: Params, gradient: Params, steps: dict[str, float]) -> Params:
    """Each module of the parameters a step of its own down the gradient."""
    return {
        name: jax.tree.map(lambda p, g, step=step: p - step * g, params[name], gradient[name])
        for name, step in steps.items()
    }


@jax.jit
def turns(there: Params, here: Params) -> tuple[jax.Array, jax.Array]:
    """How far a gradient is from another: in all, and of each layer's kernel relative to the length
    of that.
    """
    kernels = [(there[name]["kernel"], here[name]["kernel"]) for name in layers(here)]
    return norm(jax.tree.map(jnp.subtract, there, here)), jnp.stack(
        [norm(a - b) / norm(b) for a, b in kernels]
    )


def along_gradient(
    model: nn.Module, params: Params, stats, batch, learning_rate: float
) -> dict[str, Any]:
    """At points ``REACH`` learning rates down the gradient (Santurkar et al. 2018,
    arXiv:1805.11604, section 3.1).

    Returns:
      ``losses``; ``turns``, the distances of the gradient there from the gradient here
      (predictiveness); ``smoothness``, the largest of these per length of the step.
    """
    _, gradient = loss_and_gradient(model, params, stats, batch)
    steps, losses, distances = learning_rate * np.array(REACH), [], []
    for step in steps:
        loss, there = loss_and_gradient(
            model, moved(params, gradient, dict.fromkeys(params, float(step))), stats, batch
        )
        losses.append(float(loss))
        distances.append(float(turns(there, gradient)[0]))
    smoothness = (distances / (steps * float(length(gradient)))).max()
    return {"losses": np.array(losses), "turns": np.array(distances), "smoothness": smoothness}


def shift_of_gradients(
    model: nn.Module, params: Params, stats, batch, learning_rate: float
) -> np.ndarray:
    """For each layer how far its gradient moves, relative to its length, when all layers before it
    make their step.

    That is "internal covariate shift" as Santurkar et al. 2018 define it (definition 2.1).
    """
    _, gradient = loss_and_gradient(model, params, stats, batch)
    shifts = []
    for layer in range(len(layers(params))):
        steps = {name: learning_rate if position(params, name) < layer else 0.0 for name in params}
        _, there = loss_and_gradient(model, moved(params, gradient, steps), stats, batch)
        shifts.append(float(turns(there, gradient)[1][layer]))
    return np.array(shifts)


@partial(jax.jit, static_argnums=0)
def before_activations(model: nn.Module, params: Params, stats, images) -> list[jn.Moments]:
    """Moments of each feature before each nonlinearity, layer by layer."""
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
    # a norm stands for its layer
    for name in sorted(found, key=lambda name: name.startswith(("Conv", "Dense"))):
        if name.rpartition("_")[2].isdigit():
            last.setdefault(position(params, name), found[name]["__call__"][0])
    hidden = [last[i] for i in sorted(last)][:-1]
    return [jn.moments(values, tuple(range(values.ndim - 1))) for values in hidden]


@jax.jit
def drift(old: list[jn.Moments], new: list[jn.Moments]) -> jax.Array:
    """For each layer how far features moved, in their deviations: Wasserstein's distance of the
    normal distributions.
    """

    def moved(a: jn.Moments, b: jn.Moments) -> jax.Array:
        s, t = jnp.sqrt(a.var), jnp.sqrt(b.var)
        return (jnp.sqrt((a.mean - b.mean) ** 2 + (s - t) ** 2) / jnp.maximum(s, 1e-6)).mean()

    return jnp.stack([moved(a, b) for a, b in zip(old, new, strict=True)])


def scaled_weights(model: nn.Module, params: Params, stats, batch) -> dict[str, np.ndarray]:
    """Loss, and the length of the kernel's gradient, with the second layer's kernel and bias times
    ``FACTORS``.
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
    """The length of the kernel that ``scaled_weights`` scales."""
    return length(params[layers(params)[1]]["kernel"])


def layers(params: Params) -> list[str]:
    """The layers that have kernels, from the input on."""
    return sorted(
        (name for name in params if name.startswith(("Conv", "Dense"))),
        key=partial(position, params),
    )


def position(params: Params, name: str) -> int:
    """How deep a module stands: convolutions and their norms by their numbers, dense layers after
    them.
    """
    number = int(name.rpartition("_")[2])
    return number + (
        sum(key.startswith("Conv") for key in params) if name.startswith("Dense") else 0
    )


def norm(tree) -> jax.Array:
    return jnp.sqrt(sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree)))


length = jax.jit(norm)
