"""Run stacked layers in one or both directions, for the modules of linen and nnx."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.arguments.axes import integer
from jaxnorm.arguments.dtypes import promoted
from jaxnorm.arguments.options import Param
from jaxnorm.recurrent.cell import Cell
from jaxnorm.recurrent.cells import make_cell
from jaxnorm.recurrent.network import network, step
from jaxnorm.recurrent.options import NetworkArguments
from jaxnorm.recurrent.parameters import Initializer, Initializers
from jaxnorm.recurrent.sequences import make_layout, step_mask

# the parts of a carry in Flax; a state of a network is (h, c)
FLAX_ORDER = {"lstm": ("c", "h")}


def module_cell(module: Any) -> Cell:
    """Check the options of a module, which are its attributes, and return its cell."""
    name, norm = module.kind, module.norm
    if norm not in (None, "layer", "rms"):
        raise ValueError(
            f"norm of a module must be 'layer', 'rms' or None: got {norm!r}. "
            f"For 'batch', whose statistics are those of each step, call jaxnorm.recurrent.{name} "
            "with running."
        )
    return make_cell(
        name,
        norm,
        module.placement,
        module.epsilon,
        reset_after=module.reset_after,
        activation=module.activation,
    )


def module_initializers(
    name: str,
    norm: str | None,
    scale: float | None,
    forget_bias: float | None,
    kernel_init: Initializer,
    recurrent_kernel_init: Initializer,
) -> Initializers:
    """Return the initializers of a module's parameters.

    By default the bias of the forget gate starts at 1, and without a norm at 0, as in
    Flax.
    """
    if forget_bias is not None and name != "lstm":
        raise ValueError(
            f"forget_bias is for the LSTM, which has a forget gate: got {forget_bias} for {name}."
        )
    if forget_bias is None:
        forget_bias = 0.0 if norm is None else 1.0
    return Initializers(scale, forget_bias, kernel_init, recurrent_kernel_init)


def swap_carry(name: str, carry):
    """Turn a carry in Flax's order into a state, or a state into a carry."""
    if name not in FLAX_ORDER or carry is None:
        return carry
    if not _has_length(2, carry):
        raise TypeError(
            f"a carry must be the pair {_carry_names(name)}, as in Flax: got "
            f"{type(carry).__name__}."
        )
    return carry[::-1]


def round_input(
    name: str, norm: str | None, dtype, x: jax.Array, params: dict[str, jax.Array], state: tuple
) -> jax.Array:
    """Round x to the dtype of the products, and cast it to the dtype of the outputs.

    With a norm both are the dtype to which x and the parameters promote, or ``dtype``.
    Without a norm they are the dtypes of Flax's cells.

    Args:
      name: name of the cell.
      norm: the norm of the module.
      dtype: the dtype that the module was given, or None.
      x: the inputs.
      params: the parameters.
      state: arrays or dtypes, h first.
    """
    if norm is not None:
        return x.astype(promoted(dtype, x, *params.values()))
    # In Flax dtype is the dtype of products. An LSTM then adds c, a GRU h, and this sum
    # promotes, so that outputs of a float32 state are float32.
    products = promoted(dtype, x, state[0], *params.values())
    added_to = {"lstm": state[1:], "gru": state, "rnn": ()}[name]
    return x.astype(products).astype(promoted(None, products, *added_to))


def run_cell(
    module: Any, params: dict[str, jax.Array], carry, x: jax.Array
) -> tuple[Any, jax.Array]:
    """Run one step of a module's cell, and return the new carry and the output.

    Carries are in Flax's order. With a norm a carry keeps its dtypes. Without a norm
    all its parts have the dtype of the output, as in Flax.
    """
    name, norm = module.kind, module.norm
    state = swap_carry(name, carry) if name in FLAX_ORDER else (carry,)
    if any(isinstance(part, tuple | list) for part in state):
        raise TypeError(
            f"a carry of {name} must be an array for each part of the state: got "
            f"{jax.tree.structure(carry)}."
        )
    x = round_input(name, norm, module.dtype, x, params, state)
    new = step(module_cell(module), x, params, state)
    output = new[0].astype(x.dtype)
    new = tuple(
        part.astype(x.dtype if norm is None else old.dtype)
        for part, old in zip(new, state, strict=True)
    )
    return (swap_carry(name, new) if len(new) > 1 else new[0]), output


def direction_names(num_layers: int, bidirectional: bool) -> list[list[str]]:
    """Return the names of the cells in each layer.

    A single cell has the name ``cell``, as in Flax's RNN, whose parameters then fit.
    """
    if integer(num_layers, "num_layers must be an integer") < 1:
        raise ValueError(f"num_layers must be at least 1: got {num_layers}.")
    if num_layers == 1 and not bidirectional:
        return [["cell"]]
    return [[f"cell_{i}", f"backward_cell_{i}"][: 1 + bidirectional] for i in range(num_layers)]


@dataclass(frozen=True)
class ModuleCall:
    """The arguments of one call of a module, besides its inputs and carry."""

    seq_lengths: Param
    mask: Param
    segments: Param
    time_major: bool
    reverse: bool
    keep_order: bool
    return_carry: bool


def module_call(
    module: Any, seq_lengths: Param, mask: Param, segments: Param, **flags: bool | None
) -> ModuleCall:
    """Return the arguments of a call; a flag that is None is the module's attribute."""
    decided = {
        flag: getattr(module, flag) if given is None else given for flag, given in flags.items()
    }
    return ModuleCall(seq_lengths, mask, segments, **decided)


