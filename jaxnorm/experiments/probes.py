"""Measures of a network in training: its loss along the gradient, drift of its layers, what scaling its weights does."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
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
def along_gradient(model: nn.Module, params: Params, stats, batch, learning_rate: float) -> dict[str, jax.Array]:
    """At points ``REACH`` learning rates down the gradient (Santurkar et al. 2018, arXiv:1805.11604, section 3.1).

    Returns:
      ``losses``; ``turns``, the distances of the gradient there from the gradient here (predictiveness); ``smoothness``,
      the largest of these per length of the step.
    """
    value = jax.value_and_grad(batch_loss(model, stats, batch))
    _, gradient = value(params)

    def at(step: jax.Array):
        loss, there = value(jax.tree.map(lambda p, g: p - step * g, params, gradient))
        return loss, norm(jax.tree.map(jnp.subtract, there, gradient))

    steps = learning_rate * jnp.array(REACH)
    losses, turns = jax.lax.map(at, steps)
    return {"losses": losses, "turns": turns, "smoothness": (turns / (steps * norm(gradient))).max()}


@partial(jax.jit, static_argnums=0)
def shift_of_gradients(model: nn.Module, params: Params, stats, batch, learning_rate: float) -> jax.Array:
    """For each layer how far its gradient moves, relative to its length, when all layers before it make their step.

    That is "internal covariate shift" as Santurkar et al. 2018 define it (definition 2.1).
    """
    gradient_of = jax.grad(batch_loss(model, stats, batch))
    gradient = gradient_of(params)
    shifts = []
    for i, name in enumerate(layers(params)):
        earlier = {key: i > position(params, key) for key in params}
        moved = {key: jax.tree.map(lambda p, g, on=earlier[key]: p - learning_rate * g * on, params[key], gradient[key]) for key in params}
        here, there = gradient[name]["kernel"], gradient_of(moved)[name]["kernel"]
        shifts.append(norm(there - here) / norm(here))
    return jnp.stack(shifts)


@partial(jax.jit, static_argnums=0)
def before_activations(model: nn.Module, params: Params, stats, images) -> list[jn.Moments]:
    """Moments of each feature before each nonlinearity, layer by layer."""
    variables = {"params": params, "batch_stats": stats}
    _, state = model.apply(variables, images, evaluating=False, mutable=["batch_stats", "intermediates"], capture_intermediates=True)
    found = state["intermediates"]
    last: dict[int, jax.Array] = {}
    for name in sorted(found, key=lambda name: name.startswith(("Conv", "Dense"))):  # a norm stands for its layer
        if name.rpartition("_")[2].isdigit():
            last.setdefault(position(params, name), found[name]["__call__"][0])
    hidden = [last[i] for i in sorted(last)][:-1]
    return [jn.moments(values, tuple(range(values.ndim - 1))) for values in hidden]


@jax.jit
def drift(old: list[jn.Moments], new: list[jn.Moments]) -> jax.Array:
    """For each layer how far features moved, in their deviations: Wasserstein's distance of the normal distributions."""

    def moved(a: jn.Moments, b: jn.Moments) -> jax.Array:
        s, t = jnp.sqrt(a.var), jnp.sqrt(b.var)
        return (jnp.sqrt((a.mean - b.mean) ** 2 + (s - t) ** 2) / jnp.maximum(s, 1e-6)).mean()

    return jnp.stack([moved(a, b) for a, b in zip(old, new, strict=True)])


@partial(jax.jit, static_argnums=0)
def scaled_weights(model: nn.Module, params: Params, stats, batch) -> dict[str, jax.Array]:
    """Loss, and the length of the kernel's gradient, with the second layer's kernel and bias times ``FACTORS``."""
    name, value = layers(params)[1], jax.value_and_grad(batch_loss(model, stats, batch))

    def at(factor: jax.Array):
        loss, gradient = value(params | {name: jax.tree.map(lambda p: factor * p, params[name])})
        return loss, norm(gradient[name]["kernel"])

    losses, gradients = jax.lax.map(at, jnp.array(FACTORS))
    return {"losses": losses, "gradients": gradients}


def length_of_second(params: Params) -> jax.Array:
    """The length of the kernel that ``scaled_weights`` scales."""
    return norm(params[layers(params)[1]]["kernel"])


def layers(params: Params) -> list[str]:
    """The layers that have kernels, from the input on."""
    return sorted((name for name in params if name.startswith(("Conv", "Dense"))), key=partial(position, params))


def position(params: Params, name: str) -> int:
    """How deep a module stands: convolutions and their norms by their numbers, dense layers after them."""
    number = int(name.rpartition("_")[2])
    return number + (sum(key.startswith("Conv") for key in params) if name.startswith("Dense") else 0)


def norm(tree) -> jax.Array:
    return jnp.sqrt(sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree)))
