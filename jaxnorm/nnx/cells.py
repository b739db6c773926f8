"""Recurrent cells for Flax's RNN."""

from typing import Any, ClassVar, Generic, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.recurrent import RNNCellBase
from flax.typing import Dtype, Initializer
from jax.nn import initializers

from jaxnorm.recurrent.layers import module_cell, module_initializers, run_cell
from jaxnorm.recurrent.options import Pair, S
from jaxnorm.recurrent.parameters import LECUN, ORTHOGONAL, leaf_shapes

__all__ = ["LayerNormGRUCell", "LayerNormLSTMCell", "LayerNormSimpleCell"]

Random: TypeAlias = nnx.Rngs | nnx.RngStream | None


class Cell(RNNCellBase, Generic[S]):
    """The common base of the cells: parameters, one step and the carry."""

    kind: ClassVar[str]
    # Only with norm=None. The names are those of Flax's cells, so that checkpoints fit.
    dense_i: nnx.Linear
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
        reset_after: bool = True,
        activation: str = "tanh",
        kernel_init: Initializer = LECUN,
        recurrent_kernel_init: Initializer = ORTHOGONAL,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        # The parameter is named projection, so the attribute for its size has another
        # name.
        self.in_features, self.hidden_features, self.out_features = (
            in_features,
            hidden_features,
            projection or hidden_features,
        )
        self.norm, self.placement, self.epsilon = norm, placement, epsilon
        self.reset_after, self.activation = reset_after, activation
        self.dtype, self.param_dtype = dtype, param_dtype
        cell = module_cell(self)
        start = module_initializers(
            self.kind, norm, scale, forget_bias, kernel_init, recurrent_kernel_init
        )
        shapes = leaf_shapes(cell, in_features, hidden_features, projection)
        if norm is None:
            linears = [
                ("dense_i", shapes["input_kernel"], kernel_init, self.kind != "lstm"),
                ("dense_h", shapes["recurrent_kernel"], recurrent_kernel_init, self.kind == "lstm"),
            ]
            # Flax's cells draw in this order and draw each kernel as a whole. Doing
            # likewise gives the same parameters for the same rngs.
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
        """Return the parameters in the form that :mod:`jaxnorm.recurrent` takes."""
        params = {name: getattr(self, name)[...] for name in self.leaves}
        # Flax's LSTM has its bias in the recurrent layer, the other cells in the input
        # layer.
        if self.norm is None:
            bias: Any = (self.dense_h if self.kind == "lstm" else self.dense_i).bias
            matrices = {
                "input_kernel": self.dense_i.kernel[...],
                "recurrent_kernel": self.dense_h.kernel[...],
            }
            params |= {**matrices, "bias": bias[...]}
        return params

    def __call__(self, carry: S, inputs: jax.Array) -> tuple[S, jax.Array]:
        """Run one step.

        Args:
          carry: the state before the step: ``(c, h)`` for an LSTM, h otherwise.
          inputs: the inputs ``(*batch, in_features)`` of the step.

        Returns:
          ``(carry, outputs)`` after the step.
        """
        params = self.parameters()
        return run_cell(self, params, carry, inputs)

    def initialize_carry(
        self,
        input_shape: tuple[int, ...],
        rngs: Random = None,
        carry_init: Initializer | None = None,
    ) -> S:
        """Return the initial carry for inputs of ``input_shape``: (c, h), or h alone.

        Args:
          input_shape: shape ``(*batch, in_features)`` of the inputs of one step.
          rngs: random numbers for ``carry_init``: the stream ``carry`` of an ``nnx.Rngs``, or a
            stream.
          carry_init: initializer of the carry; zeros by default.

        Returns:
          The carry, in ``param_dtype``.
        """
        make = initializers.zeros if carry_init is None else carry_init
        stream = rngs.carry if isinstance(rngs, nnx.Rngs) else rngs
        # The default carry, zeros, draws nothing, so rngs may be left out.
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
        """Return the number of feature axes of the inputs, which Flax's RNN asks for."""
        return 1


