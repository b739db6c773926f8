"""Find the weights whose scale no output depends on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.training.roles import parts

FACTORS = (0.5, 2.0, 8.0)
# a change of a leaf by its own size that moves the outputs by less than this share does nothing
NOTHING = 1e-4
JITTER = 0.1

Answer = Literal["scale-invariant", "with its layer", "no effect", "depends"]


@dataclass(frozen=True)
class Dependence:
    """How outputs depend on the scale of a leaf, relative to how they depend on its direction.

    Attributes:
      path: the path of the leaf.
      answer: ``"scale-invariant"``; ``"with its layer"``: only if all leaves of its layer are
        scaled together, such as a kernel and its bias; ``"no effect"``: no output depends on the
        leaf at all, such as a bias before batch norm; or ``"depends"``.
      slope: the derivative of the outputs with respect to the logarithm of the scale, relative to
        the derivative along a random direction of the same length.
      change: the largest change of the outputs for scales of 1/2, 2 and 8, likewise relative.
      together: the larger of slope and change where all leaves of its layer are scaled together.
      effect: the derivative along a random direction of the leaf's length, relative to the outputs.
    """

    path: str
    answer: Answer
    slope: float
    change: float
    together: float
    effect: float


@dataclass(frozen=True)
class ScaleInvariance:
    """The answer of :func:`scale_invariant`, which prints itself as a table.

    Attributes:
      invariant: a tree of booleans like the parameters: True for a leaf whose scale no output
        depends on, by itself, even if no output depends on the leaf at all.
      leaves: how outputs depend on each leaf, in the order of the tree.
      tolerance: up to which number a slope or a change counts as none.
    """

    invariant: Any
    leaves: tuple[Dependence, ...] = field(repr=False)
    tolerance: float

    def __str__(self) -> str:
        width = max([len("leaf"), *(len(leaf.path) for leaf in self.leaves)])
        head = f"{'leaf':<{width}}  {'answer':<15}  {'slope':>8}  {'change':>8}  {'together':>8}"
        rows = [
            f"{leaf.path:<{width}}  {leaf.answer:<15}  {leaf.slope:8.1e}  {leaf.change:8.1e}  "
            f"{leaf.together:8.1e}  {leaf.effect:8.1e}"
            for leaf in self.leaves
        ]
        return "\n".join([f"{head}  {'effect':>8}", *rows])

    __repr__ = __str__


def scale_invariant(
    model: Any,
    params: Any,
    /,
    *inputs: Any,
    axis: int | None = None,
    tolerance: float = 1e-2,
    seed: int = 0,
    **arguments: Any,
) -> ScaleInvariance:
    """Find the weights whose scale no output depends on, such as those in front of a norm.

    By Euler's theorem ``f(c w) = f(w)`` for all c > 0 exactly if the derivative of f along w is 0
    at every ``c w``. One forward pass computes that derivative. It is taken at random values near
    the parameters, because zeros would hide what depends on them: biases at 0, a branch whose last
    gain starts at 0. The outputs for scales of 1/2, 2 and 8 then prove the answer.

    An epsilon keeps any norm from being quite invariant: its outputs change by about
    ``epsilon / var``. Therefore slopes and changes are relative to the derivative along a random
    direction of the length of w, and the report has the numbers.

    Args:
      model: a function ``model(params, *inputs, **arguments)``, a linen module or an nnx module.
        Outputs may be any pytree. New running statistics do not count as outputs.
      params: the parameters. For a linen module they may be its variables, of which ``params`` is
        the tree that is examined; for an nnx module they are ``nnx.state(model, nnx.Param)``.
      *inputs: the other positional arguments, such as a batch. Batch norm must use the statistics
        of its batch: by running statistics no weight is invariant.
      axis: an axis whose channels are scaled each by a factor of its own, such as -1 for the
        outputs of kernels. Leaves without this axis are scaled as a whole. None, the default,
        scales each leaf as a whole.
      tolerance: up to which slope and change a leaf is invariant.
      seed: of the random values and directions.
      **arguments: keyword arguments of the model, such as ``train=True``.

    Returns:
      The trees and numbers, see :class:`ScaleInvariance`. :func:`labels` takes it as
      ``before_norm``.

    Raises:
      TypeError: a model that is none of these; outputs without floating numbers.
      ValueError: parameters without leaves, or not those of the nnx model.

    >>> import jax, jax.numpy as jnp, jaxnorm as jn
    >>> model = lambda p, x: jn.layer_norm(x @ p["first"]) @ p["last"]
    >>> keys = jax.random.split(jax.random.key(0), 3)
    >>> first, last = (jax.random.normal(key, (8, 8)) for key in keys[:2])
    >>> params, x = {"first": first, "last": last}, jax.random.normal(keys[2], (5, 8))
    >>> jn.training.scale_invariant(model, params, x).invariant
    {'first': True, 'last': False}
    """
    function, params = _function(model, params, arguments)
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    if not leaves:
        raise ValueError("params must have leaves: got a tree without any.")
    values = [jnp.asarray(leaf) for _, leaf in leaves]
    outputs = lambda trained: function(jax.tree.unflatten(structure, trained), *inputs)
    measure = _measure(outputs, values, axis, seed)
    alone = [measure([index]) for index in range(len(leaves))]
    layers = _layers(leaves)
    together = {layer: measure(layer)[:2] for layer in set(layers.values()) if len(layer) > 1}
    found = []
    for index, (path, _) in enumerate(leaves):
        slope, change, effect = alone[index]
        jointly = max(together.get(layers[index], (slope, change)))
        answer: Answer = "depends"
        if effect <= NOTHING:
            answer = "no effect"
        elif max(slope, change) <= tolerance:
            answer = "scale-invariant"
        elif jointly <= tolerance:
            answer = "with its layer"
        found.append(Dependence("/".join(parts(path)), answer, slope, change, jointly, effect))
    flags = [leaf.answer in ("scale-invariant", "no effect") for leaf in found]
    return ScaleInvariance(jax.tree.unflatten(structure, flags), tuple(found), tolerance)


def _function(
    model: Any, params: Any, arguments: Mapping[str, Any]
) -> tuple[Callable[..., Any], Any]:
    """Return a function of parameters and inputs, and the parameters."""
    if hasattr(model, "apply") and hasattr(model, "init"):  # of linen, or a pair of Haiku
        if not hasattr(model, "init_with_output"):
            return partial(model.apply, **arguments), params
        rest = {}
        if isinstance(params, Mapping) and "params" in params:
            rest = {name: value for name, value in params.items() if name != "params"}
            params = params["params"]
        apply = partial(model.apply, mutable=list(rest) or False, **arguments)

        def of_linen(trained: Any, *inputs: Any) -> Any:
            found = apply({"params": trained, **rest}, *inputs)
            return found[0] if rest else found

        return of_linen, params
    if any(each.__module__.startswith("flax.nnx") for each in type(model).__mro__):
        from flax import nnx

        graph, *states = nnx.split(model, nnx.Param, ...)
        expected = len(jax.tree.leaves(states[0]))
        count = len(jax.tree.leaves(params)) if isinstance(params, Mapping) else None
        if count != expected:
            got = type(params).__name__ if count is None else f"{count} leaves"
            raise ValueError(
                f"params must be those of the nnx model, with {expected} leaves: got {got}. Call "
                "scale_invariant(model, nnx.state(model, nnx.Param), x)."
            )

        def of_nnx(trained: Any, *inputs: Any) -> Any:
            # new variables, which belong to the trace and may change in it
            copied = jax.tree.map(lambda leaf: leaf, states[1])
            return nnx.merge(graph, trained, copied)(*inputs, **arguments)

        return of_nnx, params
    if not callable(model):
        got = type(model).__name__
        raise TypeError(f"model must be a function of params and inputs, or a module: got {got}.")
    return partial(model, **arguments), params


def _layers(leaves: Sequence[tuple[tuple, Any]]) -> dict[int, tuple[int, ...]]:
    """Return for each leaf the leaves of its layer, which have the same path but for the name."""
    folders: dict[tuple[str, ...], list[int]] = {}
    for index, (path, _) in enumerate(leaves):
        folders.setdefault(tuple(parts(path)[:-1]), []).append(index)
    return {index: tuple(folder) for folder in folders.values() for index in folder}


def _measure(
    outputs: Callable[[list[jax.Array]], Any],
    values: list[jax.Array],
    axis: int | None,
    seed: int,
) -> Callable[[Sequence[int]], tuple[float, float, float]]:
    """Return a function of some leaves that returns slope, change and effect of their scale.

    One program computes them all: leaf i is ``w[i] * exp(t[i] * r[i]) + s[i] * d[i]`` at random
    values w, with random directions d of the length of w; r is 1, or a random number of each
    channel.
    """
    rng = np.random.default_rng(seed)
    points, rates, directions = [], [], []
    for value in values:
        size = float(jnp.sqrt(jnp.mean(jnp.square(jnp.abs(value.astype(jnp.float32))))))
        draw = lambda by, shape=value.shape: (by * rng.standard_normal(shape)).astype(np.float32)
        points.append(value.astype(jnp.float32) + draw(JITTER * (size or 1.0)))
        directions.append(draw(size or JITTER))
        rates.append(_rates(value.shape, axis, seed))

    @jax.jit
    def probe(t, moved, along):
        def shifted(t, s):
            leaves = [
                (w * jnp.exp(t[i] * r) + s[i] * d).astype(value.dtype)
                for i, (w, r, d, value) in enumerate(
                    zip(points, rates, directions, values, strict=True)
                )
            ]
            return _flat(outputs(leaves))

        return jax.jvp(shifted, (t, jnp.zeros_like(t)), (moved, along))

    none = np.zeros(len(values), np.float32)
    base, _ = probe(none, none, none)
    spread = float(jnp.linalg.norm(base)) or 1.0

    def measure(some: Sequence[int]) -> tuple[float, float, float]:
        mask = none.copy()
        mask[list(some)] = 1
        length = lambda array: float(jnp.linalg.norm(array))
        effect = length(probe(none, none, mask)[1])
        slope, change = length(probe(none, mask, none)[1]), 0.0
        for factor in FACTORS:
            scaled, tangent = probe(np.float32(np.log(factor)) * mask, mask, none)
            slope, change = max(slope, length(tangent)), max(change, length(scaled - base))
        unit = max(effect, NOTHING * spread)
        return slope / unit, change / unit, effect / spread

    return measure


def _rates(shape: tuple[int, ...], axis: int | None, seed: int) -> np.ndarray:
    """Return the exponents of the scale: 1, or random ones between 1/3 and 1 along an axis."""
    if axis is None or not -len(shape) <= axis < len(shape):
        return np.ones((1,) * len(shape), np.float32)
    # the same numbers for a kernel and its bias
    drawn = np.random.default_rng(seed + 1).uniform(1 / 3, 1, shape[axis])
    found = [1] * len(shape)
    found[axis] = shape[axis]
    return drawn.astype(np.float32).reshape(found)


def _flat(outputs: Any) -> jax.Array:
    """Return all floating outputs in one vector."""
    arrays = [
        jnp.ravel(leaf).astype(jnp.float32)
        for leaf in map(jnp.asarray, jax.tree.leaves(outputs))
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    if not arrays:
        raise TypeError("outputs of the model must have floating numbers: got none.")
    return jnp.concatenate(arrays)
