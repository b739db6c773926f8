"""Run a model with Flax's norms and with ours, and measure both."""

import time
from collections.abc import Callable, Iterable, Mapping
from statistics import quantiles
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxnorm import __version__
from jaxnorm.core.call import Call
from jaxnorm.flax_common.calls import watching
from jaxnorm.flax_common.comparison import Comparison, Cost, Difference, Norm
from jaxnorm.flax_common.float64 import coarsest, in_float64
from jaxnorm.flax_common.surgery import apart, double, largest_of
from jaxnorm.kernels.placement import platform
from jaxnorm.norms.kernels import path_name

Loss = Callable[[Any], jax.Array]
# of parameters, other state, arguments by position and by keyword: the output and the new state
Run = Callable[[Any, Any, tuple, Mapping[str, Any]], tuple[Any, Any]]
NO_PLAN = {
    "BatchNorm": "by running statistics: nothing is reduced",
    "WeightNorm": "of weights, by plain JAX",
    "SpectralNorm": "of weights, by plain JAX",
}
PARTS = ("outputs", "state", "gradients of parameters", "gradients of inputs")


class Norms:
    """The rows of the norms of a model, collected while it is traced."""

    def __init__(self, path_of: Callable[[Any], str]) -> None:
        self.path_of = path_of
        self.found: dict[str, Norm] = {}
        self.planned: dict[tuple, Norm] = {}

    def watch(self, module: Any, call: Call) -> None:
        """Add a norm of ours, with the plan of its call."""
        x, plan = call.operands.x, call.plan()
        row = Norm(
            self.path_of(module),
            type(module).__name__,
            tuple(x.shape),
            str(x.dtype),
            plan.implementation,
            plan.derivative,
            dict(plan.others),
        )
        self.planned[row.path, row.name, row.shape, row.dtype] = row

    def add(self, path: str, name: str, *, ours: bool) -> None:
        """Add a norm of the model; it has no plan if the call prepares none."""
        why = NO_PLAN.get(name, "within a transformation, which hides its path")
        self.found[path] = Norm(path, name, others=why if ours else "stays Flax's")

    def rows(self) -> tuple[Norm, ...]:
        """Return all norms in the order of their calls, then those without a plan."""
        known = {row.path for row in self.planned.values()}
        rest = (row for path, row in self.found.items() if path not in known)
        return (*self.planned.values(), *rest)


def squared_distance(output: Any) -> jax.Array:
    """Return half the squared distance of all outputs to cos(0), cos(1), ...

    A sum of squares alone would hardly depend on the input of a norm.
    """
    total = jnp.zeros((), jnp.float32)
    for leaf in filter(_is_float, jax.tree.leaves(output)):
        wide = jnp.promote_types(leaf.dtype, jnp.float32)
        targets = jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape)
        total += (jnp.abs(leaf.astype(wide) - targets.astype(wide)) ** 2).sum().real / 2
    return total


def measure(
    runs: tuple[Run, Run],
    params: Any,
    rest: Any,
    arguments: tuple[tuple, Mapping[str, Any]],
    norms: Norms,
    *,
    loss: Loss | None,
    rounds: int,
    float64: bool,
) -> Comparison:
    """Return the comparison of a model that runs with Flax's norms, and with ours.

    Args:
      runs: the model with Flax's norms, and with ours.
      params: what is differentiated besides the inputs.
      rest: what else the model has, such as running statistics and keys.
      arguments: the model's inputs, by position and by keyword. Arrays among them are arguments of
        the compiled step; anything else is static.
      norms: collects the rows of the norms while the step with ours is traced.
      loss: function of the output; None for :func:`squared_distance`.
      rounds: how often each step is timed.
      float64: whether the step is also computed in float64.
    """
    of_params, from_params = _floats_of(params)
    of_inputs, from_inputs = _floats_of(arguments)
    of_rest, from_rest = _floats_of(rest)
    operands = (*of_params, *of_inputs, *of_rest)

    def model(run: Run, operands: tuple) -> tuple[Any, Any]:
        return run(
            from_params(*operands[:2]), from_rest(*operands[4:]), *from_inputs(*operands[2:4])
        )

    steps = [_step(model, run, loss or squared_distance) for run in runs]
    compiled, seconds = [], []
    for step, watch in zip(steps, (None, norms.watch), strict=True):
        token = watching.set(watch)
        began = time.perf_counter()
        try:
            lowered = jax.jit(step).lower(*operands)
        finally:
            watching.reset(token)
        compiled.append(lowered.compile())
        seconds.append(time.perf_counter() - began)
    results = [step(*operands) for step in compiled]
    traced, shapes = jax.make_jaxpr(steps[0], return_shape=True)(*operands)
    true, notes = _truth(traced, shapes, operands) if float64 else (None, ())
    times = _times(compiled, operands, rounds)
    flax_cost, our_cost = [
        Cost(_residual_bytes(model, run, operands), second, taken)
        for run, second, taken in zip(runs, seconds, times, strict=True)
    ]
    versions = {"jaxnorm": __version__, "jax": jax.__version__, "flax": flax.__version__}
    return Comparison(
        tuple(_differences(results[0], results[1], true)),
        flax_cost,
        our_cost,
        norms.rows(),
        str(coarsest(traced)),
        rounds,
        versions | {"platform": platform()},
        notes,
    )


