"""Checks of the pytrees that streams are made of: specs of an element, batches and weights."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.arguments import validation
from jaxnorm.arguments.dtypes import compute_dtype

Tree = Any


def element(path, spec) -> tuple[tuple[int, ...], jnp.dtype]:
    """Return the shape of one element and the dtype of its statistics."""
    shape, dtype = jnp.shape(spec), jnp.result_type(spec)
    if not jnp.issubdtype(dtype, jnp.inexact):
        hint = (
            " For a shape pass jax.ShapeDtypeStruct(shape, jnp.float32)."
            if isinstance(spec, int)
            else ""
        )
        raise TypeError(
            f"specs{jax.tree_util.keystr(path)} must be floating point: got {dtype}. Cast its "
            f"observations first.{hint}"
        )
    return shape, compute_dtype(dtype)


def leaves(structure, elements: Sequence[jax.Array], batch: Tree) -> list[jax.Array]:
    """Return the leaves of a batch after checking them against statistics of one element each."""
    if (found := jax.tree.structure(batch)) != structure:
        raise ValueError(
            f"batch must have the structure of the state: got {found} for {structure}."
        )
    checked = []
    for (path, leaf), one in zip(jax.tree_util.tree_leaves_with_path(batch), elements, strict=True):
        name, shape = f"batch{jax.tree_util.keystr(path)}", jnp.shape(one)
        leaf = validation.floating(leaf, name)
        if leaf.ndim < len(shape) or leaf.shape[leaf.ndim - len(shape) :] != shape:
            raise ValueError(
                f"{name} must end in the shape of one element, {shape}: got {leaf.shape}."
            )
        if jnp.iscomplexobj(leaf) and not jnp.iscomplexobj(one):
            raise TypeError(
                f"{name} must be real, as in the specs: got {leaf.dtype}. Pass its real part."
            )
        checked.append(leaf)
    return checked


def mask(weights: jax.Array | None, leaf: jax.Array, one: jax.Array) -> jax.Array | None:
    """Reshape weights of the first batch axes so that they broadcast against a leaf."""
    if weights is None:
        return None
    if weights.shape != leaf.shape[: min(weights.ndim, leaf.ndim - one.ndim)]:
        lead = leaf.shape[: leaf.ndim - one.ndim]
        raise ValueError(
            f"weights must have the shape of the first batch axes, {lead}: got {weights.shape}."
        )
    return validation.mask(
        weights.reshape(weights.shape + (1,) * (leaf.ndim - weights.ndim)), leaf.shape, "weights"
    )
