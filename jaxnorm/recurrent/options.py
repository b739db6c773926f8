"""Define the options of recurrent networks, their parameters and their modules.

The types of states and results are here, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict, TypeVar

import jax
from jax.nn.initializers import Initializer
from jax.typing import ArrayLike, DTypeLike

from jaxnorm.arguments.options import Param
from jaxnorm.core.statistics import Moments

# a state
S = TypeVar("S")
Params: TypeAlias = Mapping[str, Param]
Running: TypeAlias = Mapping[str, Moments]
# the state of an LSTM
Pair: TypeAlias = tuple[jax.Array, jax.Array]
# what a network returns: the state after the last step, the outputs, and the Moments if
# asked for
Result: TypeAlias = tuple[S, jax.Array]
ResultWithMoments: TypeAlias = tuple[S, jax.Array, dict[str, Moments]]
EitherResult: TypeAlias = Result[S] | ResultWithMoments[S]

# The carry of a module, whose parts are in Flax's order: of one cell, a pair for two
# directions, a tuple for several layers. Arguments may be lists, too.
Carry: TypeAlias = jax.Array | tuple["Carry", ...]
CarryLike: TypeAlias = ArrayLike | Sequence["CarryLike"]


class NetworkOptions(TypedDict, total=False):
    """The options that ``rnn``, ``gru`` and ``lstm`` take by keyword.

    ``mask`` is another name of ``where``, ``segment_ids`` of ``segments``.

    Attributes:
      lengths: integers ``(..., batch)``, the number of steps of each sequence. Later
        steps are padding. By default none is.
      where: boolean ``(..., batch, time)``. Where it is False, the step is not taken:
        the state stays as it is, the output is 0 whatever x holds, and the gradient of
        x is 0. It suits padding on the left, and gaps.
      segments: integers ``(..., batch, time)``, the ids of sequences packed one after
        the other. Where a step has another id than the step taken before it, it starts
        from zeros. ``initial`` is for the first sequence.
      reverse: True runs from the last step to the first; outputs stay where their
        inputs are.
      time_major: True if x, where, segments and outputs have time as axis 0.
      norm: ``"layer"`` (default), ``"rms"``, ``"batch"`` or None.
      placement: position of the norm, in the names of the function's table;
        ``"ba2016"`` by default.
      epsilon: added to the variance, inside the root; 1e-6 by default.
      zoneout: rate at which units keep their old value (Krueger et al. 2016, arXiv
        1606.01305), or one rate for each part of the state, h and c; 0 by default. With
        a ``key`` units are drawn at random. Without, each takes the expected value.
      key: random key for zoneout.
      running: Moments with which ``norm="batch"`` normalizes, as ``return_moments``
        gives them, ``(steps, features)`` each. Steps beyond the last one seen use the
        Moments of that one.
      longer: ``"last"`` (default), or ``"raise"`` to refuse sequences of more steps
        than ``running`` has.
      implementation: None selects automatically, as in :func:`jaxnorm.standardize`.
        ``"reference"`` is a plain scan: JAX stores what every step computes. ``"xla"``
        stores only the states for the backward pass, and recomputes the rest in chunks.
        ``"native"`` does so with the loop of an LSTM in a CPU kernel. Where ``norm`` is
        None and H is at least 256, it stores the gates, too: 6 H elements a step
        instead of 2 H, and a fifth less time.

    >>> import jax, jax.numpy as jnp, jaxnorm as jn
    >>> options = jn.recurrent.NetworkOptions(norm="rms", lengths=jnp.array([5, 2]))
    >>> params = jn.recurrent.init_gru(jax.random.key(0), 3, 4, norm="rms")
    >>> h, y = jn.recurrent.gru(jnp.ones((2, 5, 3)), params, **options)
    >>> bool(y[1, 2:].any())
    False
    """

    lengths: Param
    where: Param
    segments: Param
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


@dataclass(frozen=True)
class NetworkArguments:
    """The arguments of one call of a network, besides x and the parameters.

    These are :class:`NetworkOptions` with their defaults, ``initial``, which is h or
    (h, c), ``return_moments``, and what one of the networks takes alone: ``reset_after``
    of the GRU and ``activation`` of the simple network.
    """

    initial: Any = None
    return_moments: bool = False
    reset_after: bool = True
    activation: str = "tanh"
    lengths: Param = None
    where: Param = None
    segments: Param = None
    reverse: bool = False
    time_major: bool = False
    norm: str | None = "layer"
    placement: str = "ba2016"
    epsilon: float = 1e-6
    zoneout: float | tuple[float, ...] = 0.0
    key: jax.Array | None = None
    running: Running | None = None
    longer: str = "last"
    implementation: str | None = None


class ParameterOptions(TypedDict, total=False):
    """The options that ``init_rnn``, ``init_gru`` and ``init_lstm`` take by keyword.

    Attributes:
      norm: norm of the network, see :class:`NetworkOptions`.
      placement: position of the norm in the network.
      scale: the value at which all gains start; 1 by default, and 0.1 for recurrent
        batch norm.
      kernel_init: initializer of the input weights and the projection; LeCun's normal
        one by default.
      recurrent_kernel_init: initializer of the recurrent weights; orthogonal by
        default.
      dtype: dtype of all parameters; float32 by default.

    >>> import jax, jaxnorm as jn
    >>> options = jn.recurrent.ParameterOptions(scale=0.1, dtype="bfloat16")
    >>> jn.recurrent.init_rnn(jax.random.key(0), 3, 2, **options)["input_scale"].tolist()
    [0.10009765625, 0.10009765625]
    """

    norm: str | None
    placement: str
    scale: float | None
    kernel_init: Initializer
    recurrent_kernel_init: Initializer
    dtype: DTypeLike


class CallOptions(TypedDict, total=False):
    """The options that layers of modules take at the call besides ``return_carry``."""

    initial_carry: CarryLike | None
    seq_lengths: Param
    mask: Param
    segments: Param
    time_major: bool | None
    reverse: bool | None
    keep_order: bool | None
    deterministic: bool | None
