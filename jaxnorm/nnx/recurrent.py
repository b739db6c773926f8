"""Recurrent layers that run whole sequences at once."""

from functools import partial
from typing import Any, ClassVar, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.recurrent import flip_sequences
from flax.typing import Dtype, Initializer

from jaxnorm.arguments import validation
from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.arguments.options import Param
from jaxnorm.nnx.cells import (
    Cell,
    LayerNormGRUCell,
    LayerNormLSTMCell,
    LayerNormSimpleCell,
    Random,
)
from jaxnorm.recurrent.layers import direction_names, list_carries, module_call, run_layers
from jaxnorm.recurrent.options import CallOptions, Carry, CarryLike

__all__ = ["GRU", "LSTM", "SimpleRNN"]


class _CellOptions(TypedDict, total=False):
    """Keyword arguments of a layer's constructor that only its cells use."""

    scale: float | None
    forget_bias: float | None
    kernel_init: Initializer
    recurrent_kernel_init: Initializer


class _CallOptions(CallOptions, total=False):
    """Keyword arguments of the call of a layer."""

    rngs: Random


class _Layer(nnx.Module):
    """The common base of the layers."""

    cell_type: ClassVar[type[Cell]]

    @property
    def kind(self) -> str:
        return self.cell_type.kind

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        norm: str | None = "layer",
        placement: str = "ba2016",
        epsilon: float = 1e-6,
        num_layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        zoneout: float | tuple[float, float] = 0.0,
        projection: int | None = None,
        reset_after: bool = True,
        activation: str = "tanh",
        time_major: bool = False,
        return_carry: bool = False,
        reverse: bool = False,
        keep_order: bool = False,
        deterministic: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        implementation: str | None = None,
        rngs: nnx.Rngs,
        **cell: Unpack[_CellOptions],
    ) -> None:
        self.norm, self.placement, self.epsilon, self.implementation = (
            norm,
            placement,
            epsilon,
            implementation,
        )
        self.reset_after, self.activation = reset_after, activation
        self.zoneout, self.deterministic, self.dtype, self.param_dtype = (
            zoneout,
            deterministic,
            dtype,
            param_dtype,
        )
        self.time_major, self.return_carry, self.reverse, self.keep_order = (
            time_major,
            return_carry,
            reverse,
            keep_order,
        )
        self.num_layers, self.bidirectional = num_layers, bidirectional
        shared: dict[str, Any] = {
            "norm": norm,
            "placement": placement,
            "epsilon": epsilon,
            "reset_after": reset_after,
            "activation": activation,
            "dtype": dtype,
            "param_dtype": param_dtype,
        }
        # Both directions of a layer see the same inputs, and their outputs are
        # concatenated.
        width, options = in_features, {**cell, **shared, "projection": projection}
        for directions in direction_names(num_layers, bidirectional):
            for name in directions:
                setattr(self, name, self.cell_type(width, hidden_features, rngs=rngs, **options))
            width = len(directions) * (projection or hidden_features)
        # Fork only after drawing the parameters: with one stream for all, they then
        # equal Flax's. Where nothing is random there is no stream.
        dropout = validation.number("dropout", dropout, 1)
        self.between = nnx.Dropout(
            dropout, deterministic=deterministic, rngs=rngs if dropout else None
        )
        self.rngs = (
            rngs.dropout.fork()
            if any(zoneout if isinstance(zoneout, tuple) else (zoneout,))
            else nnx.data(None)
        )

    @overload
    def __call__(
        self, inputs: jax.Array, *, return_carry: Literal[False], **options: Unpack[_CallOptions]
    ) -> jax.Array: ...
    @overload
    def __call__(
        self, inputs: jax.Array, *, return_carry: Literal[True], **options: Unpack[_CallOptions]
    ) -> tuple[Carry, jax.Array]: ...
    @overload
    def __call__(
        self,
        inputs: jax.Array,
        *,
        return_carry: bool | None = None,
        **options: Unpack[_CallOptions],
    ) -> jax.Array | tuple[Carry, jax.Array]: ...
    @known_keywords
    def __call__(
        self,
        inputs: jax.Array,
        *,
        initial_carry: CarryLike | None = None,
        seq_lengths: Param = None,
        mask: Param = None,
        segments: Param = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        deterministic: bool | None = None,
        rngs: Random = None,
    ) -> jax.Array | tuple[Carry, jax.Array]:
        """Run sequences ``(*batch, time, features)``.

        Args:
          inputs: the sequences; time is axis 0 with ``time_major``.
          initial_carry: the carry before the first step; zeros by default. It is (c, h) for an
            LSTM, h otherwise. Several layers take a tuple of carries, one for each layer. Two
            directions take a pair of carries in each layer.
          seq_lengths: integers ``(*batch)``: the number of steps of each sequence. Later steps are
            not taken; their outputs are 0.
          mask: boolean ``(*batch, time)``; steps where it is False are not taken.
          segments: integers ``(*batch, time)`` of sequences packed one after the other; each
            starts anew.
          return_carry: whether to return ``(carry, outputs)``. It overrides the attribute, as do
            the following arguments except ``rngs``.
          time_major: whether time is axis 0.
          reverse: whether to run from the last step to the first.
          keep_order: whether reversed outputs are returned in the order of the inputs.
          deterministic: True switches dropout off and replaces zoneout by its expected value.
          rngs: random numbers for dropout and zoneout, instead of the module's own.

        Returns:
          The outputs ``(*batch, time, features)``, or ``(carry, outputs)``.
        """
        deterministic = self.deterministic if deterministic is None else deterministic
        cells = [
            [getattr(self, name) for name in names]
            for names in direction_names(self.num_layers, self.bidirectional)
        ]
        layers = [[cell.parameters() for cell in directions] for directions in cells]
        carries = list_carries(self.kind, initial_carry, self.num_layers, self.bidirectional)
        # Random numbers of the call come before the module's own, as in Flax's Dropout.
        stream = self.rngs if rngs is None else rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs
        dropout = partial(self.between, deterministic=deterministic, rngs=rngs)
        make_key = None if deterministic or stream is None else stream
        call = module_call(
            self,
            seq_lengths,
            mask,
            segments,
            time_major=time_major,
            reverse=reverse,
            keep_order=keep_order,
            return_carry=return_carry,
        )
        return run_layers(
            self,
            layers,
            inputs,
            carries,
            call,
            between=dropout,
            make_key=make_key,
            flip=flip_sequences,
        )

    def set_view(self, deterministic: bool | None = None) -> None:
        """Set whether dropout and zoneout are off; ``nnx.view`` calls this method."""
        if deterministic is not None:
            self.deterministic = deterministic


