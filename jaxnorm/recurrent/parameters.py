"""Make the parameters of the cells, and check parameters that are given.

:func:`init_rnn`, :func:`init_gru` and :func:`init_lstm` return plain dicts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer, constant, lecun_normal, orthogonal
from jax.typing import DTypeLike

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import integer
from jaxnorm.arguments.dtypes import compute_dtype
from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.recurrent.cell import Cell
from jaxnorm.recurrent.cells import make_cell
from jaxnorm.recurrent.options import ParameterOptions

LECUN, ORTHOGONAL = lecun_normal(), orthogonal()


@dataclass(frozen=True)
class Initializers:
    """The initializers of all parameters.

    Attributes:
      scale: the value of all gains; None for the default of the norm.
      forget_bias: the bias of the forget gate of an LSTM.
      kernel_init: initializer of the input weights and the projection.
      recurrent_kernel_init: initializer of the recurrent weights.
    """

    scale: float | None = None
    forget_bias: float = 1.0
    kernel_init: Initializer = LECUN
    recurrent_kernel_init: Initializer = ORTHOGONAL

    def leaf(self, cell: Cell, name: str) -> Callable[..., jax.Array]:
        """Return the initializer of a parameter."""
        # each block of a matrix is drawn by itself, as if each gate had a matrix of its
        # own
        blocks = len(cell.sigmoids)
        if name.endswith("kernel"):
            draw = self.kernel_init if name == "input_kernel" else self.recurrent_kernel_init
            return lambda key, shape, dtype: _by_block(draw, key, shape, dtype, blocks)
        if name == "projection":
            return self.kernel_init
        if name == "bias" and cell.name == "lstm":
            values = (0, self.forget_bias, 0, 0)
            return lambda key, shape, dtype: jnp.concatenate(
                [jnp.full(shape[0] // blocks, value, dtype) for value in values]
            )
        gain = (0.1 if cell.norm == "batch" else 1.0) if self.scale is None else self.scale
        return constant(gain if name.endswith("scale") else 0.0)

    def names(self, cell: Cell, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Return the names of the parameters that ``init`` functions make."""
        # RMS norm shifts nothing, but a cell_bias that is given is added
        return [name for name in shapes if not (name == "cell_bias" and cell.norm == "rms")]


