"""Run recurrent networks over sequences: ``rnn``, ``gru`` and ``lstm``."""

from typing import Literal, Unpack, overload

import jax
from jax.typing import ArrayLike

from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.recurrent.network import network
from jaxnorm.recurrent.options import (
    EitherResult,
    NetworkArguments,
    NetworkOptions,
    Pair,
    Params,
    Result,
    ResultWithMoments,
)


@overload
def rnn(
    x: ArrayLike,
    params: Params,
    *,
    initial: ArrayLike | None = None,
    activation: str = "tanh",
    return_moments: Literal[False] = False,
    **options: Unpack[NetworkOptions],
) -> Result[jax.Array]: ...
@overload
def rnn(
    x: ArrayLike,
    params: Params,
    *,
    initial: ArrayLike | None = None,
    activation: str = "tanh",
    return_moments: Literal[True],
    **options: Unpack[NetworkOptions],
) -> ResultWithMoments[jax.Array]: ...
@overload
def rnn(
    x: ArrayLike,
    params: Params,
    *,
    initial: ArrayLike | None = None,
    activation: str = "tanh",
    return_moments: bool,
    **options: Unpack[NetworkOptions],
) -> EitherResult[jax.Array]: ...
@known_keywords
def rnn(
    x: ArrayLike,
    params: Params,
    *,
    initial: ArrayLike | None = None,
    activation: str = "tanh",
    return_moments: bool = False,
    **options: Unpack[NetworkOptions],
) -> EitherResult[jax.Array]:
    """Run a simple recurrent network over sequences: ``h' = tanh(a)``, or ``max(a, 0)``.

    ============  ===========================================================
    ba2016        a = LN(W_h h) + LN(W_x x) + b, as eq. 20 does for the LSTM
    sum           a = LN(W_h h + W_x x) + b (Ba, Kiros & Hinton 2016, eq. 4)
    norm=None     a = W_h h + W_x x + b
    ============  ===========================================================

    Args:
      x: floating array ``(..., batch, time, features)``, at least ``(time, features)``.
      params: as :func:`init_rnn` makes them.
      initial: h before the first step, ``(..., batch, H)``; zeros by default.
      activation: ``"tanh"`` (default), or ``"relu"`` for ``h' = max(a, 0)``, whose
        derivative at 0 is 0. Le, Jaitly & Hinton 2015 (arXiv 1504.00941) start its
        recurrent matrix at the identity, without a norm.
      return_moments: with ``norm="batch"`` whether to return the Moments of each step,
        too: a dict of ``input`` and ``recurrent``.
      **options: ``lengths``, ``where``, ``segments``, ``reverse``, ``time_major``,
        ``norm``, ``placement``, ``epsilon``, ``zoneout``, ``key``, ``running``,
        ``longer`` and ``implementation``, see :class:`NetworkOptions`.

    Returns:
      ``(h, outputs)``, or ``(h, outputs, moments)`` with ``return_moments``. h is the
      state after the last step, in float32 at least. The outputs are h after every
      step, ``(..., batch, time, H)`` in the dtype of x.

    Raises:
      TypeError: x or params that are not floating, lengths that are no integers, masks
        that are not boolean.
      ValueError: shapes that do not fit, lengths beyond the steps of x, an unknown
        norm, placement, activation or implementation, parameters for another placement.

    >>> import jax, jax.numpy as jnp, jaxnorm as jn
    >>> h, y = jn.recurrent.rnn(jnp.ones((2, 5, 3)), jn.recurrent.init_rnn(jax.random.key(0), 3, 4))
    >>> h.shape, y.shape
    ((2, 4), (2, 5, 4))
    >>> one = {"input_kernel": jnp.ones((1, 1)), "recurrent_kernel": jnp.ones((1, 1))}
    >>> x = jnp.array([[1.0], [2.0], [-5.0], [4.0]])
    >>> jn.recurrent.rnn(x, one, norm=None, activation="relu")[1].ravel().tolist()
    [1.0, 3.0, 0.0, 4.0]
    """
    given = NetworkArguments(
        initial=initial, return_moments=return_moments, activation=activation, **options
    )
    return network("rnn", x, params, given)


