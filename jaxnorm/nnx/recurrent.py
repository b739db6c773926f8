"""Recurrent cells for Flax's RNN, and layers that run whole sequences at once."""

from functools import partial
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.recurrent import RNNCellBase, flip_sequences
from flax.typing import Dtype, Initializer
from jax.nn import initializers

from jaxnorm.arguments import validation
from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.arguments.options import Param
from jaxnorm.recurrent.layers import (
    direction_names,
    listed,
    module_call,
    module_cell,
    module_start,
    run_cell,
    run_layers,
)
from jaxnorm.recurrent.options import CallOptions, Carry, CarryLike, Pair, S
from jaxnorm.recurrent.parameters import LECUN, ORTHOGONAL, leaf_shapes

Random: TypeAlias = nnx.Rngs | nnx.RngStream | None


class _Cell(RNNCellBase, Generic[S]):
    """What the cells share: parameters, one step, the carry."""

    kind: ClassVar[str]
    dense_i: nnx.Linear  # with norm=None, those of Flax's cell
    dense_h: nnx.Linear

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        norm: str | None = "layer",
        placement: str = "ba2016",
        epsilon: float = 1e-6,
        scale: float | None = None,
        forget_bias: float | None = None,
        projection: int | None = None,
        kernel_init: Initializer = LECUN,
        recurrent_kernel_init: Initializer = ORTHOGONAL,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.in_features, self.hidden_features, self.out_features = (
            in_features,
            hidden_features,
            projection or hidden_features,
        )
        self.norm, self.placement, self.epsilon = norm, placement, epsilon
        self.dtype, self.param_dtype = dtype, param_dtype
        cell = module_cell(self.kind, norm, placement, epsilon)
        start = module_start(
            self.kind, norm, scale, forget_bias, kernel_init, recurrent_kernel_init
        )
        shapes = leaf_shapes(cell, in_features, hidden_features, projection)
        if norm is None:
            linears = [
                ("dense_i", shapes["input_kernel"], kernel_init, self.kind != "lstm"),
                ("dense_h", shapes["recurrent_kernel"], recurrent_kernel_init, self.kind == "lstm"),
            ]
            # In Flax's order, and every kernel drawn whole: the same numbers as there.
            for name, shape, draw, use_bias in linears[:: -1 if self.kind == "rnn" else 1]:
                options: dict[str, Any] = {
                    "kernel_init": draw,
                    "bias_init": start.leaf(cell, "bias"),
                    "param_dtype": param_dtype,
                }
                setattr(self, name, nnx.Linear(*shape, use_bias=use_bias, rngs=rngs, **options))
            self.leaves = tuple(name for name in shapes if name == "projection")
        else:
            self.leaves = tuple(start.names(cell, shapes))
        for name in self.leaves:
            setattr(
                self,
                name,
                nnx.Param(start.leaf(cell, name)(rngs.params(), shapes[name], param_dtype)),
            )

    def parameters(self) -> dict[str, jax.Array]:
        """The parameters as :mod:`jaxnorm.recurrent` takes them."""
        params = {name: getattr(self, name)[...] for name in self.leaves}
        if self.norm is None:
            bias: Any = (self.dense_h if self.kind == "lstm" else self.dense_i).bias
            kernels = {
                "input_kernel": self.dense_i.kernel[...],
                "recurrent_kernel": self.dense_h.kernel[...],
            }
            params |= {**kernels, "bias": bias[...]}
        return params

    def __call__(self, carry: S, inputs: jax.Array) -> tuple[S, jax.Array]:
        """One step: ``(carry, inputs)`` to ``(carry, outputs)``."""
        params = self.parameters()
        return run_cell(
            self.kind, params, carry, inputs, self.dtype, self.norm, self.placement, self.epsilon
        )

    def initialize_carry(
        self,
        input_shape: tuple[int, ...],
        rngs: Random = None,
        carry_init: Initializer | None = None,
    ) -> S:
        """The carry for inputs of that shape: (c, h), or h alone; zeros, or drawn with
        ``carry_init`` from ``rngs``.
        """
        make = initializers.zeros if carry_init is None else carry_init
        stream = rngs.carry if isinstance(rngs, nnx.Rngs) else rngs
        key = (lambda: jax.random.key(0)) if stream is None else stream
        h = make(key(), (*input_shape[:-1], self.out_features), self.param_dtype)
        carry: Any = (
            h
            if self.kind != "lstm"
            else (make(key(), (*input_shape[:-1], self.hidden_features), self.param_dtype), h)
        )
        return carry

    @property
    def num_feature_axes(self) -> int:
        return 1


class LayerNormLSTMCell(_Cell[Pair]):
    """A layer-normalized LSTM cell for :class:`flax.nnx.RNN`; :func:`jaxnorm.recurrent.lstm` has
    the equations.

    The carry is (c, h), as in Flax. With ``norm=None`` it is :class:`flax.nnx.OptimizedLSTMCell`
    with its parameters. ``forget_bias`` starts at 1, without a norm at 0, as in Flax.

    >>> import jax.numpy as jnp
    >>> import flax.nnx, jaxnorm.nnx
    >>> layer = flax.nnx.RNN(jaxnorm.nnx.LayerNormLSTMCell(3, 4, rngs=flax.nnx.Rngs(0)))
    >>> layer(jnp.ones((2, 5, 3))).shape
    (2, 5, 4)
    """

    kind = "lstm"


