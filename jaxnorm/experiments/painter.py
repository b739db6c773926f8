"""Paint an image stroke by stroke, with layer-normalized LSTMs.

The network is DRAW (Gregor et al. 2015, arXiv:1502.04623).
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from jaxnorm import linen as jn
from jaxnorm.experiments.sequences import NORMS

SIDE, FEATURES, LATENT = 28, 128, 32
# points along each side of the grids of attention
READ, WRITE = 5, 5


class Painter(nn.Module):
    """A network that models binary images ``(batch, 784)`` as the sum of several strokes.

    Its outputs are the nats of each image: the variational bound, from one sample. With
    ``making`` it returns as many images of its own instead, as probabilities of ink,
    from latents drawn by the prior.

    The variant "whole" reads and writes all of the image at every step. The variant
    "attention" looks through grids of 5 x 5 Gaussian filters (eqs. 19-29).
    """

    norm: str = "none"
    variant: str = "whole"
    momentum: float = 0.9
    steps: int = 8

    @nn.compact
    def __call__(self, images: jax.Array, *, evaluating: bool, making: bool = False) -> jax.Array:
        encoder, decoder = (
            jn.LayerNormLSTMCell(FEATURES, **NORMS[self.norm], name=name)
            for name in ("encoder", "decoder")
        )
        q, drawn = (
            nn.Dense(2 * LATENT, name="q"),
            nn.Dense(WRITE**2 if self.variant == "attention" else SIDE**2, name="write"),
        )
        looks = (
            [nn.Dense(5, name=name) for name in ("look", "aim")]
            if self.variant == "attention"
            else []
        )
        zeros = jnp.zeros((len(images), FEATURES))
        coder, painter, canvas, nats = (
            (zeros, zeros),
            (zeros, zeros),
            jnp.zeros_like(images),
            jnp.zeros(len(images)),
        )
        for noise in jax.random.normal(self.make_rng("noise"), (self.steps, len(images), LATENT)):
            h = painter[1]
            # the image, and what the canvas still lacks of it (eq. 3)
            seen = jnp.concatenate([images, images - jax.nn.sigmoid(canvas)], -1)
            if looks:
                seen = glimpse(seen, *filters(looks[0](h), READ))
            coder, code = encoder(coder, jnp.concatenate([seen, h], -1))
            # the Kullback-Leibler divergence of q, a normal distribution, from the
            # prior
            mean, log_deviation = jnp.split(q(code), 2, -1)
            nats += (0.5 * (mean**2 + jnp.exp(2 * log_deviation)) - log_deviation - 0.5).sum(-1)
            painter, h = decoder(
                painter, noise if making else mean + jnp.exp(log_deviation) * noise
            )
            stroke = drawn(h)
            canvas += paint(stroke, *filters(looks[1](h), WRITE)) if looks else stroke
        if making:
            return jax.nn.sigmoid(canvas)
        return nats + optax.sigmoid_binary_cross_entropy(canvas, images).sum(-1)


def filters(look: jax.Array, points: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return filters along y and along x, ``(batch, points, 28)``, and their intensity.

    ``look`` holds the five numbers of each example that place the grid.
    """
    x, y, log_variance, log_stride, log_intensity = jnp.split(look, 5, -1)
    # at log_stride 0 the outermost filters have the whole image between them
    stride = (SIDE - 1) / (points - 1) * jnp.exp(log_stride)
    offsets = (jnp.arange(points) - (points - 1) / 2) * stride

    def along(center: jax.Array) -> jax.Array:
        means = (SIDE + 1) / 2 * (center + 1) + offsets
        distances = (jnp.arange(SIDE) - means[..., None]) ** 2
        # a softmax of the exponents is a Gaussian that sums to 1 over the pixels
        return jax.nn.softmax(-0.5 * distances * jnp.exp(-log_variance)[..., None])

    return along(y), along(x), jnp.exp(log_intensity)


def glimpse(
    seen: jax.Array, along_y: jax.Array, along_x: jax.Array, intensity: jax.Array
) -> jax.Array:
    """Read the points of a grid from images, flat."""
    images = seen.reshape(len(seen), -1, SIDE, SIDE)
    return intensity * jnp.einsum("bpy,biyx,bqx->bipq", along_y, images, along_x).reshape(
        len(seen), -1
    )


def paint(
    stroke: jax.Array, along_y: jax.Array, along_x: jax.Array, intensity: jax.Array
) -> jax.Array:
    """Write the points of a grid into images, flat."""
    patch = stroke.reshape(len(stroke), WRITE, WRITE)
    return (
        jnp.einsum("bpy,bpq,bqx->byx", along_y, patch, along_x).reshape(len(stroke), -1) / intensity
    )