def _step(model: Callable, run: Run, loss: Loss) -> Callable[..., dict[str, Any]]:
    """Return the training step: what is compared, by part."""

    def step(*operands: Any) -> dict[str, Any]:
        def objective(params: dict, inputs: dict) -> tuple[jax.Array, tuple]:
            output, state = model(run, _with(operands, params, inputs))
            return loss(output), (output, state)

        gradients, (output, state) = jax.grad(objective, (0, 1), has_aux=True)(
            operands[0], operands[2]
        )
        return dict(zip(PARTS, (output, state, *gradients), strict=True))

    return step


def _with(operands: tuple, params: dict, inputs: dict) -> tuple:
    """Return the operands with other parameters and inputs to differentiate."""
    return (params, operands[1], inputs, *operands[3:])


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _floats_of(tree: Any) -> tuple[tuple[dict, dict], Callable[[dict, dict], Any]]:
    """Return the floats and the other arrays of a tree by their paths, and how to make it again.

    Leaves that are no arrays are part of the last.
    """
    named, structure = _named(tree)
    arrays = {name: leaf for name, leaf in named if isinstance(leaf, jax.Array | np.ndarray)}
    floats = {name: leaf for name, leaf in arrays.items() if _is_float(leaf)}
    others = {name: leaf for name, leaf in arrays.items() if name not in floats}

    def again(floats: dict, others: dict) -> Any:
        given = floats | others
        return jax.tree.unflatten(structure, [given.get(name, leaf) for name, leaf in named])

    return (floats, others), again


def _residual_bytes(model: Callable, run: Run, operands: tuple) -> int:
    """Return the bytes that jax.vjp keeps of the model, besides its arguments."""

    def pullback(*operands: Any) -> Any:
        forward = lambda params, inputs: model(run, _with(operands, params, inputs))
        return jax.vjp(forward, operands[0], operands[2], has_aux=True)[1]

    jaxpr = jax.make_jaxpr(pullback)(*operands).jaxpr
    kept = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    return sum(atom.aval.size * atom.aval.dtype.itemsize for atom in kept.difference(jaxpr.invars))


def _truth(traced: Any, shapes: Any, operands: tuple) -> tuple[Any, tuple[str, ...]]:
    """Return the results in float64, or None and why there are none."""
    try:
        found = in_float64(traced, jax.tree.leaves(operands))
    except Exception as error:  # whatever a primitive says about float64
        first = str(error).partition("\n")[0]
        return None, (f"float64 was not computed: {type(error).__name__}: {first}",)
    return jax.tree.unflatten(jax.tree.structure(shapes), found), ()


def _times(steps: list, operands: tuple, rounds: int) -> list[tuple[float, float, float]]:
    """Return quartiles of the seconds that each step takes. They take turns to be first."""
    taken: list[list[float]] = [[] for _ in steps]
    for turn in range(rounds):
        for index in (0, 1) if turn % 2 else (1, 0):
            began = time.perf_counter()
            jax.block_until_ready(steps[index](*operands))
            taken[index].append(time.perf_counter() - began)
    found = [
        quantiles(each * 2 if rounds == 1 else each, n=4, method="inclusive") for each in taken
    ]
    return [(low, median, high) for low, median, high in found]


def _differences(theirs: dict, ours: dict, true: dict | None) -> Iterable[Difference]:
    for part in PARTS:
        found = [_wide_floats(results[part]) for results in (theirs, ours, true or theirs)]
        if not any(leaf.size for leaf in found[0].values()):
            continue
        best = found[2]
        largest = largest_of(best.values())
        differ = {
            name: [apart(*pair) for pair in ((a, b), (a, best[name]), (b, best[name]))]
            for (name, a), b in zip(found[0].items(), found[1].values(), strict=True)
        }
        worst = max(differ, key=lambda name: differ[name][0])
        relative = [max(each) / (largest or 1) for each in zip(*differ.values(), strict=True)]
        errors = relative[1:] if true else (None, None)
        if part == PARTS[-1]:  # of the arguments by position, or of those by keyword
            worst = worst.partition("/")[2]
        yield Difference(part, worst, largest, relative[0], *errors)


def _named(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Return the leaves of a tree with their paths, and its structure."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [path_name(path) for path, _ in leaves]
    if len(set(names)) < len(names):  # keys with slashes in them
        names = [jax.tree_util.keystr(path) for path, _ in leaves]
    return list(zip(names, (leaf for _, leaf in leaves), strict=True)), structure


def _wide_floats(tree: Any) -> dict[str, np.ndarray]:
    return {name: double(leaf) for name, leaf in _named(tree)[0] if _is_float(leaf)}
