"""Drop-in replacements for the normalization modules of :mod:`flax.linen`, and subclasses of them.

Same class names, arguments, defaults, parameters and state, so that a model changes one import and
loads its old checkpoint. What differs, for the better: statistics are always computed stably
(``use_fast_variance`` is accepted and has no effect), ``mask`` may hold float weights and hides
NaN, replicas are weighted by their valid elements, an ``axis_name`` is ignored where no axis is
bound (an error where others are), and a batch that is empty or not finite leaves the state as it
was. Where ``mask`` is 0 the output is 0. Axes, groups and masks that do not fit raise
``ValueError``.

Dtypes: parameters are of ``param_dtype``, statistics and what is computed with them of float32 at
least, and the output is of ``dtype`` or, by default, of what ``x`` and the parameters promote to.
``mask`` is boolean or float weights, and broadcasts against ``x``.
"""

try:
    import flax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ImportError(
        "jaxnorm.linen needs flax, which is not installed: pip install 'jaxnorm[flax]'."
    ) from None

import jaxnorm.flax_common.serialization  # noqa: F401  (registers Moments)
from jaxnorm.arguments.keywords import known_fields
from jaxnorm.linen import layers
from jaxnorm.linen.batch import BatchNorm, SwitchableNorm
from jaxnorm.linen.layers import *  # noqa: F403  (its __all__)
from jaxnorm.linen.recalibration import accumulate, population, recalibrate, stop_accumulating
from jaxnorm.linen.recurrent import (
    GRU,
    LSTM,
    LayerNormGRUCell,
    LayerNormLSTMCell,
    LayerNormSimpleCell,
    SimpleRNN,
)
from jaxnorm.linen.weights import SpectralNorm, WeightNorm

__all__ = [
    "GRU",
    "LSTM",
    "BatchNorm",
    "LayerNormGRUCell",
    "LayerNormLSTMCell",
    "LayerNormSimpleCell",
    "SimpleRNN",
    "SpectralNorm",
    "SwitchableNorm",
    "WeightNorm",
    "accumulate",
    "population",
    "recalibrate",
    "stop_accumulating",
]
__all__ += layers.__all__

for _module in [value for name in __all__ if isinstance(value := globals()[name], type)]:
    known_fields(_module)