class LayerNormGRUCell(_Cell[jax.Array]):
    """A layer-normalized GRU cell for :class:`flax.nnx.RNN`; :func:`jaxnorm.recurrent.gru` has the
    equations.

    With ``norm=None`` it is :class:`flax.nnx.GRUCell` with its parameters.

    >>> import jax.numpy as jnp
    >>> import flax.nnx, jaxnorm.nnx
    >>> layer = flax.nnx.RNN(jaxnorm.nnx.LayerNormGRUCell(3, 4, rngs=flax.nnx.Rngs(0)))
    >>> layer(jnp.ones((2, 5, 3))).shape
    (2, 5, 4)
    """

    kind = "gru"


class LayerNormSimpleCell(_Cell[jax.Array]):
    """A layer-normalized simple cell for :class:`flax.nnx.RNN`; :func:`jaxnorm.recurrent.rnn` has
    the equations.

    With ``norm=None`` it is :class:`flax.nnx.SimpleCell` with its parameters.

    >>> import jax.numpy as jnp
    >>> import flax.nnx, jaxnorm.nnx
    >>> layer = flax.nnx.RNN(jaxnorm.nnx.LayerNormSimpleCell(3, 4, rngs=flax.nnx.Rngs(0)))
    >>> layer(jnp.ones((2, 5, 3))).shape
    (2, 5, 4)
    """

    kind = "rnn"


class _CellOptions(TypedDict, total=False):
    scale: float | None
    forget_bias: float | None
    kernel_init: Initializer
    recurrent_kernel_init: Initializer


class _CallOptions(CallOptions, total=False):
    rngs: Random


class _Layer(nnx.Module):
    """What the layers share."""

    cell_type: ClassVar[type[_Cell]]

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
        own: dict[str, Any] = {
            "norm": norm,
            "placement": placement,
            "epsilon": epsilon,
            "dtype": dtype,
            "param_dtype": param_dtype,
        }
        width, options = in_features, {**cell, **own, "projection": projection}
        for directions in direction_names(num_layers, bidirectional):
            for name in directions:
                setattr(self, name, self.cell_type(width, hidden_features, rngs=rngs, **options))
            width = len(directions) * (projection or hidden_features)
        # After the parameters, which so start as Flax's where one stream serves all; and no stream
        # where nothing is random.
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
        segment_ids: Param = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        deterministic: bool | None = None,
        rngs: Random = None,
    ) -> jax.Array | tuple[Carry, jax.Array]:
        """Runs the sequences ``(*batch, time, features)``.

        Args:
          inputs: the sequences; time is axis 0 with ``time_major``.
          initial_carry: the carry to start from, zeros by default: (c, h) or h; with several layers
            a tuple of those, with two directions a pair of them each.
          seq_lengths: integers ``(*batch)``; steps from there on are not taken, their outputs are
            0.
          mask: boolean ``(*batch, time)``; steps where it is False are not taken.
          segment_ids: integers ``(*batch, time)`` of sequences packed one after the other.
          return_carry: whether to return ``(carry, outputs)``.
          time_major: this and the following override the attributes.
          reverse: from the last step to the first.
          keep_order: return reversed outputs in the order of the inputs.
          deterministic: no dropout, and the expected value of zoneout; ``.eval()`` sets it.
          rngs: random numbers of dropout and zoneout, in place of the module's.

        Returns:
          The outputs, ``(*batch, time, features)``, or ``(carry, outputs)``.
        """
        deterministic = self.deterministic if deterministic is None else deterministic
        cells = [
            [getattr(self, name) for name in names]
            for names in direction_names(self.num_layers, self.bidirectional)
        ]
        layers = [[cell.parameters() for cell in directions] for directions in cells]
        carries = listed(self.kind, initial_carry, self.num_layers, self.bidirectional)
        stream = self.rngs if rngs is None else rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs
        dropout = partial(self.between, deterministic=deterministic, rngs=rngs)
        make_key = None if deterministic or stream is None else stream
        call = module_call(
            self,
            seq_lengths,
            mask,
            segment_ids,
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
        """Used by ``nnx.view``: whether nothing is random."""
        if deterministic is not None:
            self.deterministic = deterministic


class LSTM(_Layer):
    """Layer-normalized LSTM layers over whole sequences, the parameters those of
    ``RNN(LayerNormLSTMCell)``.

    :func:`jaxnorm.recurrent.lstm` has the equations. With ``norm=None`` it equals Flax's
    ``RNN(OptimizedLSTMCell)``, parameters and dtypes included. ``num_layers`` layers are stacked,
    with ``dropout`` between them; ``bidirectional`` ones concatenate the outputs of both
    directions; ``projection`` is the number of features that h is projected to. Further arguments
    are those of the cell: ``scale``, ``forget_bias`` (1; without a norm Flax's 0), ``kernel_init``,
    ``recurrent_kernel_init``.

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
    """Layer-normalized GRU layers over whole sequences, the parameters those of
    ``RNN(LayerNormGRUCell)``.

    :func:`jaxnorm.recurrent.gru` has the equations. With ``norm=None`` it equals Flax's
    ``RNN(GRUCell)``, parameters and dtypes included.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> nnx.GRU(3, 4, bidirectional=True, rngs=Rngs(0))(jnp.ones((2, 5, 3))).shape
    (2, 5, 8)
    """

    cell_type = LayerNormGRUCell


class SimpleRNN(_Layer):
    """Layer-normalized simple recurrent layers over whole sequences, the parameters those of
    ``RNN(LayerNormSimpleCell)``.

    :func:`jaxnorm.recurrent.rnn` has the equations. With ``norm=None`` it equals Flax's
    ``RNN(SimpleCell)``, parameters and dtypes included.

    >>> import jax.numpy as jnp
    >>> from flax.nnx import Rngs
    >>> from jaxnorm import nnx
    >>> nnx.SimpleRNN(3, 4, num_layers=2, rngs=Rngs(0))(jnp.ones((2, 5, 3))).shape
    (2, 5, 4)
    """

    cell_type = LayerNormSimpleCell
