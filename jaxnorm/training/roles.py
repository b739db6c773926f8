"""Roles of parameters, by their names and shapes: for groups of an optimizer, and weight decay."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.norms.kernels import Match, matches, path_name

ROLES: tuple[str, ...] = (
    "gain",
    "offset_gain",
    "qk_gain",
    "bias",
    "coefficient",
    "statistic",
    "weight",
    "weight_before_norm",
)
DECAYED = ("weight", "weight_before_norm")

# Names of leaves, in Flax, Haiku, PyTorch, and our modules and cells. Those with an underscore in
# front are ends of names, such as input_scale.
GAINS = ("scale", "gain", "gamma", "_scale", "_gain", "_gamma")
BIASES = ("bias", "beta", "offset", "b", "shift", "threshold", "_bias")
COEFFICIENTS = ("alpha", "learned_epsilon", "mean_scale", "mean_logits", "var_logits")
# "weight" is what PyTorch and Equinox call a gain, too: of a norm, whose rank is 1
EITHER = ("weight", "w")
STATISTICS = ("mean", "var", "renorm_mean", "renorm_stddev", "r_max", "d_max", "steps")
QK_NORMS = ("q_norm", "k_norm", "query_ln", "key_ln", "query_norm", "key_norm")
# the fields that hold the array in the boxes of linen and in the variables of nnx
BOXES = ("value", "raw_value")


def labels(
    params: Any,
    /,
    *,
    offset: Match | None = None,
    qk: Match = QK_NORMS,
    before_norm: Any = None,
) -> Any:
    """Return the role of each leaf of a tree of parameters, for ``optax.multi_transform``.

    Roles follow from the names of leaves, not from their values. Leading axes of layers, which
    ``nn.scan`` and ``nn.vmap`` add, change no role.

    ====================  ==========================================================================
    gain                  multiplies normalized values: ``scale``; also the ``input_scale``,
                          ``recurrent_scale`` and ``cell_scale`` of cells, the length in weight
                          norm, the one number of ScaleNorm. GlobalResponseNorm's starts at 0.
    offset_gain           a gain to which the norm adds 1 (``scale_offset=1``); see ``offset``
    qk_gain               a gain of queries or keys; see ``qk``. It sets the size of the logits.
    bias                  is added: ``bias``; also FilterResponseNorm's ``threshold``, below which
                          no output is, and DynamicErf's ``shift``
    coefficient           shapes a norm: ``alpha`` of DynamicTanh and DynamicErf, which stands for
                          1 / deviation; ``mean_logits`` and ``var_logits`` of SwitchableNorm, for
                          which 0 is an equal blend; ``learned_epsilon`` of FilterResponseNorm,
                          ``v`` of EvoNorm, ``mean_scale`` of GraphNorm. Also any other vector or
                          number.
    statistic             is not trained: running statistics, counters, keys, integers
    weight                every other leaf: kernels, embeddings, and those of conditional norms
    weight_before_norm    a weight whose scale no output depends on; see ``before_norm``
    ====================  ==========================================================================

    Args:
      params: any pytree: the ``params`` or all variables of linen, boxed or not, a ``State`` of
        nnx, parameters of Haiku or of :mod:`jaxnorm.recurrent`. Leaves may be abstract. Of linen's
        variables all collections but ``params`` are statistics.
      offset: the gains to which their norm adds an offset, which a tree cannot tell: a word, or
        several, of their paths, between slashes, or a function ``offset(path, leaf)``. As
        :func:`jaxnorm.map_kernels` has it.
      qk: the gains of queries and keys, likewise; by default those of norms that are named as in
        Flax and in QKNorm.
      before_norm: the result of :func:`scale_invariant`, or a tree of booleans like ``params``.

    Returns:
      A tree of strings of :data:`ROLES`, of the structure of ``params``.

    Raises:
      TypeError: a leaf that is no array, such as a model; an array without a tree.
      ValueError: ``before_norm`` of another structure; ``offset`` that names no gain.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> params = {
    ...     "Dense_0": {"kernel": jnp.ones((2, 4)), "bias": jnp.zeros(4)},
    ...     "RMSNorm_0": {"scale": jnp.zeros(4)},
    ... }
    >>> jn.training.labels(params, offset="RMSNorm_0")
    {'Dense_0': {'bias': 'bias', 'kernel': 'weight'}, 'RMSNorm_0': {'scale': 'offset_gain'}}
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    kinds = _variables(params, len(leaves))
    folders = _folders(leaves)
    invariant = _flags(before_norm, structure)
    found = []
    for (path, leaf), kind, before in zip(leaves, kinds, invariant, strict=True):
        names = parts(path)
        role = _role(names, leaf, kind, folders[tuple(names[:-1])], isinstance(params, Mapping))
        if role == "gain" and matches(qk, path_name(path), leaf):
            role = "qk_gain"
        if role.endswith("gain") and offset is not None and matches(offset, path_name(path), leaf):
            role = "offset_gain"
        found.append("weight_before_norm" if role == "weight" and before else role)
    if offset is not None and "offset_gain" not in found:
        gains = [
            path_name(path)
            for (path, _), role in zip(leaves, found, strict=True)
            if role.endswith("gain")
        ]
        raise ValueError(
            f"offset must name gains: got {offset!r} for the gains {', '.join(gains) or '(none)'}."
        )
    return jax.tree.unflatten(structure, found)


