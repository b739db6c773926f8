"""Watch the layers and norms of a model while it is traced."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.flax_common.choices import Choice, check_named
from jaxnorm.flax_common.folding import Graph
from jaxnorm.flax_common.inputs import RefusedError
from jaxnorm.flax_common.layers import Layer, Norm, negative_axes
from jaxnorm.flax_common.tracing import Tags, trace

MODE = "use_running_average"


class Watch:
    """The layers and norms that a model calls, by the numbers of their paths.

    Attributes:
      numbers: the numbers of the modules, by their paths.
      layers: the layers that were called.
      norms: the norms that were called, without those that are not chosen.
      dtypes: the dtypes of their outputs.
    """

    def __init__(self, numbers: dict[str, int] | None = None) -> None:
        """Watch a model; ``numbers`` are of an earlier trace, of modules with the same paths."""
        self.tags = Tags()
        self.numbers: dict[str, int] = {} if numbers is None else numbers
        self.layers: dict[int, Layer] = {}
        self.norms: dict[int, Norm] = {}
        self.dtypes: dict[int, Any] = {}

    def call(
        self,
        call: Callable[..., Any],
        describe: Callable[[str, jax.Array], Layer | Norm | None],
        path: str,
        variables: Mapping[str, Any],
        given: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Any:
        """Call a module, and name what it reads and returns.

        Args:
          call: the call of the module.
          describe: returns what the module is, for a path and its first argument.
          path: its path.
          variables: its variables, by name.
          given: the positional arguments of the call.
          named: the keyword arguments of the call.
        """
        key = "x" if "x" in named else "inputs"
        x = given[0] if given else named.get(key)
        if not isinstance(x, jax.Array | np.ndarray):
            return call(*given, **named)
        x = jnp.asarray(x)
        if (about := describe(path, x)) is None:
            return call(*given, **named)
        number = self.numbers.setdefault(path, len(self.numbers))
        if isinstance(about, Layer):
            self.layers[number] = about
        else:
            self.norms[number] = about
        for name, value in variables.items():
            self.tags(value, number, name)
        x = self.tags(x, number, "in")
        y = call(x, *given[1:], **named) if given else call(**(named | {key: x}))
        if not isinstance(y, jax.Array):
            return y
        self.dtypes[number] = y.dtype
        return self.tags(y, number, "out")

    def trace(self, run: Callable[..., Any], arrays: list[jax.Array]) -> Graph:
        """Return the layers and norms of a model that ``run(arrays)`` calls."""
        return Graph(trace(run, self.tags, arrays), self.layers, self.norms)


def arrays_of(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the arrays in a tree, and a function from other arrays to such a tree.

    Raises:
      TypeError: an array is abstract, or traced.
    """
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]
    for i in places:
        if isinstance(leaves[i], jax.ShapeDtypeStruct | jax.core.Tracer):
            raise TypeError(
                f"fold takes arrays, outside of jax.jit: got {leaves[i]}. Call it once, before the "
                "function that is compiled."
            )

    def with_arrays(arrays: list[Any]) -> Any:
        new = dict(zip(places, arrays, strict=True))
        return jax.tree.unflatten(structure, [new.get(i, leaf) for i, leaf in enumerate(leaves)])

    return [leaves[i] for i in places], with_arrays


def norm_of(
    path: str, module: Any, x: jax.Array, *, linear: bool, names: Mapping[str, Any], why: str = ""
) -> Norm:
    """Describe a norm that is called on ``x``.

    Args:
      path: its path.
      module: the norm.
      x: what it normalizes.
      linear: whether it is a batch norm.
      names: the other arguments of its call, by name.
      why: why it cannot be folded, or "".
    """
    given = module.axis if linear else getattr(module, "feature_axes", -1)
    features = negative_axes(given, x.ndim)
    used = [name for name, value in names.items() if value is not None and name != MODE]
    return Norm(
        path,
        type(module).__name__,
        features,
        tuple(x.shape[axis] for axis in features),
        linear,
        float(module.epsilon),
        float(getattr(module, "scale_offset", 0)),
        f"it is called with {', '.join(used)}" if used else why,
    )


def check_chosen(chosen: tuple[Choice, ...] | None, watch: Watch) -> None:
    """Raise ValueError unless the model has called norms, and each that a path names."""
    check_named("only", chosen, [norm.path for norm in watch.norms.values()])
    if not watch.norms:
        raise ValueError(
            "the model must call a norm that only names: it calls no such BatchNorm, LayerNorm, "
            "RMSNorm, GroupNorm or InstanceNorm, of Flax's or ours. Subclasses stay as they are."
        )


def refuse_training(path: str) -> None:
    """Raise an error for a batch norm that is called in training."""
    raise RefusedError(
        "batch norms must normalize by their running statistics to be folded: "
        f"{path or 'the model'} uses the statistics of its batch. Call the model as for "
        "evaluation: train=False or use_running_average=True, and model.eval() in nnx."
    )
