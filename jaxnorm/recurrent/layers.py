"""Layers of networks on top of each other, in one or both directions: shared by Flax modules."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.axes import integer
from jaxnorm.dtypes import promoted
from jaxnorm.options import Param
from jaxnorm.recurrent.cells import Cell
from jaxnorm.recurrent.functions import gru, lstm, rnn, step
from jaxnorm.recurrent.parameters import Initializer, Start, make_cell
from jaxnorm.recurrent.sequences import make_layout, step_mask

NETWORKS: dict[str, Callable[..., Any]] = {"rnn": rnn, "gru": gru, "lstm": lstm}
FLAX_ORDER = {"lstm": ("c", "h")}  # of a carry; ours is h, c


def module_cell(name: str, norm: str | None, placement: str, epsilon: float) -> Cell:
    """The cell of a module."""
    if norm not in (None, "layer", "rms"):
        raise ValueError(
            f"norm of a module must be 'layer', 'rms' or None: got {norm!r}. "
            f"For 'batch', whose statistics are those of each step, call jaxnorm.recurrent.{name} "
            "with running."
        )
    return make_cell(name, norm, placement, epsilon)


def module_start(
    name: str,
    norm: str | None,
    scale: float | None,
    forget_bias: float | None,
    kernel_init: Initializer,
    recurrent_kernel_init: Initializer,
) -> Start:
    """How the parameters of a module start; the bias of an LSTM's forget gate by default at 1,
    without a norm at Flax's 0.
    """
    if forget_bias is not None and name != "lstm":
        raise ValueError(
            f"forget_bias is for the LSTM, which has a forget gate: got {forget_bias} for {name}."
        )
    if forget_bias is None:
        forget_bias = 0.0 if norm is None else 1.0
    return Start(scale, forget_bias, kernel_init, recurrent_kernel_init)


def swapped(name: str, carry):
    """A carry in Flax's order as ours, or the other way round."""
    if name not in FLAX_ORDER or carry is None:
        return carry
    if not _are(2, carry):
        raise TypeError(
            f"a carry must be the pair {_pair(name)}, as in Flax: got {type(carry).__name__}."
        )
    return carry[::-1]


def rounded(
    name: str, norm: str | None, dtype, x: jax.Array, params: dict[str, jax.Array], state: tuple
) -> jax.Array:
    """x, rounded to the dtype of the products, in that of the outputs.

    Without a norm both are those of Flax's cells: ``dtype`` is that of products, and the sum in
    which an LSTM takes c up, and a GRU h, promotes, so that a float32 state stays one.

    Args:
      dtype: as it is given to the module.
      state: arrays or dtypes, h first.
    """
    if norm is not None:
        return x.astype(promoted(dtype, x, *params.values()))
    products = promoted(dtype, x, state[0], *params.values())
    added_to = {"lstm": state[1:], "gru": state, "rnn": ()}[name]
    return x.astype(products).astype(promoted(None, products, *added_to))


def run_cell(
    name: str, params: dict[str, jax.Array], carry, x: jax.Array, dtype, norm, *options
) -> tuple[Any, jax.Array]:
    """One step of a module's cell: a carry in Flax's order and x to the new one and the output.

    Under a norm a carry keeps its dtypes; without one all of it has that of the output, as in Flax.
    """
    state = swapped(name, carry) if name in FLAX_ORDER else (carry,)
    if any(isinstance(part, tuple | list) for part in state):
        raise TypeError(
            f"a carry of {name} must be an array for each part of the state: got "
            f"{jax.tree.structure(carry)}."
        )
    x = rounded(name, norm, dtype, x, params, state)
    new = step(name, x, params, state, norm, *options)
    output = new[0].astype(x.dtype)
    new = tuple(
        part.astype(x.dtype if norm is None else old.dtype)
        for part, old in zip(new, state, strict=True)
    )
    return (swapped(name, new) if len(new) > 1 else new[0]), output


def direction_names(num_layers: int, bidirectional: bool) -> list[list[str]]:
    """The names of the cells, layer by layer: ``cell`` for a single one, as in Flax's RNN."""
    if integer(num_layers, "num_layers must be an integer") < 1:
        raise ValueError(f"num_layers must be at least 1: got {num_layers}.")
    if num_layers == 1 and not bidirectional:
        return [["cell"]]
    return [[f"cell_{i}", f"backward_cell_{i}"][: 1 + bidirectional] for i in range(num_layers)]


# of the functions, which modules have as attributes
OPTIONS = ("norm", "placement", "epsilon", "zoneout", "implementation")


