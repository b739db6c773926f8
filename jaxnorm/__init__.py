"""jaxnorm: statistics over reduction axes are a mergeable value; normalizing is applying it."""

from importlib import import_module
from typing import TYPE_CHECKING

# what type checkers see; when the program runs, a module is loaded when the first of its names is
# used
if TYPE_CHECKING:
    from jaxnorm import data as data
    from jaxnorm import host as host
    from jaxnorm import linen as linen
    from jaxnorm import nnx as nnx
    from jaxnorm import online as online
    from jaxnorm import recurrent
    from jaxnorm.core.plan import Plan
    from jaxnorm.graphs import graph_norm, pair_norm
    from jaxnorm.normalization import normalize, plan, standardize
    from jaxnorm.norms import (
        batch_norm,
        group_norm,
        instance_norm,
        layer_norm,
        positional_norm,
        rms_norm,
    )
    from jaxnorm.options import AxisGroups, NormOptions
    from jaxnorm.running import ema
    from jaxnorm.statistics import Low, Moments, merge, moments
    from jaxnorm.switchable import switchable_norm
    from jaxnorm.weights import spectral_norm, weight_norm

__version__ = "0.1.0"
__all__ = [
    "AxisGroups",
    "Low",
    "Moments",
    "NormOptions",
    "Plan",
    "batch_norm",
    "ema",
    "graph_norm",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "merge",
    "moments",
    "normalize",
    "pair_norm",
    "plan",
    "positional_norm",
    "recurrent",
    "rms_norm",
    "spectral_norm",
    "standardize",
    "switchable_norm",
    "weight_norm",
]
_MODULES = ("data", "host", "linen", "nnx", "online", "recurrent")
_HOMES = (
    "options",
    "core.plan",
    "statistics",
    "running",
    "normalization",
    "norms",
    "graphs",
    "switchable",
    "weights",
)


if not TYPE_CHECKING:  # to type checkers it would say that there is an attribute of every name

    def __getattr__(name):
        if name in _MODULES:
            return import_module(f"jaxnorm.{name}")
        for module in _HOMES if name in __all__ else ():
            if hasattr(home := import_module(f"jaxnorm.{module}"), name):
                return globals().setdefault(name, getattr(home, name))
        raise AttributeError(f"module 'jaxnorm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
