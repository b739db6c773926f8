"""Run Flax's norms as ours in any linen model, without a change of its code."""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import getattr_static
from types import MappingProxyType
from typing import Any

from flax import linen as nn

from jaxnorm.flax_common.choices import Choice, Chosen, choices, is_chosen, unnamed
from jaxnorm.linen.batch import BatchNorm
from jaxnorm.linen.edited import distinct, intercepted, interceptors, path_of
from jaxnorm.linen.groups import GroupNorm, InstanceNorm
from jaxnorm.linen.layers import LayerNorm, RMSNorm
from jaxnorm.linen.weights import SpectralNorm, WeightNorm

__all__ = ["adopted"]

# Flax's class -> ours
OURS: Mapping[type[nn.Module], type[nn.Module]] = MappingProxyType(
    {
        nn.BatchNorm: BatchNorm,
        nn.LayerNorm: LayerNorm,
        nn.RMSNorm: RMSNorm,
        nn.GroupNorm: GroupNorm,
        nn.InstanceNorm: InstanceNorm,
        nn.WeightNorm: WeightNorm,
        nn.SpectralNorm: SpectralNorm,
    }
)
KINDS = (*OURS, *OURS.values())
# They store what they compute at initialization.
OF_WEIGHTS = (WeightNorm, SpectralNorm)

# of the innermost context, which decides
_chosen: ContextVar[tuple[Choice, ...] | None] = ContextVar("_chosen", default=None)
# Names in without that left out a norm. A program that JAX uses again calls no module, so that a
# context may not meet the norms that an earlier one met.
_known: set[Choice] = set()


@contextmanager
def adopted(*, without: Chosen = None) -> Iterator[None]:
    """Run every norm of Flax's as our module of the same name.

    It holds for all linen modules that are called within the context, by ``init`` and ``apply``,
    whoever wrote the model. Parameters and state stay as they are: their tree, their names, and
    their values at initialization, bit for bit. The fields of each norm apply as if the model were
    written with our class. ``WeightNorm`` and ``SpectralNorm`` initialize the layer that they wrap
    with normalized weights; they run as Flax's there, so that these are the same bits.

    Only modules of exactly Flax's classes are adopted: ``BatchNorm``, ``LayerNorm``, ``RMSNorm``,
    ``GroupNorm``, ``InstanceNorm``, ``WeightNorm`` and ``SpectralNorm``. Subclasses of these stay
    as they are, since they may depend on what Flax's class does.

    A function by ``jax.jit`` has one program for calls within the context and another for calls
    outside. Within a context in another, the inner one decides. As a decorator, ``@adopted()``
    makes it hold in a function. An interceptor that you add within the context, by
    ``nn.intercept_methods``, does not see the calls of adopted norms; add it around the context.

    Args:
      without: the norms that stay Flax's: a class, a path such as ``"encoder/LayerNorm_0"``, which
        includes all norms below it, a function of path and module, or several of these. None, the
        default, leaves out nothing. A path that names none of the norms that were called is warned
        of where the context ends. It is no error, since a context may run a part of a model, or a
        program that was compiled before, which calls no module.

    Raises:
      TypeError: ``without`` is something else.
      ValueError: a class in ``without`` is of no norm.

    >>> import flax.linen, jax, jax.numpy as jnp
    >>> from jaxnorm.linen import adopted
    >>> norm, x = flax.linen.LayerNorm(), jnp.array([[1e4, 1e4 + 1]])
    >>> variables = norm.init(jax.random.key(0), x)
    >>> with adopted():
    ...     y = norm.apply(variables, x)
    >>> y.round(3).tolist(), norm.apply(variables, x).round().tolist()
    ([[-1.0, 1.0]], [[-500.0, 500.0]])
    """
    chosen = choices("without", without, KINDS) or ()
    called: dict[str, None] = {}

    def as_ours(run: Callable[..., Any], given: tuple, named: dict, context: Any) -> Any:
        module = context.module
        ours = OURS.get(type(module))
        if context.method_name != "__call__" or ours is None or _chosen.get() != chosen:
            return run(*given, **named)
        called[path_of(module)] = None
        if ours in OF_WEIGHTS and module.is_initializing():
            return run(*given, **named)
        if is_chosen(chosen, path_of(module), module, ours):
            return run(*given, **named)
        call = lambda *given, **named: _call_as(ours, module, given, named)
        return intercepted(call, context)(*given, **named)

    before, outside = _chosen.set(chosen), interceptors.set(())
    try:
        with nn.intercept_methods(as_ours), distinct(chosen):
            yield
    finally:
        interceptors.reset(outside)
        _chosen.reset(before)
    _warn_of_unnamed(chosen, called)


def _warn_of_unnamed(chosen: tuple[Choice, ...], called: Collection[str]) -> None:
    """Warn of paths that no norm has, if a norm was called."""
    missing = unnamed(chosen, called)
    _known.update(set(chosen).difference(missing))
    missing = [choice for choice in missing if choice not in _known]
    if missing and called:
        several = f" and {len(called) - 8} more" if len(called) > 8 else ""
        warnings.warn(
            "without must name norms of Flax's by their paths from the top: got "
            f"{', '.join(map(repr, missing))}; called were "
            f"{', '.join(map(repr, list(called)[:8]))}{several}.",
            stacklevel=4,  # past this function, the generator and contextlib
        )


def _call_as(ours: type[nn.Module], module: nn.Module, given: tuple, named: dict) -> Any:
    """Call a bound module as one of our class, which has the same fields."""
    theirs = type(module)
    # Flax has counted, named and captured this call already, so it gets the method that Flax
    # wrapped.
    call = getattr_static(ours, "__call__").__wrapped__
    # A bound module is the model's own copy. Linen refuses assignment to it.
    object.__setattr__(module, "__class__", ours)
    try:
        return call(module, *given, **named)
    finally:
        object.__setattr__(module, "__class__", theirs)