def _by_block(
    draw: Initializer, key: jax.Array, shape: tuple[int, int], dtype: DTypeLike, blocks: int
) -> Any:
    """Draw a matrix block by block.

    The initializer may put arrays into boxes of metadata, as for partitioning.
    """
    # An orthogonal matrix needs a QR decomposition, which JAX has not in half
    # precision. One vmap over blocks would hang: two stacks of decompositions in one
    # program waited for each other on a CPU with two threads.
    size, wide = (shape[0], shape[1] // blocks), compute_dtype(dtype)
    parts: list[Any] = [draw(k, size, wide) for k in jax.random.split(key, blocks)]
    beside = lambda *arrays: jnp.concatenate(arrays, 1).astype(dtype)
    # the box of nnx is no pytree
    if hasattr(parts[0], "raw_value"):
        return replace(parts[0], raw_value=beside(*(part.raw_value for part in parts)))
    return jax.tree.map(beside, *parts)


@dataclass(frozen=True)
class InitArguments(Initializers):
    """The arguments of ``init_`` functions: :class:`ParameterOptions` with defaults.

    ``reset_after`` is of the GRU alone.
    """

    norm: str | None = "layer"
    placement: str = "ba2016"
    reset_after: bool = True
    dtype: DTypeLike = jnp.float32


@known_keywords
def init_rnn(
    key: jax.Array, in_features: int, features: int, **options: Unpack[ParameterOptions]
) -> dict[str, jax.Array]:
    """Make the parameters of :func:`rnn`, a plain dict.

    Args:
      key: random key.
      in_features: D, the features of x.
      features: H, the features of the state.
      **options: see :class:`ParameterOptions`.

    Returns:
      The leaves of :func:`init_lstm`, with a single block of H features instead of
      four. It has no leaves for c and for a projection.

    >>> import jax, jaxnorm as jn
    >>> params = jn.recurrent.init_rnn(jax.random.key(0), 3, 4, placement="sum")
    >>> {name: leaf.shape for name, leaf in params.items()}
    {'input_kernel': (3, 4), 'recurrent_kernel': (4, 4), 'scale': (4,), 'bias': (4,)}
    """
    return _initialize("rnn", key, (in_features, features, None), InitArguments(**options))


@known_keywords
def init_gru(
    key: jax.Array,
    in_features: int,
    features: int,
    *,
    reset_after: bool = True,
    **options: Unpack[ParameterOptions],
) -> dict[str, jax.Array]:
    """Make the parameters of :func:`gru`, a plain dict.

    Args:
      key: random key.
      in_features: D, the features of x.
      features: H, the features of the state.
      reset_after: as in :func:`gru`.
      **options: see :class:`ParameterOptions`.

    Returns:
      The leaves of :func:`init_lstm`, with three blocks, r, z and n. It has no leaves
      for c and for a projection. With ``placement="ba2016"`` or without a norm it also
      has ``recurrent_bias``, (H,), unless ``reset_after=False``.

    >>> import jax, jaxnorm as jn
    >>> sorted(jn.recurrent.init_gru(jax.random.key(0), 3, 4, norm=None))
    ['bias', 'input_kernel', 'recurrent_bias', 'recurrent_kernel']
    >>> sorted(jn.recurrent.init_gru(jax.random.key(0), 3, 4, norm=None, reset_after=False))
    ['bias', 'input_kernel', 'recurrent_kernel']
    """
    arguments = InitArguments(reset_after=reset_after, **options)
    return _initialize("gru", key, (in_features, features, None), arguments)


@known_keywords
def init_lstm(
    key: jax.Array,
    in_features: int,
    features: int,
    *,
    forget_bias: float = 1.0,
    projection: int | None = None,
    **options: Unpack[ParameterOptions],
) -> dict[str, jax.Array]:
    """Make the parameters of :func:`lstm`, a plain dict.

    Args:
      key: random key.
      in_features: D, the features of x.
      features: H, the features of the state.
      forget_bias: the value at which the bias of the forget gate starts. In Flax, and
        in modules without a norm, it starts at 0.
      projection: R, the number of features to which h is projected; None, the default,
        projects nothing.
      **options: see :class:`ParameterOptions`.

    Returns:
      The leaves that the norm and its position use. Blocks are in the order i, f, g, o.

      =================  ==========  ===========================================================
      input_kernel       (D, 4H)     W_x
      recurrent_kernel   (H, 4H)     W_h; (R, 4H) with a projection
      bias               (4H,)       b, the only one of the gates
      input_scale        (4H,)       gain of the input's term (ba2016, carried_cell)
      recurrent_scale    (4H,)       gain of the recurrent term (ba2016, carried_cell)
      scale              (4H,)       gain of their sum (sum, gate)
      cell_scale         (H,)        gain of c (ba2016, gate, carried_cell)
      cell_bias          (H,)        shift of c (as cell_scale, but not with RMS norm)
      projection         (H, R)      h = (o tanh(...)) projection
      =================  ==========  ===========================================================

    >>> import jax, jaxnorm as jn
    >>> params = jn.recurrent.init_lstm(jax.random.key(0), 3, 2, forget_bias=1.0)
    >>> params["bias"].tolist()
    [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    """
    arguments = InitArguments(forget_bias=forget_bias, **options)
    return _initialize("lstm", key, (in_features, features, projection), arguments)


def _initialize(
    name: str, key: jax.Array, sizes: tuple[int, int, int | None], arguments: InitArguments
) -> dict[str, jax.Array]:
    """Make the parameters of a cell of sizes (in_features, features, projection)."""
    cell = make_cell(
        name, arguments.norm, arguments.placement, 0, reset_after=arguments.reset_after
    )
    shapes = leaf_shapes(cell, *sizes)
    return {
        leaf: arguments.leaf(cell, leaf)(jax.random.fold_in(key, i), shapes[leaf], arguments.dtype)
        for i, leaf in enumerate(arguments.names(cell, shapes))
    }


def leaf_shapes(
    cell: Cell, in_features: int, features: int, projection: int | None
) -> dict[str, tuple[int, ...]]:
    """Check the sizes of a cell, and return the shapes of all its parameters."""
    given = {"in_features": in_features, "features": features, "projection": projection}
    sizes = {
        name: integer(value, f"{name} must be a positive integer")
        for name, value in given.items()
        if value is not None
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be a positive integer: got {size}.")
    if projection is not None and cell.name != "lstm":
        raise ValueError(
            f"projection is for the LSTM, whose h can have other features than c: got {projection} "
            f"for {cell.name}."
        )
    return cell.shapes(sizes["in_features"], sizes["features"], sizes.get("projection"))


def check_params(cell: Cell, params: Mapping[str, Any], in_features: int) -> dict[str, jax.Array]:
    """Check the names and shapes of parameters, and return them as arrays.

    Parameters that are None count as absent.
    """
    if not isinstance(params, Mapping):
        raise TypeError(
            f"params must be a dict, as init_{cell.name} makes it: got {type(params).__name__}."
        )
    arrays = {
        name: validation.floating(value, name)
        for name, value in params.items()
        if value is not None
    }
    for name in ("input_kernel", "recurrent_kernel"):
        if name not in arrays or arrays[name].ndim != 2:
            raise ValueError(
                f"params must hold a matrix {name}: got {_shapes(arrays)}. Make them with "
                f"init_{cell.name}."
            )
    packed, blocks = arrays["recurrent_kernel"].shape[1], len(cell.sigmoids)
    projection = arrays["recurrent_kernel"].shape[0] if "projection" in arrays else None
    wanted = cell.shapes(in_features, packed // blocks, projection)
    unknown = sorted(set(arrays) - set(wanted))
    if unknown:
        same = "norm, placement and reset_after" if cell.variant else "norm and placement"
        raise ValueError(
            f"params of {cell.name} with norm={cell.norm!r}, placement={cell.position!r}"
            f"{cell.variant} are {', '.join(wanted)}: "
            f"got {', '.join(unknown)} too. Make them with init_{cell.name} and the same {same}."
        )
    for name, array in arrays.items():
        if array.shape != wanted[name]:
            raise ValueError(
                f"{name} must have shape {wanted[name]} for x of {in_features} features and "
                f"recurrent_kernel {arrays['recurrent_kernel'].shape}: got {array.shape}."
            )
    return arrays


def _shapes(arrays: Mapping[str, jax.Array]) -> str:
    """Describe arrays by their names and shapes, for an error."""
    return ", ".join(f"{name} {array.shape}" for name, array in arrays.items()) or "nothing"
