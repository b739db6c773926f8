"""Take a model's variables apart into leaves with paths, and put new values in."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.interop.layers import Shape

COLLECTIONS = {"params", "batch_stats"}
Path = tuple[str, ...]
# The kinds of nnx's layers that have a kernel.
KINDS = {
    "Linear": "Dense",
    "LinearGeneral": "Dense",
    "Conv": "Conv",
    "ConvTranspose": "ConvTranspose",
}


@dataclass(frozen=True)
class Tree:
    """The leaves of a model, by keys such as ``"params/Dense_0/kernel"``.

    Attributes:
      leaves: all that hold floating numbers.
      paths: their paths without the collection.
      rebuild: from new values by key to the tree, or to the model, which is updated.
      hints: kinds of the layers of an nnx model whose types say more than their parameters.
      epsilons: of the norms of an nnx model.
    """

    leaves: Mapping[str, Any]
    paths: Mapping[str, Path]
    rebuild: Callable[[Mapping[str, Any]], Any]
    hints: Mapping[str, str]
    epsilons: Mapping[str, float]

    def shape(self, key: str) -> Shape:
        return tuple(self.leaves[key].shape)


def take_apart(like: Any, name: str = "like") -> Tree:
    """Return the leaves of linen variables, an nnx model or State, or a dict of parameters.

    Raises:
      TypeError: no tree of arrays.
      ValueError: no leaf of floating numbers.
    """
    state, update = like, lambda new: new
    if is_model := _is_model(like):
        state, update = _of_model(like)
    found, structure = jax.tree_util.tree_flatten_with_path(state)
    for path, leaf in found:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype") or not path:
            raise TypeError(
                f"{name} must be variables, a model, or a dict of parameters, with arrays as "
                f"leaves: got {type(leaf).__name__} at {jax.tree_util.keystr(path) or 'the top'}. "
                "Give what init returns."
            )
    paths = [_components(path) for path, _ in found]
    floating = [jnp.issubdtype(leaf.dtype, jnp.inexact) for _, leaf in found]
    if not any(floating):
        raise ValueError(
            f"{name} must hold parameters: got {len(found)} leaves, none of floating numbers. "
            "Give what init returns."
        )
    keys = ["/".join(path) for path in paths]
    kept = [i for i, used in enumerate(floating) if used]

    def rebuild(values: Mapping[str, Any]) -> Any:
        new = [values.get(key, leaf) for key, (_, leaf) in zip(keys, found, strict=True)]
        return update(jax.tree_util.tree_unflatten(structure, new))

    layers = dict(_layers(like, [paths[i] for i in kept])) if is_model else {}
    return Tree(
        {keys[i]: found[i][1] for i in kept},
        _places({keys[i]: paths[i] for i in kept}),
        rebuild,
        _hints(layers),
        {path: at.epsilon for path, at in layers.items() if _is_float(at, "epsilon")},
    )


def _is_model(like: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(like, nnx.Module)


def _of_model(model: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return the state of an nnx model, and a function that puts in a new one."""
    from flax import nnx

    def update(state: Any) -> Any:
        nnx.update(model, state)
        return model

    return nnx.state(model), update


def paths_of(keys: Iterable[str]) -> dict[str, Path]:
    """Return the paths of the leaves of a model without collections, by keys."""
    return _places({key: tuple(key.split("/")) for key in keys})


def _places(paths: Mapping[str, Path]) -> dict[str, Path]:
    """Take collections off paths, and put what belongs to another layer's parameter next to it."""
    # linen's top level is of collections; a single layer, a module or a model of nnx has none
    top = {path[0] for path in paths.values()}
    first = 1 if "params" in top or top <= COLLECTIONS else 0
    known = {path[first:] for path in paths.values()}
    return {key: _within_layer(path[first:], known) for key, path in paths.items()}


def _components(path: tuple) -> Path:
    """Return the names of a path of JAX, without the field of a box or of an nnx Variable."""
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey):
        path = path[:-1]
    names: list[str] = []
    for key in path:
        part = getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))
        # WeightNorm of nnx has a dict by paths.
        names.append("/".join(map(str, part)) if isinstance(part, tuple) else str(part))
    return tuple(names)


def _within_layer(path: Path, known: set[Path]) -> Path:
    """Return the path of a leaf, with what weight norm and spectral norm keep in their layer.

    ``WeightNorm_0`` keeps ``Dense_0/kernel/scale``, where ``Dense_0`` is next to it.
    """
    name = path[-1]
    if len(path) > 1 and path[-2] in ("scales", "batch_stats"):  # nnx
        leaf = name if path[-2] == "batch_stats" else f"{name}/scale"
        if (*path[:-2], "layer_instance", *leaf.split("/")[:-1]) in known:
            return (*path[:-2], *leaf.split("/")[:-2], "/".join(leaf.split("/")[-2:]))
    if found := re.fullmatch(r"(.+)/(\w+?)(?:/value)?/(scale|u|sigma)", name):
        inner = tuple(found[1].split("/"))
        for parent in (path[:-2], path[:-1]):
            if (*parent, *inner, found[2]) in known:
                path = (*parent, *inner, f"{found[2]}/{found[3]}")
                break
    return tuple(part for part in path if part != "layer_instance")


def _layers(model: Any, paths: list[Path]) -> Iterator[tuple[str, Any]]:
    """Yield the layers of an nnx model that have parameters, by their paths."""
    for path in {path[:-1] for path in paths}:
        layer = model
        for name in path:
            try:
                layer = layer[int(name)] if name.isdigit() else getattr(layer, name)
            except (AttributeError, IndexError, KeyError, TypeError):
                break
        else:
            yield "/".join(part for part in path if part != "layer_instance"), layer


def _is_float(layer: Any, name: str) -> bool:
    return isinstance(getattr(layer, name, None), float)


def _hints(layers: Mapping[str, Any]) -> dict[str, str]:
    """Return the kinds of transposed convolutions, which their parameters do not tell."""
    found = {}
    for path, layer in layers.items():
        kind = KINDS.get(type(layer).__name__)
        if getattr(layer, "transpose_kernel", False):
            kind = "ConvTranspose(transpose_kernel=True)"
        if kind is not None:
            found[path] = kind
    return found


def converted(value: np.ndarray, leaf: Any) -> Any:
    """Return a copy of an array in the dtype of a leaf, as an array of JAX or NumPy."""
    value = np.asarray(value).astype(leaf.dtype)
    return value if isinstance(leaf, np.ndarray) else jnp.array(value)


def loses(value: np.ndarray, dtype: Any) -> bool:
    """Return whether a cast to a dtype changes a value."""
    value = np.asarray(value)
    if np.can_cast(value.dtype, dtype, "safe"):
        return False
    with np.errstate(all="ignore"):
        back = value.astype(dtype).astype(value.dtype)
    same = (back == value) | ((back != back) & (value != value))
    return not bool(same.all())
