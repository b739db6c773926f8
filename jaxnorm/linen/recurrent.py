"""Recurrent layers that run whole sequences at once."""

from dataclasses import fields
from functools import partial
from typing import ClassVar, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.recurrent import flip_sequences
from flax.typing import Dtype, Initializer
from jax.nn import initializers

from jaxnorm.arguments import validation
from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.arguments.options import Param
from jaxnorm.linen.cells import Cell, LayerNormGRUCell, LayerNormLSTMCell, LayerNormSimpleCell
from jaxnorm.recurrent.layers import direction_names, list_carries, module_call, run_layers
from jaxnorm.recurrent.options import CallOptions, Carry, CarryLike
from jaxnorm.recurrent.parameters import LECUN, ORTHOGONAL

__all__ = ["GRU", "LSTM", "SimpleRNN"]


class _CallOptions(CallOptions, total=False):
    """Keyword arguments of the call of a layer."""

    init_key: jax.Array | None


class _Layer(nn.Module):
    """The common base of the layers."""

    features: int
    norm: str | None = "layer"
    placement: str = "ba2016"
    epsilon: float = 1e-6
    num_layers: int = 1
    bidirectional: bool = False
    dropout: float = 0.0
    zoneout: float | tuple[float, float] = 0.0
    time_major: bool = False
    return_carry: bool = False
    reverse: bool = False
    keep_order: bool = False
    deterministic: bool | None = None
    scale: float | None = None
    kernel_init: Initializer = LECUN
    recurrent_kernel_init: Initializer = ORTHOGONAL
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    carry_init: Initializer = initializers.zeros
    implementation: str | None = None

    cell: ClassVar[type[Cell]]
    # Each of these is a field of one layer alone.
    reset_after: ClassVar[bool] = True
    activation: ClassVar[str] = "tanh"

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
    @nn.compact
    def __call__(
        self,
        inputs: jax.Array,
        *,
        initial_carry: CarryLike | None = None,
        init_key: jax.Array | None = None,
        seq_lengths: Param = None,
        mask: Param = None,
        segments: Param = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array | tuple[Carry, jax.Array]:
        """Run sequences ``(*batch, time, features)``.

        Args:
          inputs: the sequences; time is axis 0 with ``time_major``.
          initial_carry: the carry before the first step, of any width, as in Flax: (c, h) for an
            LSTM, h otherwise. Several layers take a tuple of carries, one for each layer. Two
            directions take a pair of carries in each layer.
          init_key: random key for ``carry_init``.
          seq_lengths: integers ``(*batch)``: the number of steps of each sequence. Later steps are
            not taken; their outputs are 0.
          mask: boolean ``(*batch, time)``; steps where it is False are not taken.
          segments: integers ``(*batch, time)`` of sequences packed one after the other; each
            starts anew.
          return_carry: whether to return ``(carry, outputs)``. It overrides the attribute, as do
            ``time_major``, ``reverse`` and ``keep_order``.
          time_major: whether time is axis 0.
          reverse: whether to run from the last step to the first.
          keep_order: whether reversed outputs are returned in the order of the inputs.
          deterministic: True switches dropout off and replaces zoneout by its expected value.
            Otherwise both need an rng named ``dropout``. Give it here or to the constructor, not to
            both.

        Returns:
          The outputs ``(*batch, time, features)``, or ``(carry, outputs)``.
        """
        cells = [
            [self._make_cell(name) for name in directions]
            for directions in direction_names(self.num_layers, self.bidirectional)
        ]
        carries = list_carries(self.kind, initial_carry, self.num_layers, self.bidirectional)
        # The outputs of a layer are the inputs of the next: their width is known one by
        # one.
        width, layers = inputs.shape[-1], []
        for i, directions in enumerate(cells):
            layers.append(
                [
                    cell.parameters(width, None if carries is None else carries[i][d])
                    for d, cell in enumerate(directions)
                ]
            )
            # Recurrent weights have a row for each feature of h, which may be
            # projected.
            width = sum(len(params["recurrent_kernel"]) for params in layers[-1])
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
        random = self._is_random(deterministic)
        # run_layers starts from zeros by itself.
        if carries is None and self.carry_init is not initializers.zeros:
            carries = self._initial_carries(cells, inputs, call.time_major, init_key)
        dropout = nn.Dropout(
            validation.number("dropout", self.dropout, 1), deterministic=not random
        )
        make_key = partial(self.make_rng, "dropout") if random else None
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

    @property
    def kind(self) -> str:
        return self.cell.kind

    def _make_cell(self, name: str) -> Cell:
        """Return a cell with the fields that it shares with the layer."""
        names = {field.name for field in fields(self.cell)} - {"features", "parent", "name"}
        return self.cell(
            self.features, name=name, **{field: getattr(self, field) for field in names}
        )

    def _is_random(self, deterministic: bool | None) -> bool:
        """Return whether the call draws random numbers."""
        # Without dropout and zoneout, deterministic may be left out altogether.
        if not self.dropout and not any(
            self.zoneout if isinstance(self.zoneout, tuple) else (self.zoneout,)
        ):
            return False
        return not nn.merge_param("deterministic", self.deterministic, deterministic)

    def _initial_carries(
        self, cells: list[list[Cell]], inputs: jax.Array, time_major: bool, key: jax.Array | None
    ) -> list[list[Carry]]:
        """Return the initial carries by ``carry_init``, with a key of its own for each cell."""
        shape = inputs.shape[1:] if time_major else (*inputs.shape[:-2], inputs.shape[-1])
        keys = iter(
            jax.random.split(jax.random.key(0) if key is None else key, sum(map(len, cells)))
        )
        return [
            [cell.initialize_carry(next(keys), shape) for cell in directions]
            for directions in cells
        ]


class LSTM(_Layer):
    """Layer-normalized LSTM layers over whole sequences.

    See :func:`jaxnorm.recurrent.lstm` for the equations. The parameters match
    ``RNN(LayerNormLSTMCell)``. With ``norm=None`` the module equals Flax's
    ``RNN(OptimizedLSTMCell)``, parameters and dtypes included.

    Attributes:
      features: number of features H of the state.
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
      time_major: whether time is axis 0 of inputs, masks, ids and outputs; False by default.
      return_carry: whether to return ``(carry, outputs)``; False by default.
      reverse: whether to run from the last step to the first; False by default.
      keep_order: whether reversed outputs are returned in the order of the inputs; False by
        default.
      deterministic: True switches dropout off and replaces zoneout by its expected value. With
        None, the default, the call must decide if one of them is in use.
      scale: the value at which all gains start; 1 by default.
      kernel_init: initializer of the input weights; LeCun's normal one by default.
      recurrent_kernel_init: initializer of the recurrent weights; orthogonal by default.
      dtype: dtype of the output; by default the dtype to which inputs and parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      carry_init: initializer of the carry; zeros by default.
      implementation: None (default) selects automatically; see
        :class:`jaxnorm.recurrent.NetworkOptions`.
      forget_bias: the value at which the bias of the forget gate starts; by default 1, and without
        a norm 0, as in Flax.
      projection: number of features to which h is projected; None, the default, projects nothing.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> x = jnp.ones((2, 5, 3))
    >>> variables = nn.LSTM(4).init(jax.random.key(0), x)
    >>> (c, h), y = nn.LSTM(4, return_carry=True).apply(variables, x, seq_lengths=jnp.array([3, 5]))
    >>> y.shape, bool((h[0] == y[0, 2]).all())
    ((2, 5, 4), True)
    """

    forget_bias: float | None = None
    projection: int | None = None

    cell = LayerNormLSTMCell


class GRU(_Layer):
    """Layer-normalized GRU layers over whole sequences.

    See :func:`jaxnorm.recurrent.gru` for the equations. The parameters match
    ``RNN(LayerNormGRUCell)``. With ``norm=None`` the module equals Flax's ``RNN(GRUCell)``,
    parameters and dtypes included.

    Attributes:
      features: number of features H of the state.
      norm: ``"layer"`` (default), ``"rms"``, or None for no norm.
      placement: position of the norm: ``"ba2016"`` (default), ``"sum"`` or ``"gate"``.
      epsilon: added to the variance, inside the root; 1e-6 by default.
      num_layers: number of stacked layers; 1 by default.
      bidirectional: whether each layer also runs backwards and concatenates the outputs of both
        directions; False by default.
      dropout: dropout rate between the layers; 0 by default.
      zoneout: rate at which units keep their old value (Krueger et al. 2016, arXiv 1606.01305); 0
        by default.
      time_major: whether time is axis 0 of inputs, masks, ids and outputs; False by default.
      return_carry: whether to return ``(carry, outputs)``; False by default.
      reverse: whether to run from the last step to the first; False by default.
      keep_order: whether reversed outputs are returned in the order of the inputs; False by
        default.
      deterministic: True switches dropout off and replaces zoneout by its expected value. With
        None, the default, the call must decide if one of them is in use.
      scale: the value at which all gains start; 1 by default.
      kernel_init: initializer of the input weights; LeCun's normal one by default.
      recurrent_kernel_init: initializer of the recurrent weights; orthogonal by default.
      dtype: dtype of the output; by default the dtype to which inputs and parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      carry_init: initializer of the carry; zeros by default.
      implementation: None (default) selects automatically; see
        :class:`jaxnorm.recurrent.NetworkOptions`.
      reset_after: whether the reset gate comes after the product with the recurrent weights; True
        by default. False puts it before, as in Keras with this argument, and as in Haiku.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> model = nn.GRU(4, bidirectional=True)
    >>> model.init_with_output(jax.random.key(0), jnp.ones((2, 5, 3)))[0].shape
    (2, 5, 8)
    """

    reset_after: bool = True  # type: ignore[misc]

    cell = LayerNormGRUCell


class SimpleRNN(_Layer):
    """Layer-normalized simple recurrent layers over whole sequences.

    See :func:`jaxnorm.recurrent.rnn` for the equations. The parameters match
    ``RNN(LayerNormSimpleCell)``. With ``norm=None`` the module equals Flax's ``RNN(SimpleCell)``,
    parameters and dtypes included.

    Attributes:
      features: number of features H of the state.
      norm: ``"layer"`` (default), ``"rms"``, or None for no norm.
      placement: position of the norm: ``"ba2016"`` (default) or ``"sum"``.
      epsilon: added to the variance, inside the root; 1e-6 by default.
      num_layers: number of stacked layers; 1 by default.
      bidirectional: whether each layer also runs backwards and concatenates the outputs of both
        directions; False by default.
      dropout: dropout rate between the layers; 0 by default.
      zoneout: rate at which units keep their old value (Krueger et al. 2016, arXiv 1606.01305); 0
        by default.
      time_major: whether time is axis 0 of inputs, masks, ids and outputs; False by default.
      return_carry: whether to return ``(carry, outputs)``; False by default.
      reverse: whether to run from the last step to the first; False by default.
      keep_order: whether reversed outputs are returned in the order of the inputs; False by
        default.
      deterministic: True switches dropout off and replaces zoneout by its expected value. With
        None, the default, the call must decide if one of them is in use.
      scale: the value at which all gains start; 1 by default.
      kernel_init: initializer of the input weights; LeCun's normal one by default.
      recurrent_kernel_init: initializer of the recurrent weights; orthogonal by default.
      dtype: dtype of the output; by default the dtype to which inputs and parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      carry_init: initializer of the carry; zeros by default.
      implementation: None (default) selects automatically; see
        :class:`jaxnorm.recurrent.NetworkOptions`.
      activation: ``"tanh"`` (default) or ``"relu"``.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> model = nn.SimpleRNN(4, num_layers=2)
    >>> model.init_with_output(jax.random.key(0), jnp.ones((2, 5, 3)))[0].shape
    (2, 5, 4)
    """

    activation: str = "tanh"  # type: ignore[misc]

    cell = LayerNormSimpleCell