def weight_decay_mask(
    params: Any,
    /,
    *,
    also: Match | None = None,
    offset: Match | None = None,
    qk: Match = QK_NORMS,
    before_norm: Any = None,
) -> Any:
    """Return True for each leaf that decays, for the ``mask`` of ``optax.adamw``.

    Weights decay. Gains, biases and the other roles of :func:`labels` do not.

    A gain and the linear layer behind it share one scale: ``(x * gain) @ kernel`` stays the same
    if ``gain`` is multiplied and ``kernel`` divided by a number. Decay of the kernel alone thus
    moves size into the gain; decay of both bounds their product. Wang et al. 2026 (arXiv
    2605.26895) find that decay helps the gains in front of linear layers and harms those whose
    output is added to the residual stream, or is the output. Name the former by ``also``.

    A weight in front of a norm decays too. Decay then changes no output by itself; it shrinks the
    weight, and steps turn it further.

    Args:
      params: any pytree, as in :func:`labels`.
      also: further leaves that decay: a word, or several, of their paths, between slashes, or a
        function ``also(path, leaf)``.
      offset: as in :func:`labels`. All gains are treated alike.
      qk: as in :func:`labels`.
      before_norm: as in :func:`labels`.

    Returns:
      A tree of booleans, of the structure of ``params``.

    Raises:
      TypeError: as :func:`labels`.
      ValueError: as :func:`labels`; ``also`` that names no leaf.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> params = {"LayerNorm_0": {"scale": jnp.ones(4)}, "Dense_0": {"kernel": jnp.ones((4, 2))}}
    >>> jn.training.weight_decay_mask(params)
    {'Dense_0': {'kernel': True}, 'LayerNorm_0': {'scale': False}}
    >>> jn.training.weight_decay_mask(params, also="LayerNorm_0")
    {'Dense_0': {'kernel': True}, 'LayerNorm_0': {'scale': True}}
    """
    found = labels(params, offset=offset, qk=qk, before_norm=before_norm)
    chosen = jax.tree_util.tree_map_with_path(
        lambda path, leaf: also is not None and matches(also, path_name(path), leaf), params
    )
    if also is not None and not any(jax.tree.leaves(chosen)):
        raise ValueError(f"also must name leaves of params: got {also!r}, which names none.")
    return jax.tree.map(lambda role, more: role in DECAYED or more, found, chosen)


