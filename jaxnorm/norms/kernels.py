"""Norms of all weights of a model: functions of its tree of parameters.

    params = {"Dense_0": {"kernel": k, "bias": b}}       of paths "Dense_0/kernel", "Dense_0/bias"
    map_kernels(fn, params)                              {"Dense_0": {"kernel": fn(k), "bias": b}}

A loss that calls a model with such parameters is differentiated through the norm, and the
parameters that are trained stay as they are. What belongs to a kernel, such as its scale, is in a
dict by the path of the kernel.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxnorm.arguments.keywords import known_keywords

Tree = TypeVar("Tree")
Aux = TypeVar("Aux")
# the words that occur in a path, or a function of path and leaf
Match = str | tuple[str, ...] | Callable[[str, Any], bool]
LISTED = 8  # paths in an error


@known_keywords
def kernels_by_path(params: Any, /, *, match: Match = "kernel") -> dict[str, jax.Array]:
    """Return the kernels of a tree of parameters, by their paths.

    ``{"Dense_0/kernel": kernel, ...}``, for example to make a scale for each of them:
    ``{path: jnp.ones(k.shape[-1]) for path, k in kernels_by_path(params).items()}``.

    Args:
      params: any pytree: the ``params`` of linen, a ``State`` of nnx, the parameters of Haiku.
      match: which leaves are kernels: a word, or several of which one is enough, that is a part of
        the path, between slashes; or a function ``match(path, leaf)`` that returns whether a leaf
        is one. Haiku's and PyTorch's words are ``"w"`` and ``"weight"``.

    Returns:
      A dict from paths to leaves. In an nnx ``State`` and in a box of metadata the path ends with
      the field that holds the array.

    Raises:
      ValueError: no leaf is a kernel; two leaves whose paths are written alike.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> params = {"Dense_0": {"kernel": jnp.ones((2, 1)), "bias": jnp.zeros(1)}}
    >>> {path: kernel.shape for path, kernel in jn.kernels_by_path(params).items()}
    {'Dense_0/kernel': (2, 1)}
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    paths = {path_name(path): leaf for path, leaf in leaves}
    if len(paths) < len(leaves):
        names = [path_name(path) for path, _ in leaves]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"each leaf must have a path of its own: two are at {twice!r}. Rename one."
        )
    found = {path: leaf for path, leaf in paths.items() if matches(match, path, leaf)}
    if not found:
        rest = f" and {len(paths) - LISTED} more" if len(paths) > LISTED else ""
        raise ValueError(
            f"match must name leaves of params: got {match!r} for "
            f"{', '.join(list(paths)[:LISTED]) or 'a tree without leaves'}{rest}."
        )
    return found


@overload
def map_kernels(
    fn: Callable[..., Any],
    params: Tree,
    /,
    *by_path: Mapping[str, Any],
    match: Match = "kernel",
    has_aux: Literal[False] = False,
) -> Tree: ...


@overload
def map_kernels(
    fn: Callable[..., tuple[Any, Aux]],
    params: Tree,
    /,
    *by_path: Mapping[str, Any],
    match: Match = "kernel",
    has_aux: Literal[True],
) -> tuple[Tree, dict[str, Aux]]: ...