class LSTM(_Layer):
    """Layer-normalized LSTM layers over whole sequences.

    See :func:`jaxnorm.recurrent.lstm` for the equations. The parameters match
    ``RNN(LayerNormLSTMCell)``. With ``norm=None`` the module equals Flax's
    ``RNN(OptimizedLSTMCell)``, parameters and dtypes included.

    Args:
      in_features: number of features of the inputs.
      hidden_features: number of features H of the state.
      norm: ``"layer"`` (default), ``"rms"``, or None for no norm.
      placement: position of the norm: ``"ba2016"`` (default), ``"sum"``, ``"gate"`` or
        ``"carried_cell"``.
      epsilon: added to the variance, inside the root; 1e-6 by default.
      num_layers: number of stacked layers; 1 by default.
      bidirectional: whether each layer also runs backwards and concatenates the outputs of both
        directions; False by default.
      dropout: dropout rate between the layers; 0 by default.
      zoneout: rate at which units keep their old value (Krueger et al. 2016, arXiv 1606.01305), or
        one rate for each part of the state, for an LSTM (h, c); 0 by default.
      projection: number of features to which h is projected; None, the default, projects nothing.
      reset_after: must be True: only a GRU has a reset gate.
      activation: must be ``"tanh"``: only a simple RNN has others.
      time_major: whether time is axis 0 of inputs, masks, ids and outputs; False by default.
      return_carry: whether to return ``(carry, outputs)``; False by default.
      reverse: whether to run from the last step to the first; False by default.
      keep_order: whether reversed outputs are returned in the order of the inputs; False by
        default.
      deterministic: True switches dropout off and replaces zoneout by its expected value; False by
        default. ``.train()`` and ``.eval()`` set it.
      dtype: dtype of the output; by default the dtype to which inputs and parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      implementation: None (default) selects automatically; see
        :class:`jaxnorm.recurrent.NetworkOptions`.
      rngs: random number generators for the initializers, for dropout and for zoneout.
      **cell: further arguments of :class:`LayerNormLSTMCell`: ``scale``, ``forget_bias``,
        ``kernel_init`` and ``recurrent_kernel_init``.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> layer = nnx.LSTM(3, 4, return_carry=True, rngs=Rngs(0))
    >>> (c, h), y = layer(jnp.ones((2, 5, 3)), seq_lengths=jnp.array([3, 5]))
    >>> y.shape, bool((h[0] == y[0, 2]).all())
    ((2, 5, 4), True)
    """

    cell_type = LayerNormLSTMCell


