"""jaxnorm: statistics over reduction axes are a mergeable value; normalizing is applying it."""

from importlib import import_module
from typing import TYPE_CHECKING

# what type checkers see; when the program runs, a module is loaded when the first of its names is
# used
if TYPE_CHECKING:
    from jaxnorm import data as data
    from jaxnorm import host as host
    from jaxnorm import interop as interop
    from jaxnorm import linen as linen
    from jaxnorm import nnx as nnx
    from jaxnorm import online as online
    from jaxnorm import recurrent as recurrent
    from jaxnorm import training as training
    from jaxnorm.arguments.options import AxisGroups as AxisGroups
    from jaxnorm.arguments.options import NormOptions as NormOptions
    from jaxnorm.core.normalization import normalize as normalize
    from jaxnorm.core.normalization import plan as plan
    from jaxnorm.core.normalization import standardize as standardize
    from jaxnorm.core.plan import Plan as Plan
    from jaxnorm.core.quantization import Quantized as Quantized
    from jaxnorm.core.quantization import dequantize as dequantize
    from jaxnorm.core.quantization import quantize as quantize
    from jaxnorm.core.running import ema as ema
    from jaxnorm.core.statistics import Low as Low
    from jaxnorm.core.statistics import Moments as Moments
    from jaxnorm.core.statistics import merge as merge
    from jaxnorm.core.statistics import moments as moments
    from jaxnorm.norms.axes import batch_norm as batch_norm
    from jaxnorm.norms.axes import group_norm as group_norm
    from jaxnorm.norms.axes import instance_norm as instance_norm
    from jaxnorm.norms.axes import layer_norm as layer_norm
    from jaxnorm.norms.axes import positional_norm as positional_norm
    from jaxnorm.norms.axes import rms_norm as rms_norm
    from jaxnorm.norms.conditional import ada_instance_norm as ada_instance_norm
    from jaxnorm.norms.depth import deepnorm_constants as deepnorm_constants
    from jaxnorm.norms.depth import subln_gains as subln_gains
    from jaxnorm.norms.evonorm import evonorm_b0 as evonorm_b0
    from jaxnorm.norms.evonorm import evonorm_s0 as evonorm_s0
    from jaxnorm.norms.gated import gated_rms_norm as gated_rms_norm
    from jaxnorm.norms.ghost import ghost_batch_norm as ghost_batch_norm
    from jaxnorm.norms.graphs import graph_norm as graph_norm
    from jaxnorm.norms.graphs import pair_norm as pair_norm
    from jaxnorm.norms.kernels import kernels_by_path as kernels_by_path
    from jaxnorm.norms.kernels import map_kernels as map_kernels
    from jaxnorm.norms.kernels import spectral_vectors as spectral_vectors
    from jaxnorm.norms.pointwise import dynamic_erf as dynamic_erf
    from jaxnorm.norms.pointwise import dynamic_tanh as dynamic_tanh
    from jaxnorm.norms.renorm import batch_renorm as batch_renorm
    from jaxnorm.norms.residual import add_norm as add_norm
    from jaxnorm.norms.response import filter_response_norm as filter_response_norm
    from jaxnorm.norms.response import global_response_norm as global_response_norm
    from jaxnorm.norms.reversible import reverse_instance_norm as reverse_instance_norm
    from jaxnorm.norms.reversible import reversible_instance_norm as reversible_instance_norm
    from jaxnorm.norms.switchable import switchable_norm as switchable_norm
    from jaxnorm.norms.table import available_norms as available_norms
    from jaxnorm.norms.table import register_norm as register_norm
    from jaxnorm.norms.table import unregister_norm as unregister_norm
    from jaxnorm.norms.vectors import scale_norm as scale_norm
    from jaxnorm.norms.vectors import unit_norm as unit_norm
    from jaxnorm.norms.weights import spectral_norm as spectral_norm
    from jaxnorm.norms.weights import weight_norm as weight_norm
    from jaxnorm.norms.weights import weight_standardization as weight_standardization

__version__ = "0.1.0"

# Where each public name is defined: a module is loaded when the first of its names is used.
_MODULE_OF = {
    "AxisGroups": "arguments.options",
    "Low": "core.statistics",
    "Moments": "core.statistics",
    "NormOptions": "arguments.options",
    "Plan": "core.plan",
    "Quantized": "core.quantization",
    "ada_instance_norm": "norms.conditional",
    "add_norm": "norms.residual",
    "available_norms": "norms.table",
    "batch_norm": "norms.axes",
    "batch_renorm": "norms.renorm",
    "dequantize": "core.quantization",
    "dynamic_erf": "norms.pointwise",
    "dynamic_tanh": "norms.pointwise",
    "deepnorm_constants": "norms.depth",
    "ema": "core.running",
    "evonorm_b0": "norms.evonorm",
    "evonorm_s0": "norms.evonorm",
    "filter_response_norm": "norms.response",
    "global_response_norm": "norms.response",
    "ghost_batch_norm": "norms.ghost",
    "gated_rms_norm": "norms.gated",
    "graph_norm": "norms.graphs",
    "group_norm": "norms.axes",
    "instance_norm": "norms.axes",
    "kernels_by_path": "norms.kernels",
    "layer_norm": "norms.axes",
    "map_kernels": "norms.kernels",
    "merge": "core.statistics",
    "moments": "core.statistics",
    "normalize": "core.normalization",
    "pair_norm": "norms.graphs",
    "plan": "core.normalization",
    "positional_norm": "norms.axes",
    "quantize": "core.quantization",
    "register_norm": "norms.table",
    "reverse_instance_norm": "norms.reversible",
    "reversible_instance_norm": "norms.reversible",
    "rms_norm": "norms.axes",
    "scale_norm": "norms.vectors",
    "spectral_norm": "norms.weights",
    "spectral_vectors": "norms.kernels",
    "standardize": "core.normalization",
    "subln_gains": "norms.depth",
    "switchable_norm": "norms.switchable",
    "unregister_norm": "norms.table",
    "unit_norm": "norms.vectors",
    "weight_norm": "norms.weights",
    "weight_standardization": "norms.weights",
}
_MODULES = ("data", "host", "interop", "linen", "nnx", "online", "recurrent", "training")
__all__ = [*_MODULE_OF, "recurrent"]


if not TYPE_CHECKING:  # to type checkers it would say that there is an attribute of every name

    def __getattr__(name):
        if name in _MODULES:
            return import_module(f"jaxnorm.{name}")
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'jaxnorm' has no attribute {name!r}")
        module = import_module(f"jaxnorm.{_MODULE_OF[name]}")
        return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
