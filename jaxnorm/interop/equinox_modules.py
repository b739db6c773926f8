"""Take Equinox's modules and their state apart, and put them together, as the pytrees they are."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

Options = dict[str, dict[str, Any]]


def leaves_of(source: Any) -> tuple[dict[str, np.ndarray], Options]:
    """Return the arrays of a module, or of (module, state), by key, and options by path.

    Raises:
      ValueError: a batch norm without its state.
    """
    model, state = _parts(source)
    found: dict[str, np.ndarray] = {}
    options: Options = {}
    for path, node in _nodes(model, ()):
        key = ".".join(path)
        start = f"{key}." if key else ""
        options[key] = {"class": type(node).__name__}
        if isinstance(getattr(node, "eps", None), float):
            options[key] |= {"epsilon": node.eps}
        if _is_batch_norm(node):
            options[key] |= {"momentum": node.momentum, "mode": node.mode}
            found |= {f"{start}{name}": value for name, value in _statistics(node, state, key)}
        elif hasattr(node, "shape") and hasattr(node, "dtype") and np.ndim(node):
            found[key] = np.asarray(node)
    return found, options


def _parts(source: Any) -> tuple[Any, Any]:
    """Return a module and its state, or None."""
    if isinstance(source, tuple | list) and len(source) == 2 and _is_state(source[1]):
        return source[0], source[1]
    return source, None


def _is_state(value: Any) -> bool:
    return type(value).__name__ == "State" and callable(getattr(value, "get", None))


def _is_batch_norm(node: Any) -> bool:
    return hasattr(node, "batch_state_index") and hasattr(node, "ema_state_index")


def _nodes(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield modules and leaves with their paths, those around others first."""
    yield path, node
    below, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda other: other is not node)
    for key, child in below:
        if child is not node and type(child).__name__ != "StateIndex":
            yield from _nodes(child, (*path, *map(_name, key)))


def _name(key: Any) -> str:
    return str(getattr(key, "name", getattr(key, "idx", getattr(key, "key", key))))


def _statistics(norm: Any, state: Any, path: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the running statistics of a batch norm by their names."""
    hidden = norm.mode == "batch"
    first = norm.batch_counter if hidden else norm.ema_first_time_index
    both = norm.batch_state_index if hidden else norm.ema_state_index
    if state is None and not hasattr(first.init, "dtype"):
        raise ValueError(
            f"source must have the state of batch norm {path!r}: got the module alone. Give "
            "(module, state)."
        )
    value, (mean, var) = (
        index.init if state is None else state.get(index) for index in (first, both)
    )
    names = ("hidden_mean", "hidden_var", "counter") if hidden else ("mean", "var", "first_time")
    yield from zip(names, map(np.asarray, (mean, var, value)), strict=True)
    if hidden:
        yield "momentum", np.asarray(norm.momentum)


def updated(like: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return a module, or (module, state), with the arrays of ``leaves_of``."""
    model, state = _parts(like)
    norms = [(path, node) for path, node in _nodes(model, ()) if _is_batch_norm(node)]

    def new(path: Any, leaf: Any) -> Any:
        array = arrays.get(".".join(map(_name, path)))
        return leaf if array is None else jax.numpy.asarray(array)

    model = jax.tree_util.tree_map_with_path(new, model)
    if state is None:
        return model
    leaves, structure = jax.tree_util.tree_flatten(state)
    state = jax.tree_util.tree_unflatten(
        structure, leaves
    )  # set would spoil the one that was given
    for path, norm in norms:
        value = lambda name, path=path: jax.numpy.asarray(arrays[".".join((*path, name))])
        if norm.mode == "batch":
            steps = state.get(norm.batch_counter)  # of a weak type, which a sum keeps
            state = state.set(norm.batch_counter, steps * 0 + int(value("counter")))
            index, names = norm.batch_state_index, ("hidden_mean", "hidden_var")
        else:
            state = state.set(norm.ema_first_time_index, value("first_time"))
            index, names = norm.ema_state_index, ("mean", "var")
        state = state.set(index, tuple(map(value, names)))
    return model, state