class GRU(_Layer):
    """Layer-normalized GRU layers over whole sequences.

    See :func:`jaxnorm.recurrent.gru` for the equations. The parameters match
    ``RNN(LayerNormGRUCell)``. With ``norm=None`` the module equals Flax's ``RNN(GRUCell)``,
    parameters and dtypes included.

    Args:
      in_features: number of features of the inputs.
      hidden_features: number of features H of the state.
      norm: ``"layer"`` (default), ``"rms"``, or None for no norm.
      placement: position of the norm: ``"ba2016"`` (default), ``"sum"`` or ``"gate"``.
      epsilon: added to the variance, inside the root; 1e-6 by default.
      num_layers: number of stacked layers; 1 by default.
      bidirectional: whether each layer also runs backwards and concatenates the outputs of both
        directions; False by default.
      dropout: dropout rate between the layers; 0 by default.
      zoneout: rate at which units keep their old value (Krueger et al. 2016, arXiv 1606.01305); 0
        by default.
      projection: must be None: only an LSTM has a projection.
      reset_after: whether the reset gate comes after the product with the recurrent weights; True
        by default. False puts it before, as in Keras with this argument, and as in Haiku.
      activation: must be ``"tanh"``: only a simple RNN has others.
      time_major: whether time is axis 0 of inputs, masks, ids and outputs; False by default.
      return_carry: whether to return ``(carry, outputs)``; False by default.
      reverse: whether to run from the last step to the first; False by default.
      keep_order: whether reversed outputs are returned in the order of the inputs; False by
        default.
      deterministic: True switches dropout off and replaces zoneout by its expected value; False by
        default. ``.train()`` and ``.eval()`` set it.
      dtype: dtype of the output; by default the dtype to which inputs and parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      implementation: None (default) selects automatically; see
        :class:`jaxnorm.recurrent.NetworkOptions`.
      rngs: random number generators for the initializers, for dropout and for zoneout.
      **cell: further arguments of :class:`LayerNormGRUCell`: ``scale``, ``kernel_init`` and
        ``recurrent_kernel_init``.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> nnx.GRU(3, 4, bidirectional=True, rngs=Rngs(0))(jnp.ones((2, 5, 3))).shape
    (2, 5, 8)
    """

    cell_type = LayerNormGRUCell


class SimpleRNN(_Layer):
    """Layer-normalized simple recurrent layers over whole sequences.

    See :func:`jaxnorm.recurrent.rnn` for the equations. The parameters match
    ``RNN(LayerNormSimpleCell)``. With ``norm=None`` the module equals Flax's ``RNN(SimpleCell)``,
    parameters and dtypes included.

    Args:
      in_features: number of features of the inputs.
      hidden_features: number of features H of the state.
      norm: ``"layer"`` (default), ``"rms"``, or None for no norm.
      placement: position of the norm: ``"ba2016"`` (default) or ``"sum"``.
      epsilon: added to the variance, inside the root; 1e-6 by default.
      num_layers: number of stacked layers; 1 by default.
      bidirectional: whether each layer also runs backwards and concatenates the outputs of both
        directions; False by default.
      dropout: dropout rate between the layers; 0 by default.
      zoneout: rate at which units keep their old value (Krueger et al. 2016, arXiv 1606.01305); 0
        by default.
      projection: must be None: only an LSTM has a projection.
      reset_after: must be True: only a GRU has a reset gate.
      activation: ``"tanh"`` (default) or ``"relu"``.
      time_major: whether time is axis 0 of inputs, masks, ids and outputs; False by default.
      return_carry: whether to return ``(carry, outputs)``; False by default.
      reverse: whether to run from the last step to the first; False by default.
      keep_order: whether reversed outputs are returned in the order of the inputs; False by
        default.
      deterministic: True switches dropout off and replaces zoneout by its expected value; False by
        default. ``.train()`` and ``.eval()`` set it.
      dtype: dtype of the output; by default the dtype to which inputs and parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      implementation: None (default) selects automatically; see
        :class:`jaxnorm.recurrent.NetworkOptions`.
      rngs: random number generators for the initializers, for dropout and for zoneout.
      **cell: further arguments of :class:`LayerNormSimpleCell`: ``scale``, ``kernel_init`` and
        ``recurrent_kernel_init``.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> nnx.SimpleRNN(3, 4, num_layers=2, rngs=Rngs(0))(jnp.ones((2, 5, 3))).shape
    (2, 5, 4)
    """

    cell_type = LayerNormSimpleCell