class LayerNormLSTMCell(Cell[Pair]):
    """A layer-normalized LSTM cell for :class:`flax.nnx.RNN`.

    See :func:`jaxnorm.recurrent.lstm` for the equations. The carry is (c, h), as in Flax. With
    ``norm=None`` the cell equals :class:`flax.nnx.OptimizedLSTMCell`, parameters included.

    Args:
      in_features: number of features of the inputs.
      hidden_features: number of features H of the state.
      norm: ``"layer"`` (default), ``"rms"``, or None for no norm.
      placement: position of the norm: ``"ba2016"`` (default), ``"sum"``, ``"gate"`` or
        ``"carried_cell"``.
      epsilon: added to the variance, inside the root; 1e-6 by default.
      scale: the value at which all gains start; 1 by default.
      forget_bias: the value at which the bias of the forget gate starts; by default 1, and without
        a norm 0, as in Flax.
      projection: number of features to which h is projected; None, the default, projects nothing.
      reset_after: must be True: only a GRU has a reset gate.
      activation: must be ``"tanh"``: only a simple RNN has others.
      kernel_init: initializer of the input weights; LeCun's normal one by default.
      recurrent_kernel_init: initializer of the recurrent weights; orthogonal by default.
      dtype: dtype of the output; by default the dtype to which inputs and parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      rngs: random number generators for the initializers.

    >>> import jax.numpy as jnp
    >>> import flax.nnx, jaxnorm.nnx
    >>> layer = flax.nnx.RNN(jaxnorm.nnx.LayerNormLSTMCell(3, 4, rngs=flax.nnx.Rngs(0)))
    >>> layer(jnp.ones((2, 5, 3))).shape
    (2, 5, 4)
    """

    kind = "lstm"


class LayerNormGRUCell(Cell[jax.Array]):
    """A layer-normalized GRU cell for :class:`flax.nnx.RNN`.

    See :func:`jaxnorm.recurrent.gru` for the equations. With ``norm=None`` the cell equals
    :class:`flax.nnx.GRUCell`, parameters included.

    Args:
      in_features: number of features of the inputs.
      hidden_features: number of features H of the state.
      norm: ``"layer"`` (default), ``"rms"``, or None for no norm.
      placement: position of the norm: ``"ba2016"`` (default), ``"sum"`` or ``"gate"``.
      epsilon: added to the variance, inside the root; 1e-6 by default.
      scale: the value at which all gains start; 1 by default.
      forget_bias: must be None: only an LSTM has a forget gate.
      projection: must be None: only an LSTM has a projection.
      reset_after: whether the reset gate comes after the product with the recurrent weights; True
        by default. False puts it before, as in Keras with this argument, and as in Haiku.
      activation: must be ``"tanh"``: only a simple RNN has others.
      kernel_init: initializer of the input weights; LeCun's normal one by default.
      recurrent_kernel_init: initializer of the recurrent weights; orthogonal by default.
      dtype: dtype of the output; by default the dtype to which inputs and parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      rngs: random number generators for the initializers.

    >>> import jax.numpy as jnp
    >>> import flax.nnx, jaxnorm.nnx
    >>> layer = flax.nnx.RNN(jaxnorm.nnx.LayerNormGRUCell(3, 4, rngs=flax.nnx.Rngs(0)))
    >>> layer(jnp.ones((2, 5, 3))).shape
    (2, 5, 4)
    """

    kind = "gru"


class LayerNormSimpleCell(Cell[jax.Array]):
    """A layer-normalized simple cell for :class:`flax.nnx.RNN`.

    See :func:`jaxnorm.recurrent.rnn` for the equations. With ``norm=None`` the cell equals
    :class:`flax.nnx.SimpleCell`, parameters included, and with ``activation="relu"`` as well its
    ``activation_fn=jax.nn.relu``.

    Args:
      in_features: number of features of the inputs.
      hidden_features: number of features H of the state.
      norm: ``"layer"`` (default), ``"rms"``, or None for no norm.
      placement: position of the norm: ``"ba2016"`` (default) or ``"sum"``.
      epsilon: added to the variance, inside the root; 1e-6 by default.
      scale: the value at which all gains start; 1 by default.
      forget_bias: must be None: only an LSTM has a forget gate.
      projection: must be None: only an LSTM has a projection.
      reset_after: must be True: only a GRU has a reset gate.
      activation: ``"tanh"`` (default) or ``"relu"``.
      kernel_init: initializer of the input weights; LeCun's normal one by default.
      recurrent_kernel_init: initializer of the recurrent weights; orthogonal by default.
      dtype: dtype of the output; by default the dtype to which inputs and parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      rngs: random number generators for the initializers.

    >>> import jax.numpy as jnp
    >>> import flax.nnx, jaxnorm.nnx
    >>> layer = flax.nnx.RNN(jaxnorm.nnx.LayerNormSimpleCell(3, 4, rngs=flax.nnx.Rngs(0)))
    >>> layer(jnp.ones((2, 5, 3))).shape
    (2, 5, 4)
    """

    kind = "rnn"
