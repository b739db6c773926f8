"""Classify images by a vision transformer, and remove noise from them by a diffusion transformer.

Both are small and pre-norm: a norm stands in front of the attention and of the perceptron of each
block, and one after the last block.
"""

from functools import partial
from typing import cast, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxnorm import linen as jn
from jaxnorm.experiments.models import DENSE
from jaxnorm.flax_common.conditional import LayerKind

WIDTH, HEADS, PATCH, SIDE = 32, 4, 2, 8

# how the condition of a denoiser enters, and with which norms
LAYERS = get_args(LayerKind)
CONDITIONED = {"zero": LAYERS, "ada": LAYERS, "token": DENSE}


class VisionTransformer(nn.Module):
    """A vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929) without a class token.

    It reads patches of 2 x 2 pixels, and classifies by the mean of its tokens. The variant
    "vit-qk" normalizes queries and keys as well (Dehghani et al. 2023, arXiv:2302.05442), by an
    RMS norm of each head.
    """

    norm: str = "none"
    variant: str = "vit"
    momentum: float = 0.9
    blocks: int = 2

    @nn.compact
    def __call__(self, images: jax.Array, *, evaluating: bool) -> jax.Array:
        def norm(x: jax.Array) -> jax.Array:
            return DENSE[self.norm](evaluating, self.momentum)(x)

        x = Tokens()(images)
        for _ in range(self.blocks):
            x = x + Attention(self.variant == "vit-qk")(norm(x))
            x = x + Perceptron()(norm(x))
        return nn.Dense(10)(norm(x).mean(1))


class Denoiser(nn.Module):
    """A diffusion transformer (DiT; Peebles & Xie 2022, arXiv:2212.09748) of labelled digits.

    It mixes each image with noise, ``cos(a) * image + sin(a) * noise`` at a random angle ``a`` in
    [0, pi / 2], and predicts the noise. Its outputs are the squared errors, averaged over pixels.
    The condition is the angle and the label. It enters by ``AdaLayerNormZero`` (the variant
    "zero"), by ``AdaLayerNorm`` without gates ("ada"), or as one more token, which leaves the
    choice of the norm free ("token").
    """

    norm: str = "layer"
    variant: str = "zero"
    momentum: float = 0.9
    blocks: int = 2

    @nn.compact
    def __call__(self, digits: jax.Array, *, evaluating: bool) -> jax.Array:
        images, labels = digits[:, :-1], digits[:, -1].astype(jnp.int32)
        of_angle, of_noise = jax.random.split(self.make_rng("noise"))
        angle = jax.random.uniform(of_angle, (len(images), 1), maxval=jnp.pi / 2)
        noise = jax.random.normal(of_noise, images.shape)
        noisy = jnp.cos(angle) * images + jnp.sin(angle) * noise
        condition = nn.Embed(10, WIDTH)(labels) + nn.Dense(WIDTH)(
            nn.silu(nn.Dense(WIDTH)(waves(angle)))
        )
        x = Tokens()(noisy.reshape(-1, SIDE, SIDE))
        if self.variant == "token":
            x = jnp.concatenate([condition[:, None], x], 1)
        norm = partial(self._norm, evaluating, condition)
        for _ in range(self.blocks):
            for part in (Attention(), Perceptron()):
                y, gate = norm(x, gated=self.variant == "zero")
                x = x + gate * part(y)
        x = norm(x)[0][:, -((SIDE // PATCH) ** 2) :]
        # zeros, as in DiT: every network starts with the prediction 0
        found = nn.Dense(PATCH**2, kernel_init=nn.initializers.zeros)(x)
        return jnp.square(found - patches(noise.reshape(-1, SIDE, SIDE))).mean((1, 2))

    def _norm(
        self, evaluating: bool, condition: jax.Array, x: jax.Array, gated: bool = False
    ) -> tuple[jax.Array, jax.Array | float]:
        """Return the normalized tokens and the gate."""
        if self.variant == "token":
            return DENSE[self.norm](evaluating, self.momentum)(x), 1.0
        kind = cast("LayerKind", self.norm)
        if gated:
            return jn.AdaLayerNormZero(norm=kind)(x, condition)
        return jn.AdaLayerNorm(norm=kind)(x, condition), 1.0


class Tokens(nn.Module):
    """Embed the patches of images, and add what tells their places."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Dense(WIDTH)(patches(images))
        return x + self.param("places", nn.initializers.normal(0.02), x.shape[1:])


class Attention(nn.Module):
    """Self-attention, with normalized queries and keys on request."""

    normalized: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = jnp.moveaxis(nn.DenseGeneral((3, HEADS, WIDTH // HEADS))(x), -3, 0)
        if self.normalized:
            q, k = jn.QKNorm()(q, k)
        return nn.DenseGeneral(WIDTH, axis=(-2, -1))(jax.nn.dot_product_attention(q, k, v))


class Perceptron(nn.Module):
    """A hidden layer of four times the width, with GELU."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(x)))


def patches(images: jax.Array) -> jax.Array:
    """Return the patches ``(batch, 16, 4)`` of images ``(batch, 8, 8)``, row by row."""
    count = SIDE // PATCH
    parts = images.reshape(-1, count, PATCH, count, PATCH).swapaxes(2, 3)
    return parts.reshape(-1, count**2, PATCH**2)


def waves(angle: jax.Array) -> jax.Array:
    """Return sines and cosines of 16 multiples of an angle, for angles ``(batch, 1)``."""
    turns = angle * jnp.arange(1, WIDTH // 2 + 1)
    return jnp.concatenate([jnp.sin(turns), jnp.cos(turns)], -1)
