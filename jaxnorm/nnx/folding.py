"""Fold the norms of nnx models into their layers, for inference."""

from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from inspect import signature
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxnorm.flax_common import layers
from jaxnorm.flax_common.absorption import checked_bound, stored
from jaxnorm.flax_common.choices import Chosen, choices, is_chosen
from jaxnorm.flax_common.folding import Folding
from jaxnorm.flax_common.inputs import naming_inputs
from jaxnorm.flax_common.layers import Layer, Norm
from jaxnorm.flax_common.surgery import Report
from jaxnorm.flax_common.watching import (
    MODE,
    Watch,
    arrays_of,
    check_chosen,
    norm_of,
    refuse_training,
)
from jaxnorm.nnx.batch import BatchNorm, is_evaluating
from jaxnorm.nnx.calls import check_module
from jaxnorm.nnx.flax_versions import InstanceNorm as FlaxInstanceNorm
from jaxnorm.nnx.flax_versions import get_value, set_value
from jaxnorm.nnx.groups import GroupNorm, InstanceNorm
from jaxnorm.nnx.layers import LayerNorm, RMSNorm

__all__ = ["fold"]

Model = TypeVar("Model", bound=nnx.Module)

# Only of exactly these classes is known what they compute.
LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Conv, nnx.ConvTranspose)
BATCH = (nnx.BatchNorm, BatchNorm)
ROWS = (nnx.LayerNorm, nnx.RMSNorm, LayerNorm, RMSNorm)
GROUPS = (nnx.GroupNorm, FlaxInstanceNorm, GroupNorm, InstanceNorm)
NORMS = (*BATCH, *ROWS, *GROUPS)


class Identity(nnx.Module):
    """A module that returns its first argument, in a dtype; folded batch norms become one."""

    def __init__(self, dtype: Any = None) -> None:
        self.dtype = dtype

    def __call__(self, x: jax.Array, *_: Any, **__: Any) -> jax.Array:
        """Return ``x``."""
        return jnp.asarray(x, self.dtype)


def fold(
    model: Model,
    *inputs: Any,
    only: Chosen = None,
    bound: float | None = None,
    copy: bool = True,
    **arguments: Any,
) -> tuple[Model, Report]:
    """Fold norms into the layers next to them, so that inference computes less.

    A batch norm that normalizes by its running statistics goes into the layer whose output it
    reads: ``(x @ W + b) * gain + shift = x @ (W * gain) + (b * gain + shift)``, with ``gain =
    scale / sqrt(var + epsilon)`` and ``shift = bias - mean * gain``. If no layer is before it, it
    goes into the layers after it. In its place stands an identity. Scale and bias of layer, RMS,
    group and instance norm go into the layers that read their outputs: ``(x * scale + bias) @ W +
    b``. A layer without a bias gets one if need be.

    The model is traced on the inputs. A norm is folded only if the trace shows that nothing else
    reads the value between norm and layer, and that neither runs twice, runs in a loop, or shares
    its weights. An activation in between keeps a norm as it is. Layers are ``Linear``,
    ``LinearGeneral``, ``Conv`` and ``ConvTranspose`` of Flax; norms are Flax's and ours. New
    weights are computed in double precision and stored in the dtype of the old ones.

    Where the shift is large against the outputs, as it is with a running mean of many deviations,
    the sum of layer and new bias cancels, and rounding errors grow by the *condition number*
    ``mean(|x @ W| + |b|) / mean(|x @ W + b|)`` of the worst feature. A norm stays if that is more
    than ``bound``.

    Args:
      model: the model, in evaluation mode: call ``model.eval()`` first.
      *inputs: inputs for the trace, and for the differences and condition numbers in the report.
      only: the norms to fold: a class, a path such as ``"encoder/norm"``, which includes all norms
        below it, a function of path and module, or several of these. None takes all.
      bound: the largest condition number; ``math.inf`` folds whatever it is. None, the default,
        takes ``1 / sqrt(eps)`` of the dtype of the layer's output, which costs half of its digits:
        2896 in float32, 11.3 in bfloat16.
      copy: whether to leave the model as it is, the default, and change a copy with variables of
        its own. Make optimizers of the folded model afterwards.
      **arguments: further arguments of the call of the model.

    Returns:
      The folded model, and a report. It holds for calls like the traced one: other methods may read
      values that this call does not.

    Raises:
      TypeError: the model is no nnx module, is abstract or traced, or ``only`` is something else.
      ValueError: a batch norm uses the statistics of its batch, ``only`` names no norm, or the
        model calls none.
      TypeError or ValueError: inputs do not fit the model, whose error is the cause.

    >>> import flax.nnx, jax.numpy as jnp
    >>> from jaxnorm import nnx
    >>> rngs = flax.nnx.Rngs(0)
    >>> layer = flax.nnx.Linear(3, 2, use_bias=False, rngs=rngs)
    >>> model = flax.nnx.Sequential(layer, flax.nnx.BatchNorm(2, rngs=rngs), flax.nnx.relu)
    >>> model.eval()
    >>> folded, report = nnx.fold(model, jnp.ones((4, 3)))
    >>> type(folded.layers[1]).__name__, folded.layers[0].bias.shape
    ('Identity', (2,))
    >>> report.rows[0].outcome, report.rows[0].into, report.difference < 1e-6
    ('folded', ('layers/0',), True)
    """
    check_module("fold", model)
    chosen, bound = choices("only", only), checked_bound(bound)
    watch = Watch()
    arrays, run = _traced(model, watch, chosen, inputs, arguments)
    graph = watch.trace(run, arrays)
    check_chosen(chosen, watch)
    folding = Folding(graph, arrays, bound)
    folded = nnx.clone(model)
    _apply(folded, watch, folding)
    after = Watch(watch.numbers)
    arrays, run = _traced(folded, after, chosen, inputs, arguments)
    report = folding.report(after.trace(run, arrays).program, arrays)
    if copy:
        return folded, report
    _apply(model, watch, folding)
    return model, report


