"""Recurrent cells for Flax's RNN."""

from functools import partial
from typing import Any, ClassVar, Generic

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.recurrent import DenseParams
from flax.typing import Dtype, Initializer
from jax.nn import initializers

from jaxnorm.recurrent.layers import module_cell, module_initializers, run_cell
from jaxnorm.recurrent.options import Pair, S
from jaxnorm.recurrent.parameters import LECUN, ORTHOGONAL, Initializers, leaf_shapes

__all__ = ["LayerNormGRUCell", "LayerNormLSTMCell", "LayerNormSimpleCell"]


class Cell(nn.RNNCellBase, Generic[S]):
    """The common base of the cells: parameters, one step and the carry."""

    features: int
    norm: str | None = "layer"
    placement: str = "ba2016"
    epsilon: float = 1e-6
    scale: float | None = None
    kernel_init: Initializer = LECUN
    recurrent_kernel_init: Initializer = ORTHOGONAL
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    carry_init: Initializer = initializers.zeros

    kind: ClassVar[str]
    # Each of these is a field of one cell alone. The other cells read the constants.
    forget_bias: ClassVar[float | None] = None
    projection: ClassVar[int | None] = None
    reset_after: ClassVar[bool] = True
    activation: ClassVar[str] = "tanh"

    def __call__(self, carry: S, inputs: jax.Array) -> tuple[S, jax.Array]:
        """Run one step.

        Args:
          carry: the state before the step: ``(c, h)`` for an LSTM, h otherwise.
          inputs: the inputs ``(*batch, in_features)`` of the step.

        Returns:
          ``(carry, outputs)`` after the step.
        """
        params = self.parameters(inputs.shape[-1], carry)
        return run_cell(self, params, carry, inputs)

    @nn.compact
    def parameters(self, in_features: int, carry: Any = None) -> dict[str, jax.Array]:
        """Return the parameters in the form that :mod:`jaxnorm.recurrent` takes.

        A ``carry`` determines the number of features.
        """
        cell = module_cell(self)
        start = module_initializers(
            self.kind,
            self.norm,
            self.scale,
            self.forget_bias,
            self.kernel_init,
            self.recurrent_kernel_init,
        )
        shapes = leaf_shapes(cell, in_features, self._width(carry), self.projection)
        if self.norm is not None:
            return {
                name: self.param(name, start.leaf(cell, name), shapes[name], self.param_dtype)
                for name in start.names(cell, shapes)
            }
        # Without a norm the parameters have Flax's names and shapes, so that
        # checkpoints fit.
        params = self._flax_parameters(start, in_features, shapes)
        if self.projection is not None:
            params["projection"] = self.param(
                "projection", self.kernel_init, shapes["projection"], self.param_dtype
            )
        return params

    @nn.nowrap
    def _width(self, carry: Any) -> int:
        """Return the number of features of the state.

        As in Flax's cells, a given h determines it, except with a projection: h then has other
        features than c.
        """
        h = carry[-1] if isinstance(carry, tuple | list) else carry
        return (
            self.features
            if self.projection is not None or h is None or jnp.ndim(h) == 0
            else jnp.shape(h)[-1]
        )

    def _flax_parameters(
        self, start: Initializers, in_features: int, shapes: dict[str, tuple[int, ...]]
    ) -> dict[str, jax.Array]:
        """Return the parameters of Flax's cell, for ``norm=None``, with the gates concatenated.

        ``shapes`` are those of the parameters of the function.
        """
        (rows, packed), inner_bias = shapes["recurrent_kernel"], "recurrent_bias" in shapes
        # Flax's cells have a Dense layer for each gate and direction: ii and hi for
        # gate i.
        gates = FLAX_GATES[self.kind]
        dense = partial(self._dense, packed // len(gates))
        input_parts = [
            dense(f"i{gate}", in_features, self.kernel_init, self.kind != "lstm", 0.0)
            for gate in gates
        ]
        starts = dict.fromkeys(gates, 0.0) | {"f": start.forget_bias}
        # Flax's LSTM has its biases in the recurrent layers, the other cells in the
        # input layers. The GRU has one more, within the product with the reset gate.
        biased = gates if self.kind == "lstm" else ("n",) if inner_bias else ()
        recurrent_parts = [
            dense(f"h{gate}", rows, self.recurrent_kernel_init, gate in biased, starts[gate])
            for gate in gates
        ]
        matrices = {"input_kernel": input_parts, "recurrent_kernel": recurrent_parts}
        params = {
            name: jnp.concatenate([kernel for kernel, _ in parts], -1)
            for name, parts in matrices.items()
        }
        params["bias"] = jnp.concatenate(
            [bias for _, bias in (recurrent_parts if self.kind == "lstm" else input_parts)]
        )
        return params | ({"recurrent_bias": recurrent_parts[2][1]} if inner_bias else {})

    def _dense(
        self,
        features: int,
        name: str,
        rows: int,
        kernel_init: Initializer,
        use_bias: bool,
        bias: float,
    ) -> tuple[jax.Array, Any]:
        """Return the kernel and the bias, or None, of one of Flax's Dense layers."""
        options: dict[str, Any] = {
            "kernel_init": kernel_init,
            "bias_init": initializers.constant(bias),
            "name": name,
        }
        module = DenseParams(features, use_bias=use_bias, param_dtype=self.param_dtype, **options)
        # DenseParams creates the parameters of a Dense layer. It asks x for its shape
        # alone.
        return module(jax.ShapeDtypeStruct((rows,), self.param_dtype))

    @nn.nowrap
    def initialize_carry(self, rng: jax.Array, input_shape: tuple[int, ...]) -> S:
        """Return the initial carry for inputs of ``input_shape``: (c, h), or h alone.

        Args:
          rng: random key for ``carry_init``.
          input_shape: shape ``(*batch, in_features)`` of the inputs of one step.

        Returns:
          The carry, in ``param_dtype``.
        """
        carry: Any
        if self.kind != "lstm":
            carry = self.carry_init(rng, (*input_shape[:-1], self.features), self.param_dtype)
            return carry
        # A projection changes the number of features of h, not of c.
        widths = (self.features, self.projection or self.features)
        keys = jax.random.split(rng)
        carry = tuple(
            self.carry_init(key, (*input_shape[:-1], width), self.param_dtype)
            for key, width in zip(keys, widths, strict=True)
        )
        return carry

    @property
    def num_feature_axes(self) -> int:
        """Return the number of feature axes of the inputs, which Flax's RNN asks for."""
        return 1


# The gates in the order in which their weights are concatenated, as Flax's layers name
# them.
FLAX_GATES: dict[str, tuple[str, ...]] = {
    "lstm": ("i", "f", "g", "o"),
    "gru": ("r", "z", "n"),
    "rnn": ("",),
}


class LayerNormLSTMCell(Cell[Pair]):
    """A layer-normalized LSTM cell for :class:`flax.linen.RNN`.

    See :func:`jaxnorm.recurrent.lstm` for the equations. The carry is (c, h), as in Flax. A given
    carry determines the number of features. With ``norm=None`` the cell equals
    :class:`flax.linen.OptimizedLSTMCell`, parameters included.

    Attributes:
      features: number of features H of the state.
      norm: ``"layer"`` (default), ``"rms"``, or None for no norm.
      placement: position of the norm: ``"ba2016"`` (default), ``"sum"``, ``"gate"`` or
        ``"carried_cell"``.
      epsilon: added to the variance, inside the root; 1e-6 by default.
      scale: the value at which all gains start; 1 by default.
      kernel_init: initializer of the input weights; LeCun's normal one by default.
      recurrent_kernel_init: initializer of the recurrent weights; orthogonal by default.
      dtype: dtype of the output; by default the dtype to which inputs and parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      carry_init: initializer of the carry; zeros by default.
      forget_bias: the value at which the bias of the forget gate starts; by default 1, and without
        a norm 0, as in Flax.
      projection: number of features to which h is projected; None, the default, projects nothing.

    >>> import jax, jax.numpy as jnp
    >>> import flax.linen, jaxnorm.linen
    >>> layer = flax.linen.RNN(jaxnorm.linen.LayerNormLSTMCell(4))
    >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 3)))[0].shape
    (2, 5, 4)
    """

    kind = "lstm"
    forget_bias: float | None = None  # type: ignore[misc]
    projection: int | None = None  # type: ignore[misc]


class LayerNormGRUCell(Cell[jax.Array]):
    """A layer-normalized GRU cell for :class:`flax.linen.RNN`.

    See :func:`jaxnorm.recurrent.gru` for the equations. With ``norm=None`` the cell equals
    :class:`flax.linen.GRUCell`, parameters included. ``reset_after=False`` leaves out the
    bias of ``hn``.

    Attributes:
      features: number of features H of the state.
      norm: ``"layer"`` (default), ``"rms"``, or None for no norm.
      placement: position of the norm: ``"ba2016"`` (default), ``"sum"`` or ``"gate"``.
      epsilon: added to the variance, inside the root; 1e-6 by default.
      scale: the value at which all gains start; 1 by default.
      kernel_init: initializer of the input weights; LeCun's normal one by default.
      recurrent_kernel_init: initializer of the recurrent weights; orthogonal by default.
      dtype: dtype of the output; by default the dtype to which inputs and parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      carry_init: initializer of the carry; zeros by default.
      reset_after: whether the reset gate comes after the product with the recurrent weights; True
        by default. False puts it before, as in Keras with this argument, and as in Haiku.

    >>> import jax, jax.numpy as jnp
    >>> import flax.linen, jaxnorm.linen
    >>> layer = flax.linen.RNN(jaxnorm.linen.LayerNormGRUCell(4))
    >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 3)))[0].shape
    (2, 5, 4)
    """

    kind = "gru"
    reset_after: bool = True  # type: ignore[misc]


class LayerNormSimpleCell(Cell[jax.Array]):
    """A layer-normalized simple cell for :class:`flax.linen.RNN`.

    See :func:`jaxnorm.recurrent.rnn` for the equations. With ``norm=None`` the cell equals
    :class:`flax.linen.SimpleCell`, parameters included, and with ``activation="relu"`` as well
    its ``activation_fn=jax.nn.relu``.

    Attributes:
      features: number of features H of the state.
      norm: ``"layer"`` (default), ``"rms"``, or None for no norm.
      placement: position of the norm: ``"ba2016"`` (default) or ``"sum"``.
      epsilon: added to the variance, inside the root; 1e-6 by default.
      scale: the value at which all gains start; 1 by default.
      kernel_init: initializer of the input weights; LeCun's normal one by default.
      recurrent_kernel_init: initializer of the recurrent weights; orthogonal by default.
      dtype: dtype of the output; by default the dtype to which inputs and parameters promote.
      param_dtype: dtype of the parameters; float32 by default.
      carry_init: initializer of the carry; zeros by default.
      activation: ``"tanh"`` (default) or ``"relu"``.

    >>> import jax, jax.numpy as jnp
    >>> import flax.linen, jaxnorm.linen
    >>> layer = flax.linen.RNN(jaxnorm.linen.LayerNormSimpleCell(4))
    >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 3)))[0].shape
    (2, 5, 4)
    """

    kind = "rnn"
    activation: str = "tanh"  # type: ignore[misc]
