"""Predict what comes next, by recurrent networks.

They predict the next character of a text, or the next point of a pen drawing.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from jaxnorm.experiments.sequences import LAYERS, NORMS

SYMBOLS, MIXTURES, FEATURES = 65, 20, 128


def layer(cell: str, norm: str) -> nn.Module:
    """Return a recurrent layer with this cell and norm."""
    return LAYERS[cell](FEATURES, **NORMS[norm])


class TextWriter(nn.Module):
    """A network that predicts texts ``(batch, characters)``, character by character.

    Its outputs are the bits per character of each text, over all characters but the
    first. With ``making`` it returns the logits of each of these characters instead.
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
    """A network that predicts drawings ``(batch, points, 3)``, point by point.

    Drawings are NaN after their end. The outputs are the nats of each drawing. The next
    point is modeled by a mixture of 20 Gaussians in two dimensions, and a probability
    that the pen is lifted (Graves 2013, arXiv:1308.0850, eqs. 18-25). Densities are by
    offsets in deviations of the training set. With ``making`` it returns the parameters
    of each point's distribution instead, for :func:`mixture`.
    """

    norm: str = "none"
    variant: str = "lstm"
    momentum: float = 0.9

    @nn.compact
    def __call__(self, points: jax.Array, *, evaluating: bool, making: bool = False) -> jax.Array:
        present = ~jnp.isnan(points[..., 0])
        points = jnp.where(present[..., None], points, 0)
        known = jnp.pad(points[:, :-1], [(0, 0), (1, 0), (0, 0)])
        # this feature marks the start, whose input would be all zeros without it
        first = jnp.zeros_like(known[..., :1]).at[:, 0].set(1)
        h = layer(self.variant, self.norm)(jnp.concatenate([known, first], -1), mask=present)
        outputs = nn.Dense(6 * MIXTURES + 1)(h)
        if making:
            return outputs
        return jnp.where(present, point_nats(outputs, points), 0).sum(-1)


def mixture(outputs: jax.Array) -> tuple[jax.Array, ...]:
    """Split outputs ``(..., 6 * 20 + 1)`` into the parameters of a distribution of points.

    Returns:
      Logits, means of x and of y, log deviations of x and of y, and correlations of the
      Gaussians, and the logit of a lifted pen.
    """
    *rest, skew = jnp.split(outputs[..., :-1], 6, -1)
    # below 1 in size, since a density divides by 1 - correlation**2
    return *rest, 0.99 * jnp.tanh(skew), outputs[..., -1]


def sample_points(key: jax.Array, outputs: jax.Array) -> jax.Array:
    """Return points ``(..., 3)`` drawn from the distributions that a network predicts."""
    which, normal, pen = jax.random.split(key, 3)
    weight, *parts, lifted = mixture(outputs)
    component = jax.random.categorical(which, weight)[..., None]
    x, y, log_x, log_y, correlation = (
        jnp.take_along_axis(part, component, -1)[..., 0] for part in parts
    )
    u, v = jax.random.normal(normal, (2, *x.shape))
    # v then has deviation 1, and this correlation with u
    v = correlation * u + jnp.sqrt(1 - correlation**2) * v
    lifts = jax.random.bernoulli(pen, jax.nn.sigmoid(lifted)).astype(x.dtype)
    return jnp.stack([x + jnp.exp(log_x) * u, y + jnp.exp(log_y) * v, lifts], -1)


def point_nats(outputs: jax.Array, points: jax.Array) -> jax.Array:
    """Return the negative log density of points ``(..., 3)`` under a network's outputs."""
    weight, x, y, log_x, log_y, correlation, lifted = mixture(outputs)
    u, v = (points[..., :1] - x) * jnp.exp(-log_x), (points[..., 1:2] - y) * jnp.exp(-log_y)
    rest = 1 - correlation**2
    distance = (u**2 + v**2 - 2 * correlation * u * v) / rest
    # each component is a normal distribution in two dimensions; their weighted sum is
    # taken in logarithms, since densities of far points underflow
    log_density = -0.5 * distance - log_x - log_y - 0.5 * jnp.log(rest) - jnp.log(2 * jnp.pi)
    place = jax.nn.logsumexp(jax.nn.log_softmax(weight) + log_density, -1)
    return optax.sigmoid_binary_cross_entropy(lifted, points[..., 2]) - place