@known_keywords
def map_kernels(
    fn: Callable[..., Any],
    params: Tree,
    /,
    *by_path: Mapping[str, Any],
    match: Match = "kernel",
    has_aux: bool = False,
) -> Any:
    """Return a tree of parameters with ``fn(kernel)`` for each kernel.

    Call it inside of a loss function, so that gradients go through the norm::

        standardized = map_kernels(weight_standardization, params)
        normalized = map_kernels(weight_norm, params, scales)
        normalized, us = map_kernels(lambda k, u: spectral_norm(k, u)[:2], params, us, has_aux=True)

    Or call it after each step of an optimizer, to keep kernels at the length 1, as nGPT does
    (Loshchilov et al. 2024, arXiv 2410.01131): ``map_kernels(partial(unit_norm, axes=0), params)``.

    Args:
      fn: function of a kernel, and of one value from each dict of ``by_path``.
      params: any pytree, as in :func:`kernels_by_path`.
      *by_path: dicts with one value for each kernel, by its path, such as scales to be learned.
        :func:`spectral_vectors` makes those of spectral norm.
      match: which leaves are kernels, see :func:`kernels_by_path`.
      has_aux: whether ``fn`` returns a pair, of a new kernel and another value.

    Returns:
      The parameters, of the same structure; all other leaves are the same. With ``has_aux`` also
      the other values, by path.

    Raises:
      TypeError: ``fn`` that is no function, values that are no dict.
      ValueError: no leaf is a kernel; a dict that lacks the path of a kernel, or has another path.

    >>> import jax.numpy as jnp, jaxnorm as jn
    >>> params = {"Dense_0": {"kernel": jnp.array([[3.0], [4.0]]), "bias": jnp.ones(1)}}
    >>> scales = {"Dense_0/kernel": jnp.array([10.0])}
    >>> found = jn.map_kernels(jn.weight_norm, params, scales)
    >>> found["Dense_0"]["kernel"].round(5).tolist(), found["Dense_0"]["bias"].tolist()
    ([[6.0], [8.0]], [1.0])
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function of a kernel: got {type(fn).__name__}.")
    kernels = kernels_by_path(params, match=match)
    for values in by_path:
        if not isinstance(values, Mapping):
            kind = type(values).__name__
            raise TypeError(f"by_path must be dicts with a value for each path: got {kind}.")
        _check_paths(values, kernels)
    found = {path: fn(leaf, *(each[path] for each in by_path)) for path, leaf in kernels.items()}
    aux = {}
    if has_aux:
        aux = {path: other for path, (_, other) in found.items()}
        found = {path: kernel for path, (kernel, _) in found.items()}
    changed = jax.tree_util.tree_map_with_path(
        lambda path, leaf: found.get(path_name(path), leaf), params
    )
    return (changed, aux) if has_aux else changed


@known_keywords
def spectral_vectors(
    key: jax.Array, params: Any, /, *, match: Match = "kernel", dtype: DTypeLike = jnp.float32
) -> dict[str, jax.Array]:
    """Return a random vector for the spectral norm of each kernel, by path.

    Args:
      key: random key.
      params: any pytree, as in :func:`kernels_by_path`.
      match: which leaves are kernels, see :func:`kernels_by_path`.
      dtype: dtype of the vectors.

    Returns:
      A dict from paths to arrays ``(1, out)``, the ``u`` of :func:`spectral_norm`.

    Raises:
      ValueError: no leaf is a kernel; a kernel without axes.

    >>> import jax, jax.numpy as jnp, jaxnorm as jn
    >>> params = {"Dense_0": {"kernel": jnp.diag(jnp.array([4.0, 2.0])), "bias": jnp.zeros(2)}}
    >>> us = jn.spectral_vectors(jax.random.key(0), params)
    >>> step = lambda kernel, u: jn.spectral_norm(kernel, u, n_steps=20)[:2]
    >>> found, us = jn.map_kernels(step, params, us, has_aux=True)
    >>> found["Dense_0"]["kernel"].round(3).tolist()
    [[1.0, 0.0], [0.0, 0.5]]
    """
    kernels = kernels_by_path(params, match=match)
    for path, kernel in kernels.items():
        if jnp.ndim(kernel) < 2:
            raise ValueError(
                f"kernels must have rank 2 or more: got shape {jnp.shape(kernel)} at {path}. Leave "
                "it out by match."
            )
    keys = jax.random.split(key, len(kernels))
    return {
        path: jax.random.normal(own, (1, jnp.shape(kernel)[-1]), dtype)
        for own, (path, kernel) in zip(keys, kernels.items(), strict=True)
    }


def path_name(path: tuple) -> str:
    """Return a path as one string."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def matches(match: Match, path: str, leaf: Any) -> bool:
    """Return whether a leaf is a kernel."""
    if callable(match):
        return bool(match(path, leaf))
    words = {match} if isinstance(match, str) else set(match)
    return not words.isdisjoint(path.split("/"))


def _check_paths(values: Mapping[str, Any], kernels: Mapping[str, Any]) -> None:
    """Raise ValueError unless the values are those of the kernels."""
    if values.keys() != kernels.keys():
        wrong = sorted(values.keys() ^ kernels.keys())[:LISTED]
        raise ValueError(
            f"each kernel must have one value, by its path: got {', '.join(wrong)} in one of both "
            f"alone. The kernels are {', '.join(list(kernels)[:LISTED])}."
        )
