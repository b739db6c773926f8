"""Compute the statistics of recurrent batch norm, for each step by itself.

Training uses the statistics of the batch at each step, and returns them as Moments.
Evaluation is given running Moments, which are checked here.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.arguments import validation
from jaxnorm.core.statistics import Moments, moments
from jaxnorm.engine.groups import inverse_root
from jaxnorm.recurrent.cell import Cell, Steps, product
from jaxnorm.recurrent.options import NetworkArguments
from jaxnorm.recurrent.sequences import Layout
from jaxnorm.recurrent.steps import recurrent_products, states_before


def normalized_widths(cell: Cell, packed: int) -> dict[str, int]:
    """Return the number of features of each term that batch norm normalizes."""
    return {"input": packed, "recurrent": packed} | (
        {"cell": packed // len(cell.sigmoids)} if "c" in cell.state else {}
    )


def check_running(
    cell: Cell, given: NetworkArguments, layout: Layout, params: Mapping[str, jax.Array]
) -> tuple[dict | None, Any]:
    """Check the running Moments against the network, and return them with the lengths.

    The Moments are constants under differentiation, in the dtype of the network.
    """
    running, lengths, longer = given.running, given.lengths, given.longer
    if cell.norm != "batch" and (running is not None or given.return_moments):
        raise ValueError(
            f"running and return_moments are for norm='batch': got norm={cell.norm!r}."
        )
    if longer not in ("last", "raise"):
        raise ValueError(f"longer must be 'last' or 'raise': got {longer!r}.")
    if running is None:
        return None, lengths
    widths = normalized_widths(cell, params["recurrent_kernel"].shape[1])
    if not isinstance(running, Mapping):
        raise TypeError(
            "running must be a dict of Moments, as return_moments gives it: got "
            f"{type(running).__name__}."
        )
    if set(running) != set(widths) or not all(
        isinstance(value, Moments) for value in running.values()
    ):
        raise ValueError(
            f"running must hold Moments of {', '.join(widths)}, as return_moments gives them: got "
            f"{', '.join(running)}."
        )
    checked = {}
    for name, value in running.items():
        if value.mean.ndim != 2 or value.mean.shape[0] == 0 or value.mean.shape[1] != widths[name]:
            raise ValueError(
                f"running {name} must have shape (steps, {widths[name]}): got {value.mean.shape}."
            )
        checked[name] = replace(value, var=validation.variance("running", value.var))
    steps = next(iter(running.values())).mean.shape[0]
    if longer == "raise" and lengths is not None:
        lengths = validation.check_values(
            lengths,
            lambda n: n <= steps,
            f"sequences must have at most the {steps} steps of running",
        )
    elif longer == "raise" and layout.time > steps:
        raise ValueError(
            f"sequences must have at most the {steps} steps of running: got {layout.time}. "
            "longer='last' uses the last step's."
        )
    return jax.tree.map(
        lambda leaf: lax.stop_gradient(leaf).astype(params["recurrent_kernel"].dtype), checked
    ), lengths


def running_by_step(
    running: dict[str, Moments], time: int, epsilon: float
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Return the mean and ``1 / sqrt(var + epsilon)`` of each step, for each term.

    Steps after the last one that training has seen use the statistics of the last one.
    """
    result = {}
    for name, value in running.items():
        # a count of 0 marks a step that no sequence has reached
        seen = jnp.broadcast_to(value.count, value.mean.shape)[:, 0] > 0
        last = jnp.max(jnp.where(seen, jnp.arange(len(seen)), 0))
        at = jnp.minimum(jnp.arange(time), last)
        result[name] = (
            value.mean[at][:, None],
            inverse_root(value.var[at][:, None], epsilon, positive=epsilon > 0),
        )
    return result


def step_moments(cell: Cell, weights, x, steps: Steps, state, histories) -> dict[str, Moments]:
    """Return the Moments of each step, ``(time, features)``, for each term."""
    # from the states, after the loop, so that no loop has to return statistics
    weights, x, state, histories = lax.stop_gradient((weights, x, state, histories))
    before = states_before(steps, state, histories)
    values = {
        "input": product(x, weights["input_kernel"]),
        "recurrent": recurrent_products(cell, weights, x, steps, before),
    }
    if "c" in cell.state:
        values["cell"] = histories[1]
    stats = {name: moments(value, 1, where=steps.mask) for name, value in values.items()}
    return jax.tree.map(lambda leaf: leaf[:, 0], stats)