@overload
def gru(
    x: ArrayLike,
    params: Params,
    *,
    initial: ArrayLike | None = None,
    reset_after: bool = True,
    return_moments: Literal[False] = False,
    **options: Unpack[NetworkOptions],
) -> Result[jax.Array]: ...
@overload
def gru(
    x: ArrayLike,
    params: Params,
    *,
    initial: ArrayLike | None = None,
    reset_after: bool = True,
    return_moments: Literal[True],
    **options: Unpack[NetworkOptions],
) -> ResultWithMoments[jax.Array]: ...
@overload
def gru(
    x: ArrayLike,
    params: Params,
    *,
    initial: ArrayLike | None = None,
    reset_after: bool = True,
    return_moments: bool,
    **options: Unpack[NetworkOptions],
) -> EitherResult[jax.Array]: ...
@known_keywords
def gru(
    x: ArrayLike,
    params: Params,
    *,
    initial: ArrayLike | None = None,
    reset_after: bool = True,
    return_moments: bool = False,
    **options: Unpack[NetworkOptions],
) -> EitherResult[jax.Array]:
    """Run a gated recurrent unit (Cho et al. 2014) over sequences: ``h' = (1 - z) n + z h``.

    ============  ==================================================================================
    ba2016        r, z = sigmoid(LN(W_h h) + LN(W_x x) + b),
                  n = tanh(LN(U_x x) + b_n + r (LN(U_h h) + b_h)):
                  r and z share their statistics (Ba, Kiros & Hinton 2016, supplement)
    sum           r, z = sigmoid(LN(W_h h + W_x x) + b), n = tanh(LN(U_x x + r U_h h) + b_n)
    gate          as sum, but r and z have statistics of their own
    norm=None     r, z = sigmoid(W_h h + W_x x + b), n = tanh(U_x x + b_n + r (U_h h + b_h)):
                  Flax's GRUCell
    ============  ==================================================================================

    The blocks of the parameters are in the order r, z, n. b_h is the leaf
    ``recurrent_bias``, (H,).

    In these equations r scales the product U_h h, as in PyTorch and cuDNN. With
    ``reset_after=False`` it scales h before the product, as in the paper, in Haiku, in
    Keras with the same argument, and in ONNX with ``linear_before_reset=0``. The gates r
    and z stay as they are, and U_h (r h) has the norm that U_h h has:

    ============  ==================================================================================
    ba2016        n = tanh(LN(U_x x) + LN(U_h (r h)) + b_n)
    sum, gate     n = tanh(LN(U_x x + U_h (r h)) + b_n)
    norm=None     n = tanh(U_x x + U_h (r h) + b_n)
    ============  ==================================================================================

    There is no b_h then, since b_n is added at the same place. Each step has two
    products, one after the other, which takes longer.

    Args:
      x: floating array ``(..., batch, time, features)``, at least ``(time, features)``.
      params: as :func:`init_gru` makes them.
      initial: h before the first step, ``(..., batch, H)``; zeros by default.
      reset_after: whether the reset gate r comes after the product with U_h; True by
        default. False puts it before the product.
      return_moments: with ``norm="batch"`` whether to return the Moments of each step,
        too: a dict of ``input`` and ``recurrent``.
      **options: ``lengths``, ``where``, ``segments``, ``reverse``, ``time_major``,
        ``norm``, ``placement``, ``epsilon``, ``zoneout``, ``key``, ``running``,
        ``longer`` and ``implementation``, see :class:`NetworkOptions`.

    Returns:
      ``(h, outputs)``, or ``(h, outputs, moments)`` with ``return_moments``. h is the
      state after the last step, in float32 at least. The outputs are h after every
      step, ``(..., batch, time, H)`` in the dtype of x.

    Raises:
      TypeError: x or params that are not floating, lengths that are no integers, masks
        that are not boolean.
      ValueError: shapes that do not fit, lengths beyond the steps of x, an unknown
        norm, placement or implementation, parameters for another placement.

    >>> import jax, jax.numpy as jnp, jaxnorm as jn
    >>> h, y = jn.recurrent.gru(jnp.ones((2, 5, 3)), jn.recurrent.init_gru(jax.random.key(0), 3, 4))
    >>> bool((h == y[:, -1]).all())
    True
    >>> params = jn.recurrent.init_gru(jax.random.key(0), 3, 4, reset_after=False)
    >>> jn.recurrent.gru(jnp.ones((2, 5, 3)), params, reset_after=False)[1].shape
    (2, 5, 4)
    """
    given = NetworkArguments(
        initial=initial, return_moments=return_moments, reset_after=reset_after, **options
    )
    return network("gru", x, params, given)


