"""Recurrent networks that predict what comes next: the next character of a text, the next point of
a pen drawing.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from jaxnorm.experiments.sequences import LAYERS, NORMS

SYMBOLS, MIXTURES, FEATURES = 65, 20, 128


def layer(cell: str, norm: str) -> nn.Module:
    return LAYERS[cell](FEATURES, **NORMS[norm])


class TextWriter(nn.Module):
    """Reads ``(batch, characters)``; its outputs are the bits per character, of each text, of all
    but the first.

    ``making`` gives its predictions of them instead: logits of each character but the first.
    """

    norm: str = "none"
    variant: str = "lstm"
    momentum: float = 0.9

    @nn.compact
    def __call__(self, symbols: jax.Array, *, evaluating: bool, making: bool = False) -> jax.Array:
        known = jax.nn.one_hot(symbols[:, :-1], SYMBOLS)
        logits = nn.Dense(SYMBOLS)(layer(self.variant, self.norm)(known))
        if making:
            return logits
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, symbols[:, 1:])
        return nats.mean(-1) / jnp.log(2)


class PenWriter(nn.Module):
    """Reads drawings ``(batch, points, 3)``, NaN where they have ended; its outputs are the nats of
    each drawing.

    The next point is a mixture of 20 Gaussians in two dimensions, and a chance that the pen is
    lifted (Graves 2013, arXiv:1308.0850, eqs. 18-25). Densities are those of offsets in deviations
    of the training set. ``making`` gives what it predicts of each point instead, for
    :func:`mixture`.
    """

    norm: str = "none"
    variant: str = "lstm"
    momentum: float = 0.9

    @nn.compact
    def __call__(self, points: jax.Array, *, evaluating: bool, making: bool = False) -> jax.Array:
        there = ~jnp.isnan(points[..., 0])
        points = jnp.where(there[..., None], points, 0)
        known = jnp.pad(points[:, :-1], [(0, 0), (1, 0), (0, 0)])
        # marks the start, which would be a zero input otherwise
        first = jnp.zeros_like(known[..., :1]).at[:, 0].set(1)
        h = layer(self.variant, self.norm)(jnp.concatenate([known, first], -1), mask=there)
        outputs = nn.Dense(6 * MIXTURES + 1)(h)
        if making:
            return outputs
        return jnp.where(there, point_nats(outputs, points), 0).sum(-1)


def mixture(outputs: jax.Array) -> tuple[jax.Array, ...]:
    """Of outputs ``(..., 6 * 20 + 1)``: logits, means x and y, log deviations, correlations; the
    logit of a lifted pen.
    """
    *rest, skew = jnp.split(outputs[..., :-1], 6, -1)
    return *rest, 0.99 * jnp.tanh(skew), outputs[..., -1]


def some_points(key: jax.Array, outputs: jax.Array) -> jax.Array:
    """Points ``(..., 3)`` drawn from what a network predicts of them."""
    which, normal, pen = jax.random.split(key, 3)
    weight, *parts, lifted = mixture(outputs)
    component = jax.random.categorical(which, weight)[..., None]
    x, y, log_x, log_y, correlation = (
        jnp.take_along_axis(part, component, -1)[..., 0] for part in parts
    )
    u, v = jax.random.normal(normal, (2, *x.shape))
    v = correlation * u + jnp.sqrt(1 - correlation**2) * v
    lifts = jax.random.bernoulli(pen, jax.nn.sigmoid(lifted)).astype(x.dtype)
    return jnp.stack([x + jnp.exp(log_x) * u, y + jnp.exp(log_y) * v, lifts], -1)


def point_nats(outputs: jax.Array, points: jax.Array) -> jax.Array:
    """The negative log density of points ``(..., 3)`` under a network's outputs ``(..., 6 * 20 +
    1)``.
    """
    weight, x, y, log_x, log_y, correlation, lifted = mixture(outputs)
    u, v = (points[..., :1] - x) * jnp.exp(-log_x), (points[..., 1:2] - y) * jnp.exp(-log_y)
    rest = 1 - correlation**2
    distance = (u**2 + v**2 - 2 * correlation * u * v) / rest
    log_density = -0.5 * distance - log_x - log_y - 0.5 * jnp.log(rest) - jnp.log(2 * jnp.pi)
    place = jax.nn.logsumexp(jax.nn.log_softmax(weight) + log_density, -1)
    return optax.sigmoid_binary_cross_entropy(lifted, points[..., 2]) - place
