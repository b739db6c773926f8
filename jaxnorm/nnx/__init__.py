"""Drop-in replacements for the normalization modules of :mod:`flax.nnx`.

Where Flax has a class, the class here is a subclass with the same name, arguments, defaults,
parameters and state. A model changes one import and loads its old checkpoint. The differences from
Flax, all for the better:

- ``x`` is not cast to ``dtype`` before its statistics are computed. The output equals the output of
  :mod:`jaxnorm.linen` bit for bit.
- Statistics are always computed stably; ``use_fast_variance`` is accepted and has no effect.
- ``mask`` may hold float weights. It hides NaN, and where it is 0 the output is 0.
- Statistics over devices weight each device by its valid elements.
- An ``axis_name`` has no effect where no axis is bound. It is an error where other axes are.
- A batch that is empty or not finite leaves the state unchanged.
- WeightNorm and SpectralNorm leave the parameters of the wrapped layer alone.
- Axes, groups and masks that do not fit raise ``ValueError``.

Parameters have the dtype ``param_dtype``. Statistics, and everything computed with them, are
float32 at least. The output has the dtype ``dtype``; by default it has the dtype to which ``x`` and
the parameters promote. ``mask`` is boolean or float weights, and broadcasts against ``x``.
"""

try:
    import flax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ImportError(
        "jaxnorm.nnx needs flax, which is not installed: pip install 'jaxnorm[flax]'."
    ) from None

import jaxnorm.flax_common.serialization  # noqa: F401  (registers Moments)
from jaxnorm.flax_common.constructors import check_arguments
from jaxnorm.nnx import (
    adoption,
    attention,
    cells,
    comparison,
    conditional,
    conditional_batch,
    diagnosis,
    evonorm,
    folding,
    gated,
    ghost,
    graphs,
    groups,
    layers,
    named,
    pointwise,
    recurrent,
    renorm,
    response,
    reversible,
    surgery,
    vectors,
)
from jaxnorm.nnx.adoption import *  # noqa: F403  (its __all__)
from jaxnorm.nnx.attention import *  # noqa: F403  (its __all__)
from jaxnorm.nnx.batch import BatchNorm, SwitchableNorm
from jaxnorm.nnx.cells import *  # noqa: F403  (its __all__)
from jaxnorm.nnx.comparison import *  # noqa: F403  (its __all__)
from jaxnorm.nnx.conditional import *  # noqa: F403  (its __all__)
from jaxnorm.nnx.conditional_batch import *  # noqa: F403  (its __all__)
from jaxnorm.nnx.diagnosis import *  # noqa: F403  (its __all__)
from jaxnorm.nnx.evonorm import *  # noqa: F403  (its __all__)
from jaxnorm.nnx.folding import *  # noqa: F403  (its __all__)
from jaxnorm.nnx.gated import *  # noqa: F403  (its __all__)
from jaxnorm.nnx.ghost import *  # noqa: F403  (its __all__)
from jaxnorm.nnx.graphs import *  # noqa: F403  (its __all__)
from jaxnorm.nnx.groups import *  # noqa: F403  (its __all__)
from jaxnorm.nnx.layers import *  # noqa: F403  (its __all__)
from jaxnorm.nnx.named import *  # noqa: F403  (its __all__)
from jaxnorm.nnx.pointwise import *  # noqa: F403  (its __all__)
from jaxnorm.nnx.recalibration import accumulate, population, recalibrate, stop_accumulating
from jaxnorm.nnx.recurrent import *  # noqa: F403  (its __all__)
from jaxnorm.nnx.renorm import *  # noqa: F403  (its __all__)
from jaxnorm.nnx.response import *  # noqa: F403  (its __all__)
from jaxnorm.nnx.reversible import *  # noqa: F403  (its __all__)
from jaxnorm.nnx.surgery import *  # noqa: F403  (its __all__)
from jaxnorm.nnx.vectors import *  # noqa: F403  (its __all__)
from jaxnorm.nnx.weights import SpectralNorm, WeightNorm

__all__ = [
    "BatchNorm",
    "SpectralNorm",
    "SwitchableNorm",
    "WeightNorm",
    "accumulate",
    "population",
    "recalibrate",
    "stop_accumulating",
]
__all__ += layers.__all__
__all__ += groups.__all__
__all__ += graphs.__all__
__all__ += adoption.__all__
__all__ += attention.__all__
__all__ += cells.__all__
__all__ += comparison.__all__
__all__ += conditional.__all__
__all__ += conditional_batch.__all__
__all__ += diagnosis.__all__
__all__ += evonorm.__all__
__all__ += folding.__all__
__all__ += gated.__all__
__all__ += ghost.__all__
__all__ += named.__all__
__all__ += pointwise.__all__
__all__ += recurrent.__all__
__all__ += renorm.__all__
__all__ += response.__all__
__all__ += reversible.__all__
__all__ += surgery.__all__
__all__ += vectors.__all__

# Constructors name what is missing or wrong, such as eps or affine of other libraries.
for _module in [value for name in __all__ if isinstance(value := globals()[name], type)]:
    check_arguments(_module)
