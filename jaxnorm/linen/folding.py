"""Fold the norms of linen models into their layers, for inference."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import unfreeze

from jaxnorm.flax_common import layers
from jaxnorm.flax_common.absorption import checked_bound, stored
from jaxnorm.flax_common.choices import Chosen, choices, is_chosen
from jaxnorm.flax_common.folding import Folding
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
from jaxnorm.linen.batch import BatchNorm, evaluates
from jaxnorm.linen.edited import (
    Edit,
    Edited,
    Variables,
    check_module,
    check_variables,
    distinct,
    frozen_like,
    intercepting,
    naming_call,
    path_of,
    subtree,
    with_subtree,
)
from jaxnorm.linen.groups import GroupNorm, InstanceNorm
from jaxnorm.linen.layers import LayerNorm, RMSNorm

__all__ = ["fold"]

# Only of exactly these classes is known what they compute.
LAYERS = (nn.Dense, nn.DenseGeneral, nn.Conv, nn.ConvTranspose)
BATCH = (nn.BatchNorm, BatchNorm)
ROWS = (nn.LayerNorm, nn.RMSNorm, LayerNorm, RMSNorm)
GROUPS = (nn.GroupNorm, nn.InstanceNorm, GroupNorm, InstanceNorm)
NORMS = (*BATCH, *ROWS, *GROUPS)


def fold(
    model: nn.Module | Edited,
    variables: Variables,
    *inputs: Any,
    only: Chosen = None,
    bound: float | None = None,
    **arguments: Any,
) -> tuple[Edited, Variables, Report]:
    """Fold norms into the layers next to them, so that inference computes less.

    A batch norm that normalizes by its running statistics goes into the layer whose output it
    reads: ``(x @ W + b) * gain + shift = x @ (W * gain) + (b * gain + shift)``, with ``gain =
    scale / sqrt(var + epsilon)`` and ``shift = bias - mean * gain``. If no layer is before it, it
    goes into the layers after it. Scale and bias of layer, RMS, group and instance norm go into the
    layers that read their outputs: ``(x * scale + bias) @ W + b``.

    The model is traced on the inputs. A norm is folded only if the trace shows that nothing else
    reads the value between norm and layer, and that neither runs twice, runs in a loop, or shares
    its weights. An activation in between keeps a norm as it is. Layers are ``Dense``,
    ``DenseGeneral``, ``Conv`` and ``ConvTranspose`` of Flax; norms are Flax's and ours. New weights
    are computed in double precision and stored in the dtype of the old ones.

    Where the shift is large against the outputs, as it is with a running mean of many deviations,
    the sum of layer and new bias cancels, and rounding errors grow by the *condition number*
    ``mean(|x @ W| + |b|) / mean(|x @ W + b|)`` of the worst feature. A norm stays if that is more
    than ``bound``.

    Args:
      model: the model, which stays as it is.
      variables: its variables.
      *inputs: inputs for the trace, and for the differences and condition numbers in the report.
      only: the norms to fold: a class, a path such as ``"encoder/LayerNorm_0"``, which includes
        all norms below it, a function of path and module, or several of these. None takes all.
      bound: the largest condition number; ``math.inf`` folds whatever it is. None, the default,
        takes ``1 / sqrt(eps)`` of the dtype of the layer's output, which costs half of its digits:
        2896 in float32, 11.3 in bfloat16.
      **arguments: further arguments of ``model.apply``, such as ``train=False``.

    Returns:
      The folded model, whose ``apply`` is called as the model's; its variables, in which folded
      parameters and statistics are gone and layers may have a new ``bias``; and a report. It holds
      for calls like the traced one: other methods may read values that this call does not.

    Raises:
      TypeError: the variables are abstract or traced, or ``only`` is something else.
      ValueError: a batch norm uses the statistics of its batch, ``only`` names no norm, or the
        model calls none.
      TypeError or ValueError: variables or inputs do not fit the model, whose error is the cause.

    >>> import jax, jax.numpy as jnp
    >>> from flax import linen as nn
    >>> from jaxnorm.linen import fold
    >>> model = nn.Sequential([nn.Dense(2, use_bias=False), nn.BatchNorm(True), nn.relu])
    >>> x = jnp.ones((4, 3))
    >>> folded, variables, report = fold(model, model.init(jax.random.key(0), x), x)
    >>> jax.tree.map(jnp.shape, variables)
    {'params': {'layers_0': {'bias': (2,), 'kernel': (3, 2)}}}
    >>> report.rows[0].outcome, report.rows[0].into, report.difference < 1e-6
    ('folded', ('layers_0',), True)
    """
    check_module("fold", model)
    check_variables(variables)
    chosen, bound = choices("only", only), checked_bound(bound)
    plain = unfreeze(dict(variables))
    arrays, rebuilt = arrays_of((plain, inputs))
    watch = Watch()

    def traced(model: nn.Module | Edited, watch: Watch, build: Callable[..., Any]) -> Any:
        def run(arrays: list[Any]) -> Any:
            variables, inputs = build(arrays)
            naming = naming_call(fold, model, inputs, arguments)
            with naming, distinct(watch), intercepting(_watching(watch, chosen)):
                return model.apply(variables, *inputs, **arguments)

        return run

    graph = watch.trace(traced(model, watch, rebuilt), arrays)
    check_chosen(chosen, watch)
    folding = Folding(graph, arrays, bound)
    folded, new = _edited(model, watch, folding), _new_variables(plain, folding)
    arrays, rebuilt = arrays_of((new, inputs))
    after = Watch(watch.numbers)
    again = after.trace(traced(folded, after, rebuilt), arrays)
    return folded, frozen_like(variables, new), folding.report(again.program, arrays)


@dataclass(frozen=True)
class PassOver:
    """Return what a module reads, in the dtype of what it would return."""

    dtype: Any

    def run(self, call: Callable[..., Any], module: nn.Module, given: tuple, named: dict) -> Any:
        """Return the first argument."""
        x = given[0] if given else next(iter(named.values()))
        return jnp.asarray(x, self.dtype)


@dataclass(frozen=True)
class WithFields:
    """Call a module as if it were constructed with other fields, those of them that it has."""

    fields: tuple[tuple[str, Any], ...]

    def run(self, call: Callable[..., Any], module: nn.Module, given: tuple, named: dict) -> Any:
        """Return the result of the call with these fields."""
        before = {name: getattr(module, name) for name, _ in self.fields if hasattr(module, name)}
        # A bound module is the model's own copy. Linen refuses assignment to it.
        for name in before:
            object.__setattr__(module, name, dict(self.fields)[name])
        try:
            return call(*given, **named)
        finally:
            for name, value in before.items():
                object.__setattr__(module, name, value)


def _watching(watch: Watch, chosen: Any) -> Callable[..., Any]:
    """Return the interceptor by which ``watch`` sees layers and norms."""

    def intercept(call: Callable[..., Any], given: tuple, named: dict, context: Any) -> Any:
        module = context.module
        if context.method_name != "__call__" or type(module) not in (*LAYERS, *NORMS):
            return call(*given, **named)
        path = path_of(module)
        own = {
            name: jax.tree.leaves(value)[0]  # also of what holds metadata
            for collection in ("params", "batch_stats")
            for name, value in module.variables.get(collection, {}).items()
        }

        def describe(path: str, x: jax.Array) -> Layer | Norm | None:
            if type(module) in LAYERS:
                return _layer(path, module, x)
            others = signature(type(module).__call__).bind(module, *given, **named).arguments
            others = dict(list(others.items())[2:])
            if not is_chosen(chosen, path, module):
                return None
            linear = type(module) in BATCH
            if linear and not evaluates(module, others.get(MODE)):
                refuse_training(path)
            why = "it is folded already" if linear and "var" not in own else ""
            return norm_of(path, module, x, linear=linear, names=others, why=why)

        return watch.call(call, describe, path, own, given, named)

    return intercept


def _layer(path: str, module: Any, x: jax.Array) -> Layer:
    if isinstance(module, nn.Dense):
        return layers.dense(path, module)
    if isinstance(module, nn.DenseGeneral):
        return layers.general(path, module, module.features, module.batch_dims != (), x.ndim)
    if isinstance(module, nn.Conv):
        return layers.convolution(path, module)
    return layers.transposed(path, module)


def _edited(model: nn.Module | Edited, watch: Watch, folding: Folding) -> Edited:
    """Return the model with folded norms left out, and with new biases."""
    edits: dict[str, Edit] = {}
    for norm in folding.folds:
        about, dtype = watch.norms[norm], watch.dtypes[norm]
        if about.linear:
            edits[about.path] = PassOver(dtype)
        else:
            # without parameters the dtype of x would decide
            fields = {"dtype": dtype, "use_scale": False, "use_bias": False, "scale_offset": 0}
            edits[about.path] = WithFields(tuple(fields.items()))
    for layer, weights in folding.weights.items():
        if weights.bias is not None:
            edits[watch.layers[layer].path] = WithFields((("use_bias", True),))
    return Edited(model, tuple(edits.items()))


def _new_variables(variables: Mapping[str, Any], folding: Folding) -> dict[str, Any]:
    """Return variables with the new weights, and without those of folded norms."""
    new = dict(variables)
    for layer, weights in folding.weights.items():
        path = folding.graph.layers[layer].path
        own = subtree(new, "params", path)
        old = jax.tree.leaves(own["kernel"])[0]
        own["kernel"] = _like(own["kernel"], stored(weights.kernel, old))
        if weights.bias is not None:
            own["bias"] = _like(own.get("bias"), stored(weights.bias, old))
        new = with_subtree(new, "params", path, own)
    for norm in folding.folds:
        for collection in ("params", "batch_stats"):
            new = with_subtree(new, collection, folding.graph.norms[norm].path, {})
    return new


def _like(old: Any, new: jax.Array) -> Any:
    """Return ``new`` with the metadata that ``old`` has."""
    return new if old is None else jax.tree.map(lambda _: new, old)