def run_layers(
    module: Any,
    layers: Sequence[Sequence[dict[str, jax.Array]]],
    x: jax.Array,
    carries: Sequence[Sequence[Any]] | None,
    at_call: dict[str, bool | None],
    steps: Mapping[str, Param],
    *,
    between: Callable[[jax.Array], jax.Array],
    make_key: Callable[[], jax.Array] | None,
    flip: Callable[..., jax.Array],
) -> Any:
    """The result of a module of either family: the outputs of its last layer, or the carry of every
    cell and those outputs.

    Args:
      module: has the options as attributes.
      layers: the parameters of each cell of each layer.
      carries: the initial ones, of the same structure, in Flax's order.
      at_call: time_major, reverse, keep_order and return_carry, as given at the call; None leaves
        them to the attributes.
      steps: lengths, where and segment_ids of the functions.
      between: applied to what goes from one layer to the next.
      make_key: a new random key for each cell's zoneout.
      flip: Flax's ``flip_sequences``.
    """
    selected = {
        option: getattr(module, option) if given is None else given
        for option, given in at_call.items()
    }
    reverse, time_major, batch_axes = selected["reverse"], selected["time_major"], x.ndim - 2
    if reverse and module.bidirectional:
        raise ValueError(
            "a bidirectional layer must not be reversed: it runs in both directions. Leave out "
            "reverse."
        )
    mask = step_mask(
        make_layout(x, time_major, reverse),
        steps["lengths"],
        steps["where"],
        ("seq_lengths", "mask"),
    )
    of_steps = {"where": mask, "segment_ids": steps["segment_ids"], "time_major": time_major}
    found = []
    for i, directions in enumerate(layers):
        x = between(x) if i else x
        starts = [None] * len(directions) if carries is None else carries[i]
        results = []
        for d, (params, start) in enumerate(zip(directions, starts, strict=True)):
            options = {
                "reverse": reverse or d == 1,
                "key": None if make_key is None else make_key(),
            }
            results.append(_run(module, params, x, start, **options, **of_steps))
        found.append(tuple(carry for carry, _ in results))
        widest = promoted(None, *(outputs for _, outputs in results))
        x = jnp.concatenate([outputs.astype(widest) for _, outputs in results], -1)
    if reverse and not selected["keep_order"]:
        x = flip(x, steps["lengths"], num_batch_dims=batch_axes, time_major=time_major)
    return (structured(found), x) if selected["return_carry"] else x


def _run(
    module: Any, params: dict[str, jax.Array], x: jax.Array, carry, **options
) -> tuple[Any, jax.Array]:
    """One cell over the sequences; ``dtype`` of a module is that of the outputs, but see
    :func:`rounded`.
    """
    initial = swapped(module.kind, carry)
    # as Flax's
    start = (
        (module.param_dtype,) * 2
        if initial is None
        else initial
        if isinstance(initial, tuple | list)
        else (initial,)
    )
    x = rounded(module.kind, module.norm, module.dtype, x, params, tuple(start))
    options |= {option: getattr(module, option) for option in OPTIONS}
    state, outputs = NETWORKS[module.kind](x, params, initial=initial, **options)
    state = jax.tree.map(lambda part: part.astype(x.dtype), state) if module.norm is None else state
    return swapped(module.kind, state), outputs


def structured(carries: Sequence[Sequence[Any]]):
    """Carries as users see them: one as it is, both directions as a pair, layers as a tuple."""
    layers = [tuple(cells) if len(cells) > 1 else cells[0] for cells in carries]
    return tuple(layers) if len(layers) > 1 else layers[0]


def listed(name: str, carries, num_layers: int, bidirectional: bool) -> list[list[Any]] | None:
    """The inverse of :func:`structured`, of a network of that name."""
    if carries is None:
        return None
    layers = carries if num_layers > 1 else [carries]
    pairs = bidirectional or (num_layers > 1 and name in FLAX_ORDER)
    if not _are(num_layers, layers) or (pairs and not all(_are(2, cells) for cells in layers)):
        layer = (
            "a pair, of both directions"
            if bidirectional
            else "one carry" + (f" {_pair(name)}" if name in FLAX_ORDER else "")
        )
        wanted = layer if num_layers == 1 else f"a tuple of {num_layers} layers, for each {layer}"
        raise ValueError(
            f"initial_carry must be {wanted}: got {jax.tree.structure(carries)}, where * is an "
            "array."
        )
    return [list(cells) if bidirectional else [cells] for cells in layers]


def _pair(name: str) -> str:
    return f"({', '.join(FLAX_ORDER[name])})"


def _are(count: int, parts: Any) -> bool:
    return isinstance(parts, tuple | list) and len(parts) == count
