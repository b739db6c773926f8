"""Recurrent classifiers: images read row by row or pixel by pixel, and text."""

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
# Arguments of layers and cells; scale is the initial gain, 1 where nothing is said, for recurrent
# batch norm 0.1.
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
    return images.reshape(len(images), -1, 1)


def permuted(pixels: jax.Array) -> jax.Array:
    """In an order without sense, the same for all images (Le et al. 2015, arXiv:1504.00941)."""
    return pixels[:, np.random.default_rng(0).permutation(pixels.shape[1])]


READ: dict[str, Callable[[jax.Array], jax.Array]] = {
    "rows": lambda images: images.reshape(*images.shape[:-1]),
    "pixels": pixels,
    "permuted": lambda images: permuted(pixels(images)),
    "embedded": pixels,
}
# deviation of the first h for batch norm, as its authors do: equal ones have variance 0, by which
# gradients are divided
START = 0.1
EMBEDDED = 16  # features that a pixel becomes: the norm of one alone would leave its sign


class Reader(nn.Module):
    """A recurrent layer and its state after the last step, h."""

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
        """Recurrent batch norm: running statistics of each step are this module's state."""
        network, make = getattr(recurrent, self.cell), getattr(recurrent, f"init_{self.cell}")
        params = self.param("cell", lambda key: make(key, x.shape[-1], self.features, norm="batch"))
        widths = normalized_widths(
            make_cell(self.cell, "batch", "ba2016", 0), params["recurrent_kernel"].shape[1]
        )
        running = {
            name: self.variable("batch_stats", name, unseen, x.shape[1], width)
            for name, width in widths.items()
        }
        h = START * jax.random.normal(self.make_rng("noise"), (len(x), self.features))
        start = (h, jnp.zeros_like(h)) if self.cell == "lstm" else h
        if evaluating:
            known = {name: value.value for name, value in running.items()}
            state, _ = network(x, params, initial=start, norm="batch", where=mask, running=known)
        else:
            state, _, found = network(
                x, params, initial=start, norm="batch", where=mask, return_moments=True
            )
            for name, value in running.items():  # steps beyond those of training are not kept
                known = jax.tree.map(lambda leaf: leaf[: len(value.value.count)], found[name])  # noqa: B023
                value.value = ema(value.value, known, momentum=self.momentum)
        return state[0] if self.cell == "lstm" else state


def unseen(steps: int, features: int) -> Moments:
    """Running statistics of steps that no batch has had yet."""
    return Moments(
        jnp.zeros((steps, features)), jnp.zeros((steps, features)), jnp.ones((steps, features))
    )


class ImageReader(nn.Module):
    """Images as sequences of rows or of pixels; ``variant`` is cell and way of reading, such as
    ``lstm-rows``.

    ``embedded`` pixels go through a dense layer and tanh first.
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
    """Sequences ``(batch, time, features)``, NaN where they have ended, of nine classes."""

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
    """Embedding(100), a recurrent layer of 128, one logit; tokens 0 are padding, which is not read.

    ``variant`` is a cell, or a cell and ``-glove``: the embedding is then the table of 50 numbers a
    word that comes with the data, and is not trained.
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
        # the softmax of these is the sigmoid of the logit
        return jnp.concatenate([jnp.zeros_like(logit), logit], -1)
