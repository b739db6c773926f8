"""A transformation of optax after which weights have length 1."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxnorm.arguments.axes import integer
from jaxnorm.arguments.dtypes import compute_dtype
from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.norms.kernels import Match, kernels_by_path, path_name
from jaxnorm.norms.vectors import unit_norm


@known_keywords
def unit_weights(
    *, axes: int | Sequence[int], match: Match = "kernel", epsilon: float = 1e-12
) -> Any:
    """Return a transformation of optax that ends each step at weights of length 1.

    ``updates = unit_norm(params + updates) - params``, so that ``params + updates`` has length 1
    along ``axes``, as in nGPT (Loshchilov et al. 2024, arXiv 2410.01131). It is the last of a
    chain. Other leaves keep their updates::

        optax.chain(
            optax.adam(1e-3),
            unit_weights(axes=0, match=("query", "key", "value", "up", "head")),
            unit_weights(axes=-1, match=("embedding", "out", "down")),
        )

    Start from weights of length 1: ``map_kernels(partial(unit_norm, axes=0), params)``. The first
    step brings others there too, but rounds them as coarsely as the weights that it starts from.

    Lengths are computed in float32 at least. The new weights are rounded to the dtype of the
    weights, and updates have that dtype. In bfloat16 a length is 1 within 2**-8, as far as the
    rounding of its elements goes, and steps below half a unit in the last place of a weight are
    lost, as with any optimizer of such weights. ``params + updates`` equals the projected weight
    to the last bit where an element changes by less than a factor of two, and elsewhere within one
    unit in the last place of the larger of old and new weight.

    Args:
      axes: the axes of one vector: 0 for a kernel of Flax that reads the features of the model,
        -1 for one that writes them. In a stack of layers 0 is the axis of layers.
      match: which leaves: a word, or several, of their paths, between slashes, or a function
        ``match(path, leaf)``, see :func:`jaxnorm.map_kernels`.
      epsilon: the least length that divides. A vector of zeros stays 0.

    Returns:
      An ``optax.GradientTransformation`` without state. Its ``update`` needs the parameters.

    Raises:
      ImportError: optax is missing.
      TypeError: axes that are no ints.
      ValueError: in ``init`` and ``update``: a match that names no leaf, axes that a leaf lacks,
        parameters that are missing.

    >>> import jax.numpy as jnp, jaxnorm as jn, optax
    >>> params = {"kernel": jnp.array([[0.6], [0.8]])}
    >>> optimizer = optax.chain(optax.sgd(1.0), jn.training.unit_weights(axes=0))
    >>> gradient = {"kernel": jnp.array([[0.6], [-0.8]])}
    >>> updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    >>> optax.apply_updates(params, updates)["kernel"].round(6).tolist()
    [[0.0], [1.0]]
    """
    try:
        import optax
    except ImportError as error:
        raise ImportError("unit_weights needs optax: pip install optax.") from error
    given = axes if isinstance(axes, list | tuple) else (axes,)
    reduced = tuple(integer(axis, "axes must be an int or ints") for axis in given)

    def init(params: Any) -> Any:
        for path, leaf in kernels_by_path(params, match=match).items():
            _check(reduced, path, leaf)
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(
                "unit_weights must know the parameters: got None. Call "
                "update(updates, state, params)."
            )
        kernels = kernels_by_path(params, match=match)

        def project(path: tuple, change: jax.Array) -> jax.Array:
            kernel = kernels.get(path_name(path))
            return change if kernel is None else _step(kernel, change, reduced, epsilon)

        return jax.tree_util.tree_map_with_path(project, updates), state

    return optax.GradientTransformation(init, update)


def _check(axes: tuple[int, ...], path: str, leaf: Any) -> None:
    if any(not -leaf.ndim <= axis < leaf.ndim for axis in axes):
        raise ValueError(
            f"axes must be of each leaf that match names: got {axes} for shape {leaf.shape} at "
            f"{path}. Name leaves of one kind, and chain unit_weights for others."
        )


def _step(kernel: jax.Array, change: jax.Array, axes: tuple[int, ...], epsilon: float) -> jax.Array:
    """Return the update that ends at length 1, in the dtype of the kernel."""
    dtype = compute_dtype(kernel.dtype)
    new = unit_norm(kernel.astype(dtype) + change.astype(dtype), axes=axes, epsilon=epsilon)
    # Where an element changes by less than a factor of two, the difference is exact, and adding
    # it to the kernel gives the rounded new element again.
    return new.astype(kernel.dtype) - kernel