def become(old: nnx.Module, new: nnx.Module) -> None:
    """Make a module what another one is, wherever it is held."""
    # past nnx, which would list what changes among the attributes of the module
    object.__setattr__(old, "__class__", type(new))
    vars(old).clear()
    vars(old).update(vars(new))


def modules(model: nnx.Module, classes: tuple[type, ...], also: Any = ()) -> dict[str, Any]:
    """Return the modules of exactly these classes, and of ``also`` and its subclasses, by path."""
    return {
        "/".join(map(str, path)): node
        for path, node in nnx.iter_graph(model)
        if type(node) in classes or isinstance(node, also)
    }


def _apply(model: nnx.Module, watch: Watch, folding: Folding) -> None:
    """Store the new weights, and take the folded norms out."""
    found = modules(model, (*LAYERS, *NORMS))
    for number, weights in folding.weights.items():
        layer = found[watch.layers[number].path]
        old = get_value(layer.kernel)
        set_value(layer.kernel, stored(weights.kernel, old))
        if weights.bias is not None and layer.bias is not None:
            set_value(layer.bias, stored(weights.bias, get_value(layer.bias)))
        elif weights.bias is not None:
            layer.bias, layer.use_bias = nnx.Param(stored(weights.bias, old)), True
    for number in folding.folds:
        norm, dtype = found[watch.norms[number].path], watch.dtypes[number]
        if watch.norms[number].linear:
            become(norm, Identity(dtype))
            continue
        # without parameters the dtype of x would decide
        norm.dtype, norm.use_scale, norm.scale = dtype, False, nnx.data(None)
        if watch.norms[number].offset:
            norm.scale_offset = 0
        if hasattr(norm, "bias"):
            norm.use_bias, norm.bias = False, nnx.data(None)


def _traced(
    model: nnx.Module, watch: Watch, chosen: Any, inputs: tuple, arguments: dict[str, Any]
) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the arrays of a model and its inputs, and a function that calls it with them."""
    watched = nnx.clone(model)
    for path, module in modules(watched, (*LAYERS, *NORMS, Identity)).items():
        object.__setattr__(module, "__class__", _watched(type(module)))  # type: ignore[arg-type]
        # With the number of the trace a function by nnx.jit is traced anew.
        module.watched_path, module.watched_by = path, watch.tags.session
    graph, state = nnx.split(watched)
    arrays, rebuilt = arrays_of((state, inputs))

    def run(arrays: list[Any]) -> Any:
        state, inputs = rebuilt(arrays)
        before = _watching.set((watch, chosen))
        try:
            with naming_inputs(model, None, inputs, arguments, fold.__kwdefaults__):
                return nnx.merge(graph, state)(*inputs, **arguments)
        finally:
            _watching.reset(before)

    return arrays, run


# what looks at the calls of watched modules, and which norms are chosen
_watching: ContextVar[tuple[Watch, Any]] = ContextVar("_watching")


@cache
def _watched(own: type[nnx.Module]) -> type[nnx.Module]:
    """Return a class like ``own`` whose calls are watched."""

    def watched(self: Any, *given: Any, **named: Any) -> Any:
        watch, chosen = _watching.get()

        def describe(path: str, x: jax.Array) -> Layer | Norm | None:
            return _describe(own, path, self, x, given, named, chosen)

        call: Callable[..., Any] = lambda *given, **named: own.__call__(self, *given, **named)
        return watch.call(call, describe, self.watched_path, values(self), given, named)

    return type(own.__name__, (own,), {"__call__": watched})


def _describe(
    own: type, path: str, module: Any, x: jax.Array, given: tuple, named: dict, chosen: Any
) -> Layer | Norm | None:
    if own is Identity:
        return Norm(path, "Identity", (), (), linear=True, unsupported="it is folded already")
    if own is nnx.Linear:
        return layers.dense(path, module)
    if own is nnx.LinearGeneral:
        return layers.general(path, module, module.out_features, bool(module.batch_axis), x.ndim)
    if own in LAYERS:
        make = layers.convolution if own is nnx.Conv else layers.transposed
        return make(path, module)
    if not is_chosen(chosen, path, module):
        return None
    bound = signature(own.__call__).bind(module, *given, **named).arguments
    others = dict(list(bound.items())[2:])
    if own in BATCH and not is_evaluating(module, others.get(MODE)):
        refuse_training(path)
    return norm_of(path, module, x, linear=own in BATCH, names=others)


def holders(module: Any) -> dict[str, nnx.Variable]:
    """Return a module's variables, by name."""
    return {name: value for name, value in vars(module).items() if isinstance(value, nnx.Variable)}


def values(module: Any) -> dict[str, Any]:
    """Return the values of a module's variables, by name."""
    return {name: get_value(variable) for name, variable in holders(module).items()}
