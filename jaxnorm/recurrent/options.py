"""The options that recurrent networks and their modules take, as type checkers see them, and the
types of states.
"""

from collections.abc import Mapping, Sequence
from typing import Generic, TypeAlias, TypedDict, TypeVar

import jax
from jax.typing import ArrayLike

from jaxnorm.options import Param
from jaxnorm.statistics import Moments

S = TypeVar("S")  # a state
Params: TypeAlias = Mapping[str, Param]
Running: TypeAlias = Mapping[str, Moments]
Pair: TypeAlias = tuple[jax.Array, jax.Array]  # the state of an LSTM
# of a network: the state after the last step, and the outputs
Result: TypeAlias = tuple[S, jax.Array]
ResultWithMoments: TypeAlias = tuple[S, jax.Array, dict[str, Moments]]
EitherResult: TypeAlias = Result[S] | ResultWithMoments[S]

# Of a module, in Flax's order: one cell's, a pair for two directions, a tuple for several layers.
# Lists are taken, too.
Carry: TypeAlias = jax.Array | tuple["Carry", ...]
CarryLike: TypeAlias = ArrayLike | Sequence["CarryLike"]


class NetworkOptions(TypedDict, Generic[S], total=False):
    """The options of ``rnn``, ``gru`` and ``lstm`` beside ``return_moments``; their signatures have
    the defaults.
    """

    initial: S | None
    lengths: Param
    where: Param
    segment_ids: Param
    reverse: bool
    time_major: bool
    norm: str | None
    placement: str
    epsilon: float
    zoneout: float | tuple[float, ...]
    key: jax.Array | None
    running: Running | None
    longer: str
    implementation: str | None


class CallOptions(TypedDict, total=False):
    """The options that the layers of both families take at the call beside ``return_carry``."""

    initial_carry: CarryLike | None
    seq_lengths: Param
    mask: Param
    segment_ids: Param
    time_major: bool | None
    reverse: bool | None
    keep_order: bool | None
    deterministic: bool | None