def run_layers(
    module: Any,
    layers: Sequence[Sequence[dict[str, jax.Array]]],
    x: jax.Array,
    carries: Sequence[Sequence[Any]] | None,
    call: ModuleCall,
    *,
    between: Callable[[jax.Array], jax.Array],
    make_key: Callable[[], jax.Array] | None,
    flip: Callable[..., jax.Array],
) -> Any:
    """Run all layers of a module.

    Args:
      module: the module, which has the options as attributes.
      layers: the parameters of each cell of each layer.
      x: the inputs.
      carries: the initial carry of each cell of each layer, in Flax's order; None for
        zeros.
      call: the arguments of the call.
      between: applied to the outputs of each layer but the last: dropout.
      make_key: returns a new random key for the zoneout of each cell; None without
        random numbers.
      flip: Flax's ``flip_sequences``.

    Returns:
      The outputs of the last layer. With ``return_carry`` a pair: the final carries of
      all cells, and the outputs.
    """
    if call.reverse and module.bidirectional:
        raise ValueError(
            "a bidirectional layer must not be reversed: it runs in both directions. Leave out "
            "reverse."
        )
    batch_axes, final_carries = x.ndim - 2, []
    shared = _given(module, call, x)
    for i, directions in enumerate(layers):
        x = between(x) if i else x
        starts = [None] * len(directions) if carries is None else carries[i]
        results = []
        for d, (params, start) in enumerate(zip(directions, starts, strict=True)):
            key = None if make_key is None else make_key()
            given = replace(shared, reverse=call.reverse or d == 1, key=key)
            results.append(_run(module, params, x, start, given))
        final_carries.append(tuple(carry for carry, _ in results))
        # the initial carries of both directions, and so their outputs, may differ in
        # dtype
        widest = promoted(None, *(outputs for _, outputs in results))
        x = jnp.concatenate([outputs.astype(widest) for _, outputs in results], -1)
    if call.reverse and not call.keep_order:
        x = flip(x, call.seq_lengths, num_batch_dims=batch_axes, time_major=call.time_major)
    return (nest_carries(final_carries), x) if call.return_carry else x


def _given(module: Any, call: ModuleCall, x: jax.Array) -> NetworkArguments:
    """Return the arguments that all cells share."""
    # checked and made here once, and not by every cell, under the names that modules
    # use
    layout = make_layout(x, call.time_major, call.reverse)
    mask = step_mask(layout, call.seq_lengths, call.mask, ("seq_lengths", "mask"))
    return NetworkArguments(
        where=mask,
        segments=call.segments,
        time_major=call.time_major,
        norm=module.norm,
        placement=module.placement,
        epsilon=module.epsilon,
        reset_after=module.reset_after,
        activation=module.activation,
        zoneout=module.zoneout,
        implementation=module.implementation,
    )


def _run(
    module: Any, params: dict[str, jax.Array], x: jax.Array, carry, given: NetworkArguments
) -> tuple[Any, jax.Array]:
    """Run one cell over the sequences, and return its final carry and the outputs."""
    initial = swap_carry(module.kind, carry)
    # by default Flax's carries are zeros of param_dtype
    start = (
        (module.param_dtype,) * 2
        if initial is None
        else initial
        if isinstance(initial, tuple | list)
        else (initial,)
    )
    x = round_input(module.kind, module.norm, module.dtype, x, params, tuple(start))
    state, outputs = network(module.kind, x, params, replace(given, initial=initial))
    state = jax.tree.map(lambda part: part.astype(x.dtype), state) if module.norm is None else state
    return swap_carry(module.kind, state), outputs


def nest_carries(carries: Sequence[Sequence[Any]]):
    """Nest the carries of all cells as users see them.

    The carry of a single cell stays as it is, both directions are a pair, several
    layers a tuple.
    """
    layers = [tuple(cells) if len(cells) > 1 else cells[0] for cells in carries]
    return tuple(layers) if len(layers) > 1 else layers[0]


def list_carries(
    name: str, carries, num_layers: int, bidirectional: bool
) -> list[list[Any]] | None:
    """List the carries of the cells of each layer, inverse to :func:`nest_carries`.

    ``name`` is the name of the cell.
    """
    if carries is None:
        return None
    layers = carries if num_layers > 1 else [carries]
    # else two LSTM layers that are given one carry, (c, h), would take it for one carry
    # each
    pairs = bidirectional or (num_layers > 1 and name in FLAX_ORDER)
    if not _has_length(num_layers, layers) or (
        pairs and not all(_has_length(2, cells) for cells in layers)
    ):
        layer = (
            "a pair, of both directions"
            if bidirectional
            else "one carry" + (f" {_carry_names(name)}" if name in FLAX_ORDER else "")
        )
        wanted = layer if num_layers == 1 else f"a tuple of {num_layers} layers, for each {layer}"
        raise ValueError(
            f"initial_carry must be {wanted}: got {jax.tree.structure(carries)}, where * is an "
            "array."
        )
    return [list(cells) if bidirectional else [cells] for cells in layers]


def _carry_names(name: str) -> str:
    """Return the parts of a carry in Flax's order, for an error."""
    return f"({', '.join(FLAX_ORDER[name])})"


def _has_length(count: int, parts: Any) -> bool:
    """Return whether ``parts`` is a tuple or list of so many parts."""
    return isinstance(parts, tuple | list) and len(parts) == count