@overload
def lstm(
    x: ArrayLike,
    params: Params,
    *,
    initial: tuple[ArrayLike, ArrayLike] | None = None,
    return_moments: Literal[False] = False,
    **options: Unpack[NetworkOptions],
) -> Result[Pair]: ...
@overload
def lstm(
    x: ArrayLike,
    params: Params,
    *,
    initial: tuple[ArrayLike, ArrayLike] | None = None,
    return_moments: Literal[True],
    **options: Unpack[NetworkOptions],
) -> ResultWithMoments[Pair]: ...
@overload
def lstm(
    x: ArrayLike,
    params: Params,
    *,
    initial: tuple[ArrayLike, ArrayLike] | None = None,
    return_moments: bool,
    **options: Unpack[NetworkOptions],
) -> EitherResult[Pair]: ...
@known_keywords
def lstm(
    x: ArrayLike,
    params: Params,
    *,
    initial: tuple[ArrayLike, ArrayLike] | None = None,
    return_moments: bool = False,
    **options: Unpack[NetworkOptions],
) -> EitherResult[Pair]:
    """Run a layer-normalized long short-term memory over sequences.

    ``a = pre-activations, c' = sigmoid(a_f) c + sigmoid(a_i) tanh(a_g), h' =
    sigmoid(a_o) tanh(s)``

    ============  ==================================================================================
    ba2016        a = LN(W_h h) + LN(W_x x) + b, s = LN(c')
                  (Ba, Kiros & Hinton 2016, arXiv 1607.06450, eqs. 20-22)
    sum           a = LN(W_h h + W_x x) + b over all four gates, s = c' (Sonnet's LSTM)
    gate          as sum, but each gate has statistics of its own, and c' = s = LN(...) is carried
                  (TensorFlow's LayerNormBasicLSTMCell)
    carried_cell  as ba2016, but c' = s is carried (TensorFlow Addons; PyTorch's fastrnns)
    norm=None     a = W_h h + W_x x + b, s = c'
    ============  ==================================================================================

    Every LN has a gain. The only shifts are b and, on c, ``cell_bias``. ``norm="rms"``
    does not center (Zhang & Sennrich 2019). ``norm="batch"`` is recurrent batch norm
    (Cooijmans et al. 2016, arXiv 1603.09025): it stands where ba2016 has its norms, and
    takes the statistics of each step over the batch. In evaluation, pass ``running``.
    While the inputs are equal over the batch, as the blank first rows of images are,
    states that start from zeros are equal, too. The gradients and statistics of such
    steps are useless. Begin with noise, an ``initial`` h of deviation 0.1 as the
    authors do, in evaluation too.

    A layer norm of zeros has variance 0 and the derivative ``1 / sqrt(epsilon)``. A run
    of zero vectors from a zero state would multiply gradients by up to 1000 at every
    step, for h and again for c. Mark padding by ``lengths`` or ``where``: such steps
    are not taken. Where the sequences themselves hold zeros, a step whose input is 0
    passes no gradient to the state through a norm whose variance is exactly 0. The
    factor then comes once, where the zeros end. A larger ``epsilon`` bounds it.

    Gains of 1 make gradients grow on their way back, at the start of a training by some
    10,000 over 200 steps. Begin long sequences with gains of 0.1 to 0.3. With a single
    input feature, LN(W_x x) depends only on its sign: embed the feature, or take
    ``placement="sum"``.

    Args:
      x: floating array ``(..., batch, time, features)``, at least ``(time, features)``.
      params: as :func:`init_lstm` makes them.
      initial: state before the first step, ``(h, c)``, each ``(..., batch, H)``; zeros
        by default.
      return_moments: with ``norm="batch"`` whether to return the Moments of each step,
        too: a dict of ``input``, ``recurrent`` and ``cell``.
      **options: ``lengths``, ``where``, ``segments``, ``reverse``, ``time_major``,
        ``norm``, ``placement``, ``epsilon``, ``zoneout``, ``key``, ``running``,
        ``longer`` and ``implementation``, see :class:`NetworkOptions`.

    Returns:
      ``((h, c), outputs)``, or ``((h, c), outputs, moments)`` with ``return_moments``.
      (h, c) is the state after the last step, in float32 at least. The outputs are h
      after every step, ``(..., batch, time, H)`` in the dtype of x.

    Raises:
      TypeError: x or params that are not floating, lengths that are no integers, masks
        that are not boolean.
      ValueError: shapes that do not fit, lengths beyond the steps of x, an unknown
        norm, placement or implementation, parameters for another placement.

    >>> import jax, jax.numpy as jnp, jaxnorm as jn
    >>> params = jn.recurrent.init_lstm(jax.random.key(0), in_features=3, features=4)
    >>> x = jnp.ones((2, 5, 3)).at[0, 3:].set(jnp.nan)
    >>> (h, c), y = jn.recurrent.lstm(x, params, lengths=jnp.array([3, 5]))
    >>> bool((h[0] == y[0, 2]).all()), y[0, 3:].any().tolist()
    (True, False)
    """
    given = NetworkArguments(initial=initial, return_moments=return_moments, **options)
    return network("lstm", x, params, given)
