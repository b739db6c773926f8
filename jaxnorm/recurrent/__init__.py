"""Run recurrent networks whose cells have a norm inside.

Each cell is one pointwise step, and one loop over time serves all cells.
"""

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