def parts(path: tuple) -> list[str]:
    """Return the names along a path, without the field of a box at its end."""
    names = [name for key in path for name in path_name((key,)).split("/")]
    boxed = len(path) > 1 and isinstance(path[-1], jax.tree_util.GetAttrKey) and names[-1] in BOXES
    return names[:-1] if boxed else names


def _role(
    names: list[str], leaf: Any, kind: str, siblings: Mapping[str, tuple[int, ...]], dicts: bool
) -> str:
    """Return the role of a leaf, but for the choices that arguments make."""
    _check_leaf(names, leaf)
    name, rank = names[-1] if names else "", len(leaf.shape)
    named = lambda words: any(
        name == word or (word[0] == "_" and name.endswith(word)) for word in words
    )
    if kind == "state" or not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return "statistic"
    # without a collection or a class, running statistics are known by each other
    if kind == "unknown" and name in STATISTICS and "var" in siblings:
        return "statistic"
    if name in COEFFICIENTS:
        return "coefficient"
    # nnx keeps the lengths of weight norm in a dict of this name
    if named(GAINS) or (name in EITHER and rank < 2) or "scales" in names[-2:-1]:
        return "gain"
    if named(BIASES):
        return "bias"
    # EvoNorm's v, in a stack of layers too, has the shape of its scale
    if rank < 2 or siblings.get("scale") == leaf.shape:
        return "coefficient"
    return "weight"


def _check_leaf(names: list[str], leaf: Any) -> None:
    # modules have a dtype as well, but no shape, which linen says at length
    if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")):
        where = f" at {'/'.join(names)!r}" if names else ""
        raise TypeError(
            f"leaves of params must be arrays: got {type(leaf).__name__}{where}. Of a linen model "
            "pass the variables that init returns, of an nnx model nnx.state(model, nnx.Param)."
        )
    if not names:
        raise TypeError(
            "params must be a tree, whose names tell the roles: got one array, of shape "
            f"{leaf.shape}. Pass the tree that it is in."
        )


def _folders(leaves: list) -> dict[tuple[str, ...], dict[str, tuple[int, ...]]]:
    """Return the shapes of the leaves of each folder, by name."""
    found: dict[tuple[str, ...], dict[str, tuple[int, ...]]] = {}
    for path, leaf in leaves:
        *folder, name = parts(path) or [""]
        found.setdefault(tuple(folder), {})[name] = getattr(leaf, "shape", ())
    return found


def _variables(params: Any, count: int) -> list[str]:
    """Return for each leaf whether it is a parameter, other state, or whether that is unknown.

    Linen says so by the collection, and nnx by the class of the variable.
    """
    if isinstance(params, Mapping) and "params" in params:
        collections = jax.tree_util.tree_flatten_with_path(params)[0]
        return ["parameter" if parts(path)[0] == "params" else "state" for path, _ in collections]
    found = []
    for node in jax.tree.leaves(params, is_leaf=_is_variable):
        found += [_kind(node)] * len(jax.tree.leaves(node))
    assert len(found) == count
    return found


def _is_variable(node: Any) -> bool:
    """Return whether a node is a variable of nnx, by the names of its classes.

    Flax need not be installed for the trees of other libraries.
    """
    return "Variable" in _classes(node)


def _kind(node: Any) -> str:
    if not _is_variable(node):
        return "unknown"
    return "parameter" if "Param" in _classes(node) else "state"


def _classes(node: Any) -> list[str]:
    return [each.__name__ for each in type(node).__mro__]


def _flags(before_norm: Any, structure: Any) -> list[bool]:
    """Return a boolean for each leaf."""
    if before_norm is None:
        return [False] * structure.num_leaves
    flags, given = jax.tree.flatten(getattr(before_norm, "invariant", before_norm))
    if given != structure:
        raise ValueError(
            "before_norm must be a tree of booleans of the structure of params: got "
            f"{len(flags)} leaves for {structure.num_leaves}, or other names. Pass the "
            "result of scale_invariant for the same tree."
        )
    return [bool(flag) for flag in flags]
