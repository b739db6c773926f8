"""Run Flax's norms as ours in any nnx model, without a change of its code."""

from collections.abc import Iterator, Mapping
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any, TypeVar

from flax import nnx

from jaxnorm.flax_common.choices import Chosen, check_named, choices, is_chosen
from jaxnorm.nnx.batch import BatchNorm
from jaxnorm.nnx.calls import check_module
from jaxnorm.nnx.groups import GroupNorm, InstanceNorm
from jaxnorm.nnx.layers import LayerNorm, RMSNorm
from jaxnorm.nnx.weights import SpectralNorm, WeightNorm

__all__ = ["adopt"]

Model = TypeVar("Model", bound=nnx.Module)

# Flax's class -> ours. Older versions of Flax lack some.
OURS: Mapping[type[nnx.Module], type[nnx.Module]] = MappingProxyType(
    {
        getattr(nnx, ours.__name__): ours
        for ours in (
            BatchNorm,
            LayerNorm,
            RMSNorm,
            GroupNorm,
            InstanceNorm,
            WeightNorm,
            SpectralNorm,
        )
        if hasattr(nnx, ours.__name__)
    }
)
KINDS = (*OURS, *OURS.values())


def adopt(model: Model, *, without: Chosen = None, copy: bool = False) -> Model:
    """Make every norm of Flax's in a model our module of the same name.

    Parameters, state and options stay as they are: the same variables, with the same names, values
    and sharing. The model then equals one that was written with our classes.

    Only modules of exactly Flax's classes are adopted: ``BatchNorm``, ``LayerNorm``, ``RMSNorm``,
    ``GroupNorm`` and, where Flax has them, ``InstanceNorm``, ``WeightNorm`` and ``SpectralNorm``.
    Subclasses of these stay as they are, since they may depend on what Flax's class does.

    ``nnx.jit`` compiles anew for the model. A function by ``jax.jit`` that refers to the model
    without taking it as an argument keeps the program that it has: adopt first.

    Args:
      model: the model, which is modified unless ``copy`` is True.
      without: the norms that stay Flax's: a class, a path such as ``"encoder/norm"``, which
        includes all norms below it, a function of path and module, or several of these. None, the
        default, leaves out nothing. A shared norm has the path where it is met first.
      copy: whether to leave the model as it is, and change a copy with variables of its own.

    Returns:
      The model, or its copy.

    Raises:
      TypeError: the model is no nnx module; ``without`` is something else.
      ValueError: a path in ``without`` names no norm of Flax's, or a class is of no norm.

    >>> import flax.nnx, jax.numpy as jnp
    >>> from jaxnorm import nnx
    >>> norm, x = flax.nnx.LayerNorm(2, rngs=flax.nnx.Rngs(0)), jnp.array([[1e4, 1e4 + 1]])
    >>> norm(x).round().tolist(), nnx.adopt(norm)(x).round(3).tolist()
    ([[-500.0, 500.0]], [[-1.0, 1.0]])
    >>> type(norm)
    <class 'jaxnorm.nnx.layers.LayerNorm'>
    """
    check_module("adopted", model)
    chosen = choices("without", without, KINDS) or ()
    check_named("without", chosen, [path for path, _ in _norms(model)], "norms of Flax's")
    if copy:
        model = nnx.clone(model)
    # all of them before any changes
    norms = [
        (norm, OURS[type(norm)])
        for path, norm in _norms(model)
        if not is_chosen(chosen, path, norm, OURS[type(norm)])
    ]
    for norm, ours in norms:
        # past nnx, which would list the class among the attributes of the module
        object.__setattr__(norm, "__class__", ours)
        for name, default in _further_options(ours).items():
            setattr(norm, name, default)
    return model


def _norms(model: nnx.Module) -> Iterator[tuple[str, nnx.Module]]:
    """Return path and module of each norm of Flax's."""
    for path, node in nnx.iter_graph(model):
        if type(node) in OURS:
            yield "/".join(map(str, path)), node


def _further_options(ours: type[nnx.Module]) -> dict[str, Any]:
    """Return what our constructor takes and Flax's does not, with the defaults."""
    theirs = signature(ours.__mro__[1].__init__).parameters  # type: ignore[misc]
    return {
        name: parameter.default
        for name, parameter in signature(ours.__init__).parameters.items()
        if parameter.kind is Parameter.KEYWORD_ONLY and name not in theirs
    }
