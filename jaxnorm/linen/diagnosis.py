"""Diagnose the norms of a linen model."""

from collections.abc import Mapping
from typing import Any

from flax import linen as nn

from jaxnorm.flax_common.diagnosis import Diagnosis, assert_healthy, plot_diagnoses
from jaxnorm.flax_common.diagnosis_numbers import given, health, kind_of
from jaxnorm.flax_common.health import Health
from jaxnorm.linen.edited import check_module, check_variables, naming_call, path_of

__all__ = ["assert_healthy", "diagnose", "plot_diagnoses"]
COLLECTION = "diagnosis"


def diagnose(
    model: nn.Module, variables: Mapping[str, Any], /, *inputs: Any, **arguments: Any
) -> Diagnosis:
    """Return the health of each norm of a model, Flax's or ours, in one forward pass.

    For each norm: mean and deviation of its input, ``|mean| / deviation``, the share of groups
    whose variance is below epsilon, the distance of running statistics from those of the batch,
    dead and exploding channels, and the range of its gain; see the fields of
    ``jaxnorm.flax_common.health.Health``. A mask of the norm's call counts. Changes of the
    model's state are dropped.

    Layers in ``nn.scan`` have numbers if it carries them: ``variable_axes={"diagnosis": 0, ...}``.
    Otherwise they are listed as missing.

    Args:
      model: the model.
      variables: its variables.
      *inputs: the positional arguments of the model.
      **arguments: further arguments of ``model.apply``, such as ``train=True`` and ``rngs``. To
        compare running statistics with a batch, the norms may use either of them.

    Returns:
      A pytree that prints itself as a table; ``jit`` can return it.

    Raises:
      TypeError: a model that is no module of linen.
      ValueError: the model calls no norm.
      TypeError or ValueError: variables or inputs do not fit the model, whose error is the cause.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> norm, x = nn.BatchNorm(use_running_average=False), jnp.array([[1.0], [3.0]])
    >>> found = nn.diagnose(norm, norm.init(jax.random.key(0), x), x)
    >>> found.norms[0].mean.tolist(), found.norms[0].mean_distance.round(2).tolist()
    (2.0, 2.0)
    """
    check_module("diagnose", model, edited=False)
    check_variables(variables)
    called: dict[str, str] = {}
    inside: set[str] = set()  # norms that are being called

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        is_norm = context.method_name == "__call__" and kind_of(module) and (args or "x" in kwargs)
        # a class may call its base class: that is one call of a norm
        if not is_norm or (path := path_of(module)) in inside:
            return call(*args, **kwargs)
        called[path] = type(module).__name__
        module.sow(COLLECTION, "health", _health(module, args, kwargs))
        inside.add(path)
        try:
            return call(*args, **kwargs)
        finally:
            inside.remove(path)

    mutable = [name for name in variables if name != "params"] + [COLLECTION]
    naming = naming_call(diagnose, model, inputs, arguments)
    with naming, nn.intercept_methods(intercept):
        _, state = model.apply(variables, *inputs, mutable=mutable, **arguments)
    if not called:
        raise ValueError(
            f"the model must call a norm: {type(model).__name__} calls none of Flax or jaxnorm."
        )
    return _collected(called, state.get(COLLECTION, {}))


def _health(module: nn.Module, args: Any, kwargs: Any) -> Health:
    """Return the numbers of a norm, whose variables may not exist."""
    x, mask, segments = given(module, args, kwargs)
    find = lambda collection, name: nn.meta.unbox(module.get_variable(collection, name))
    stats = {name: find("batch_stats", name) for name in ("mean", "var")}
    return health(module, x, mask, segments, scale=find("params", "scale"), **stats)


def _collected(called: Mapping[str, str], collection: Mapping[str, Any]) -> Diagnosis:
    """Return what the norms have sown, in the order of their calls."""
    norms, paths, names, missing = [], [], [], []
    for path, name in called.items():
        found: Any = collection
        for part in [*filter(None, path.split("/")), "health"]:
            found = found.get(part, {})
        if not found:
            missing.append(path)
        for number, numbers in enumerate(found):
            norms.append(numbers)
            paths.append(f"{path}:{number}" if number else path)
            names.append(name)
    return Diagnosis(tuple(norms), tuple(paths), tuple(names), tuple(missing))
