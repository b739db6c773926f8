"""Classify images read row by row or pixel by pixel, utterances and texts, by recurrence."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxnorm import linen as jn
from jaxnorm import recurrent
from jaxnorm.core.running import ema
from jaxnorm.core.statistics import Moments
from jaxnorm.recurrent.parameters import make_cell
from jaxnorm.recurrent.statistics import normalized_widths

LAYERS: dict[str, Any] = {"lstm": jn.LSTM, "gru": jn.GRU, "rnn": jn.SimpleRNN}
# The arguments of layers and cells. The initial scale is 1 by default, and 0.1 for
# recurrent batch norm.
NORMS: dict[str, dict[str, Any]] = {
    "none": {"norm": None},
    "layer": {"norm": "layer"},
    "layer-0.3": {"norm": "layer", "scale": 0.3},
    "layer-sum": {"norm": "layer", "placement": "sum"},
    "layer-sum-0.3": {"norm": "layer", "placement": "sum", "scale": 0.3},
    "rms": {"norm": "rms"},
    "batch": {"norm": "batch"},
}


def pixels(images: jax.Array) -> jax.Array:
    """Return images as sequences of pixels."""
    return images.reshape(len(images), -1, 1)


def permuted(pixels: jax.Array) -> jax.Array:
    """Return the pixels in a fixed random order, which is the same for all images.

    It is the task of Le et al. 2015 (arXiv:1504.00941).
    """
    return pixels[:, np.random.default_rng(0).permutation(pixels.shape[1])]


READ: dict[str, Callable[[jax.Array], jax.Array]] = {
    "rows": lambda images: images.reshape(*images.shape[:-1]),
    "pixels": pixels,
    "permuted": lambda images: permuted(pixels(images)),
    "embedded": pixels,
}
# Deviation of the noise in the initial h for recurrent batch norm, as in its paper. In
# a batch whose images are alike, such as in blank margins, states without noise are
# equal and have variance 0, by which gradients are divided: MNIST pixel by pixel ended
# in NaN.
START_DEVIATION = 0.1
# features of an embedded pixel: the norm of a product with a single number keeps only
# its sign
EMBEDDED = 16


class Reader(nn.Module):
    """A recurrent layer that returns h after the last step."""

    cell: str
    norm: str
    features: int
    momentum: float

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None, *, evaluating: bool) -> jax.Array:
        if self.norm == "batch":
            return self._batch_normalized(x, mask, evaluating)
        carry, _ = LAYERS[self.cell](self.features, **NORMS[self.norm], return_carry=True)(
            x, mask=mask
        )
        return carry[1] if self.cell == "lstm" else carry

    def _batch_normalized(self, x: jax.Array, mask, evaluating: bool) -> jax.Array:
        """Run recurrent batch norm.

        This module holds the running statistics of each step.
        """
        network, make = getattr(recurrent, self.cell), getattr(recurrent, f"init_{self.cell}")
        params = self.param("cell", lambda key: make(key, x.shape[-1], self.features, norm="batch"))
        widths = normalized_widths(
            make_cell(self.cell, "batch", "ba2016", 0), params["recurrent_kernel"].shape[1]
        )
        running = {
            name: self.variable("batch_stats", name, empty_moments, x.shape[1], width)
            for name, width in widths.items()
        }
        h = START_DEVIATION * jax.random.normal(self.make_rng("noise"), (len(x), self.features))
        start = (h, jnp.zeros_like(h)) if self.cell == "lstm" else h
        if evaluating:
            known = {name: value.value for name, value in running.items()}
            state, _ = network(x, params, initial=start, norm="batch", where=mask, running=known)
        else:
            state, _, found = network(
                x, params, initial=start, norm="batch", where=mask, return_moments=True
            )
            # statistics have the steps of the first sequences seen: longer ones are cut
            # off
            for name, value in running.items():
                known = jax.tree.map(lambda leaf: leaf[: len(value.value.count)], found[name])  # noqa: B023
                value.value = ema(value.value, known, momentum=self.momentum)
        return state[0] if self.cell == "lstm" else state


def empty_moments(steps: int, features: int) -> Moments:
    """Return running statistics of steps before any batch."""
    return Moments(
        jnp.zeros((steps, features)), jnp.zeros((steps, features)), jnp.ones((steps, features))
    )


class ImageReader(nn.Module):
    """A network that reads images as sequences of rows or of pixels.

    ``variant`` is the cell and the way of reading, such as ``lstm-rows``. ``embedded``
    pixels go through a dense layer and tanh first.
    """

    norm: str = "none"
    variant: str = "lstm-rows"
    momentum: float = 0.9
    features: int = 64

    @nn.compact
    def __call__(self, images: jax.Array, *, evaluating: bool) -> jax.Array:
        cell, way = self.variant.split("-")
        x = READ[way](images)
        x = nn.tanh(nn.Dense(EMBEDDED)(x)) if way == "embedded" else x
        h = Reader(cell, self.norm, self.features, self.momentum)(x, None, evaluating=evaluating)
        return nn.Dense(10)(h)


class UtteranceReader(nn.Module):
    """A classifier of sequences ``(batch, time, features)`` into nine classes.

    Sequences are NaN after their end.
    """

    norm: str = "none"
    variant: str = "lstm"
    momentum: float = 0.9

    @nn.compact
    def __call__(self, x: jax.Array, *, evaluating: bool) -> jax.Array:
        h = Reader(self.variant, self.norm, 64, self.momentum)(
            x, ~jnp.isnan(x[..., 0]), evaluating=evaluating
        )
        return nn.Dense(9)(h)


class TextReader(nn.Module):
    """A classifier of texts: an embedding, a recurrent layer of 128 features, and one logit.

    Tokens 0 are padding, which is not read. ``variant`` is a cell, whose embedding has
    100 features, or a cell and ``-glove``. The embedding then is the table of 50
    numbers for each word that comes with the data, and is not trained.
    """

    norm: str = "none"
    variant: str = "lstm"
    momentum: float = 0.9
    words: int = 20_000

    @nn.compact
    def __call__(self, tokens: jax.Array, *, evaluating: bool) -> jax.Array:
        cell, _, table = self.variant.partition("-")
        if table:
            x = self.variable("batch_stats", "embedding", jnp.zeros, (self.words, 50)).value[tokens]
        else:
            x = nn.Embed(self.words, 100)(tokens)
        h = Reader(cell, self.norm, 128, self.momentum)(x, tokens > 0, evaluating=evaluating)
        logit = nn.Dense(1)(h)
        # for two classes, with the logits 0 and z: the softmax of these is the sigmoid
        # of z
        return jnp.concatenate([jnp.zeros_like(logit), logit], -1)
