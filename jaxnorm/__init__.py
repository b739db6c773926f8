"""jaxnorm: statistics over reduction axes are a mergeable value; normalizing is applying it."""

from importlib import import_module

import jaxnorm.interrupts  # noqa: F401  (first: the others take a second, through JAX)
from jaxnorm import recurrent
from jaxnorm.engine.collectives import AxisGroups
from jaxnorm.normalization import normalize, plan, standardize
from jaxnorm.norms import batch_norm, group_norm, instance_norm, layer_norm, positional_norm, rms_norm
from jaxnorm.statistics import Moments, ema, merge, moments
from jaxnorm.switchable import switchable_norm
from jaxnorm.weights import spectral_norm, weight_norm

__version__ = "0.1.0"
__all__ = [
    "AxisGroups",
    "Moments",
    "batch_norm",
    "ema",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "merge",
    "moments",
    "normalize",
    "plan",
    "positional_norm",
    "recurrent",
    "rms_norm",
    "spectral_norm",
    "standardize",
    "switchable_norm",
    "weight_norm",
]


def __getattr__(name: str):
    if name in ("linen", "nnx"):  # these need flax, which `import jaxnorm` must not load
        return import_module(f"jaxnorm.{name}")
    raise AttributeError(f"module 'jaxnorm' has no attribute {name!r}")
