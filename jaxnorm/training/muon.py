"""Which axes of a weight Muon takes for the matrix that it orthogonalizes."""

from typing import Any

import jax

from jaxnorm.norms.kernels import Match, matches, path_name
from jaxnorm.training.roles import DECAYED, labels, parts

TABLES = ("embedding", "embeddings")
# Flax's attention splits the output of these into heads: (features, heads, head_dim)
TO_HEADS = ("query", "key", "value")


def muon_dimensions(
    params: Any,
    /,
    *,
    stacked: Match | None = None,
    leave: Match | None = TABLES,
) -> Any:
    """Return the axes of each weight's matrix, for ``optax.contrib.muon``.

    By default Muon orthogonalizes every leaf of rank 2, and no other. Of a stack of layers, as
    ``nn.scan`` makes it, these are the gains, ``(layers, C)``, of which each layer then moves the
    others; and the kernels, ``(layers, in, out)``, are left to Adam. Pass this function, or a
    partial of it, as ``muon_weight_dimension_numbers``.

    ======================================  ===================  ==============
    kernel                                  reduced axes         output axes
    ======================================  ===================  ==============
    ``(in, out)``                           0                    1
    convolution ``(..., in, out)``          all but the last     the last
    query, key, value ``(in, heads, dim)``  0                    1 and 2
    out ``(heads, dim, out)``               0 and 1              2
    a stack of layers of any of them        one more to the right of the layers
    ======================================  ===================  ==============

    Args:
      params: any pytree, as in :func:`labels`.
      stacked: the leaves with a leading axis of layers: a word, or several, of their paths,
        between slashes, such as the name of the scanned module; or a function
        ``stacked(path, leaf)``. Each layer is a matrix of its own.
      leave: the weights that Adam trains, likewise; by default embeddings. Muon's authors leave it
        the last layer of a language model, too.

    Returns:
      A tree of ``MuonDimensionNumbers``, and of None for each leaf that Adam trains.

    Raises:
      ImportError: optax is missing, or has no ``MuonDimensionNumbers``.
      TypeError, ValueError: as :func:`labels`; ``stacked`` that names no weight.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> params = {"layers": {"scale": jnp.ones((3, 8)), "kernel": jnp.ones((3, 8, 4))}}
    >>> found = jn.training.muon_dimensions(params, stacked="layers")["layers"]
    >>> found["scale"], found["kernel"].reduction_axis, found["kernel"].output_axis
    (None, (1,), (2,))
    """
    try:
        from optax.contrib import MuonDimensionNumbers
    except ImportError as error:
        raise ImportError(
            "muon_dimensions needs optax.contrib.MuonDimensionNumbers, which is not installed: "
            "pip install 'optax>=0.2.6'."
        ) from error
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    found: list[Any] = []
    seen = False
    for (path, leaf), role in zip(leaves, jax.tree.leaves(labels(params)), strict=True):
        name, weight = path_name(path), role in DECAYED
        layers = stacked is not None and matches(stacked, name, leaf)
        seen |= layers and weight
        if not weight or (leave is not None and matches(leave, name, leaf)):
            found.append(None)
            continue
        axes = _axes(parts(path), len(leaf.shape) - layers)
        # a stack of vectors, which have no matrix
        shift = lambda some, by=int(layers): tuple(axis + by for axis in some)
        found.append(axes and MuonDimensionNumbers(*map(shift, axes)))
    # within optax the leaves of other groups are masked, and the stack may be among them
    if stacked is not None and not seen and any(leaf is not None for leaf in found):
        raise ValueError(f"stacked must name weights of params: got {stacked!r}, which names none.")
    return jax.tree.unflatten(structure, found)


def _axes(names: list[str], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the reduced axes and the output axes of a kernel of this rank, or None."""
    if rank < 2:
        return None
    outputs = rank - 1 if rank == 3 and not set(names[-2:-1]).isdisjoint(TO_HEADS) else 1
    return tuple(range(rank - outputs)), tuple(range(rank - outputs, rank))
