"""Recurrent networks with a norm inside: one pointwise step per cell, one loop over time."""

from jaxnorm.recurrent.functions import gru, lstm, rnn
from jaxnorm.recurrent.options import NetworkOptions, ParameterOptions
from jaxnorm.recurrent.parameters import init_gru, init_lstm, init_rnn

__all__ = [
    "NetworkOptions",
    "ParameterOptions",
    "gru",
    "init_gru",
    "init_lstm",
    "init_rnn",
    "lstm",
    "rnn",
]
