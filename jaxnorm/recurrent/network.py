"""Check the arguments of a network, and run it as one compiled program."""

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxnorm.arguments import validation
from jaxnorm.arguments.dtypes import compute_dtype, promoted
from jaxnorm.core import plan
from jaxnorm.engine.sharding import sharded_by_compiler
from jaxnorm.kernels import PLAIN, TABLE
from jaxnorm.recurrent import scan, tpu
from jaxnorm.recurrent.cell import Cell, State, Steps, Weights
from jaxnorm.recurrent.cells import make_cell
from jaxnorm.recurrent.options import NetworkArguments
from jaxnorm.recurrent.parameters import check_params
from jaxnorm.recurrent.scan import run
from jaxnorm.recurrent.sequences import (
    Layout,
    check_by_step,
    initial_state,
    kept_units,
    make_layout,
    restarts,
    step_mask,
    zoneout_rates,
)
from jaxnorm.recurrent.statistics import check_running, running_by_step, step_moments
from jaxnorm.recurrent.steps import advance, with_zero_input


class Static(NamedTuple):
    """The static arguments of a compiled call.

    Attributes:
      cell: the static arguments of a step.
      layout: the order of time and batch in the caller's arrays.
      zoneout: the rate of each part of the state; None without zoneout.
      implementation: name of the implementation that runs.
      return_moments: whether to return the Moments of each step.
      tpu: whether plain JAX takes the loops for TPUs.
    """

    cell: Cell
    layout: Layout
    zoneout: tuple[float, ...] | None
    implementation: str
    return_moments: bool
    tpu: bool


def network(name: str, x, params: Mapping[str, Any], given: NetworkArguments) -> Any:
    """Check the arguments of a network, and run it.

    Args:
      name: name of its cell.
      x: the input sequences.
      params: its parameters.
      given: the other arguments of the call.
    """
    cell = make_cell(
        name,
        given.norm,
        given.placement,
        given.epsilon,
        reset_after=given.reset_after,
        activation=given.activation,
    )
    x = validation.floating(x)
    layout = make_layout(x, given.time_major, given.reverse)
    params = check_params(cell, params, x.shape[-1])
    # the state is carried in float32 at least, since every step rounds it anew
    dtype = compute_dtype(promoted(None, x, *params.values()))
    params = {leaf: value.astype(dtype) for leaf, value in params.items()}
    running, lengths = check_running(cell, given, layout, params)
    mask = step_mask(layout, lengths, given.where)
    ids = check_by_step(layout, "segments", given.segments, jnp.integer)
    state = initial_state(cell.state, layout, _widths(cell, params), given.initial, dtype)
    rates = zoneout_rates(cell.state, given.zoneout)
    # rates of 0 leave the kernels their choice, and need no random numbers
    zoneout = rates if any(rates) else None
    chosen = plan.select(given.implementation, "lstm", x, cell, params, ids, zoneout)
    static = Static(
        cell, layout, zoneout, chosen.implementation, given.return_moments, plan.is_tpu()
    )
    key = given.key if zoneout else None
    state, outputs, moments = _run(static, x, params, state, mask, ids, running, key)
    state = state if len(cell.state) > 1 else state[0]
    return (state, outputs, moments) if given.return_moments else (state, outputs)


def _widths(cell: Cell, params: Mapping[str, jax.Array]) -> tuple[int, ...]:
    """Return the number of features of each part of the state, (h,) or (h, c)."""
    # h may be projected: the recurrent matrix has a row for each of its features
    rows, packed = params["recurrent_kernel"].shape
    return (rows, packed // len(cell.sigmoids))[: len(cell.state)]


def _loop(static: Static, weights: Weights) -> scan.Loop | None:
    """Return the loop of an implementation; None is a plain scan."""
    name = static.implementation
    if name == "reference":
        return None
    if name in PLAIN:
        return tpu.find_loop(static.cell, weights) if static.tpu else scan.chunked
    return partial(import_module(TABLE[name].modules["lstm"]).whole, static.layout.time_major)


@partial(jax.jit, static_argnums=0)
def _run(static: Static, x, params, state, mask, ids, running, key):
    """Run a network as one compiled program, sharded as x is along batch and time."""
    # under explicit sharding JAX cannot tell how the reshapes of batch and time are
    # sharded
    shardings = static.layout.shardings(x)
    return sharded_by_compiler(partial(_forward, static), shardings)(
        x, params, state, mask, ids, running, key
    )


def _forward(static: Static, x, params, state, mask, ids, running, key) -> tuple:
    """Return the final state, the outputs, and the Moments of each step or None."""
    cell, layout = static.cell, static.layout
    dtype = params["recurrent_kernel"].dtype
    mask, ids = (
        None if value is None else layout.to_steps(value)[..., None] for value in (mask, ids)
    )
    resets = None if ids is None else restarts(ids, mask)
    keep = None if static.zoneout is None else kept_units(static.zoneout, key, layout, state)
    steps = Steps(
        mask,
        resets,
        keep,
        None if running is None else running_by_step(running, layout.time, cell.epsilon),
    )
    x_steps, weights = layout.to_steps(x).astype(dtype), cell.weights(params)
    final, histories = run(cell, weights, x_steps, steps, state, _loop(static, weights))
    # masked steps repeat the state before, but their outputs are 0
    outputs = histories[0] if mask is None else jnp.where(mask, histories[0], 0)
    moments = (
        step_moments(cell, weights, x_steps, steps, state, histories)
        if static.return_moments
        else None
    )
    final = tuple(part.reshape(*layout.batch, part.shape[-1]) for part in final)
    return final, layout.from_steps(outputs.astype(x.dtype)), moments


def step(cell: Cell, x: jax.Array, params: Mapping[str, Any], state: State) -> State:
    """Run one step of a cell, for the cells of Flax modules.

    The norm must not be batch norm. The other arguments are as in :func:`network`, with
    x of one step, ``(..., features)``.
    """
    x = validation.floating(x)
    params = check_params(cell, params, x.shape[-1])
    dtype = compute_dtype(promoted(None, x, *params.values()))
    # one step of a sequence, all of whose other axes are batch
    layout = Layout(x.shape[:-1], 1, True, False)
    state = initial_state(
        cell.state, layout, _widths(cell, params), state if len(cell.state) > 1 else state[0], dtype
    )
    flat = x.astype(dtype).reshape(-1, x.shape[-1])
    weights = cell.weights({name: value.astype(dtype) for name, value in params.items()})
    new = advance(
        cell,
        weights,
        cell.input_terms(weights, flat, Steps()),
        with_zero_input(Steps(), flat),
        state,
    )
    return tuple(part.reshape(*layout.batch, part.shape[-1]) for part in new)
