"""Numbers for norms of deep transformers, which follow from their number of layers.

DeepNorm and Sub-LN are layer norms at certain places, with weights that start smaller or larger::

    DeepNorm   x = layer_norm(alpha * x + block(x)), weights of blocks start at beta times as large
    Sub-LN     x = x + out(layer_norm(in(layer_norm(x)))), weights start at gamma times as large
"""

import math
from typing import NamedTuple

from jaxnorm.arguments.axes import integer


class DeepNorm(NamedTuple):
    """The numbers of DeepNorm.

    Attributes:
      alpha: the factor of the residual stream.
      beta: the gain of the initializer of some weights.
    """

    alpha: float
    beta: float


class OfStacks(NamedTuple):
    """A value for each stack of layers; None for a stack that the model lacks."""

    encoder: DeepNorm | None
    decoder: DeepNorm | None


class GainsOfStacks(NamedTuple):
    """A gain for each stack of layers; None for a stack that the model lacks."""

    encoder: float | None
    decoder: float | None


def deepnorm_constants(encoder_layers: int = 0, decoder_layers: int = 0) -> OfStacks:
    """Return the numbers of DeepNorm (Wang et al. 2022, arXiv 2203.00555).

    ``x = layer_norm(alpha * x + block(x))``, where a block is attention or a feed-forward network.
    The weights of feed-forward networks and of the values and outputs of attention start beta times
    as large as by the usual initializer, Xavier's. With N layers in the encoder and M in the
    decoder:

    | model | alpha, beta of the encoder | of the decoder |
    |---|---|---|
    | encoder alone | ``(2 N)**(1/4)``, ``(8 N)**(-1/4)`` | |
    | decoder alone | | ``(2 M)**(1/4)``, ``(8 M)**(-1/4)`` |
    | both | ``0.81 (N**4 M)**(1/16)``, ``0.87 (N**4 M)**(-1/16)`` | ``(3 M)**(1/4)``, ``(12 M)**(-1/4)`` |

    Args:
      encoder_layers: number of layers of the encoder; 0 for a model without one.
      decoder_layers: number of layers of the decoder; 0 for a model without one.

    Returns:
      The numbers of each stack, as ``.encoder`` and ``.decoder``, with ``.alpha`` and ``.beta``.

    Raises:
      TypeError: numbers that are no integers.
      ValueError: negative numbers, or no layers at all.

    >>> import jaxnorm as jn
    >>> jn.deepnorm_constants(decoder_layers=8).decoder.alpha
    2.0
    >>> jn.deepnorm_constants(6, 27).decoder.alpha
    3.0
    """  # noqa: E501  (the table)
    n, m = _layers(encoder_layers, decoder_layers)
    if n and m:
        depth = (n**4 * m) ** (1 / 16)
        return OfStacks(
            DeepNorm(0.81 * depth, 0.87 / depth), DeepNorm((3 * m) ** 0.25, (12 * m) ** -0.25)
        )
    encoder, decoder = (
        DeepNorm((2 * layers) ** 0.25, (8 * layers) ** -0.25) if layers else None
        for layers in (n, m)
    )
    return OfStacks(encoder, decoder)


def subln_gains(encoder_layers: int = 0, decoder_layers: int = 0) -> GainsOfStacks:
    """Return the gains of Sub-LN's initializers (Wang et al. 2022, arXiv 2210.06423).

    Sub-LN has a second layer norm inside of each block, before its last projection. The weights of
    feed-forward networks and of the values and outputs of attention, but not of attention to the
    encoder, start gamma times as large as by the usual initializer, Xavier's. With N layers in the
    encoder and M in the decoder:

    | model | gamma of the encoder | of the decoder |
    |---|---|---|
    | encoder alone | ``sqrt(log(2 N))`` | |
    | decoder alone | | ``sqrt(log(2 M))`` |
    | both | ``sqrt(log(3 M) log(2 N) / 3)`` | ``sqrt(log(3 M))`` |

    Args:
      encoder_layers: number of layers of the encoder; 0 for a model without one.
      decoder_layers: number of layers of the decoder; 0 for a model without one.

    Returns:
      The gain of each stack, as ``.encoder`` and ``.decoder``.

    Raises:
      TypeError: numbers that are no integers.
      ValueError: negative numbers, or no layers at all.

    >>> import jaxnorm as jn
    >>> round(jn.subln_gains(decoder_layers=12).decoder, 3)  # the root of the logarithm of 24
    1.783
    """
    n, m = _layers(encoder_layers, decoder_layers)
    if n and m:
        of_decoder = math.log(3 * m)
        return GainsOfStacks(math.sqrt(of_decoder * math.log(2 * n) / 3), math.sqrt(of_decoder))
    encoder, decoder = (math.sqrt(math.log(2 * layers)) if layers else None for layers in (n, m))
    return GainsOfStacks(encoder, decoder)


def _layers(encoder_layers: int, decoder_layers: int) -> tuple[int, int]:
    """Return the numbers of layers, checked."""
    named = {"encoder_layers": encoder_layers, "decoder_layers": decoder_layers}
    n, m = (integer(value, f"{name} must be an integer") for name, value in named.items())
    if min(n, m) < 0 or n == m == 0:
        raise ValueError(
            "encoder_layers and decoder_layers must be 0 or more, and one of them 1 or more: got "
            f"{n} and {m}."
        )
    return n, m
