"""Drop-in replacements for the normalization modules of :mod:`flax.linen`.

Where Flax has a class, the class here is a subclass with the same name, arguments, defaults,
parameters and state. A model changes one import and loads its old checkpoint. The differences from
Flax, all for the better:

- Statistics are always computed stably; ``use_fast_variance`` is accepted and has no effect.
- ``mask`` may hold float weights. It hides NaN, and where it is 0 the output is 0.
- Statistics over devices weight each device by its valid elements.
- An ``axis_name`` has no effect where no axis is bound. It is an error where other axes are.
- A batch that is empty or not finite leaves the state unchanged.
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
        "jaxnorm.linen needs flax, which is not installed: pip install 'jaxnorm[flax]'."
    ) from None

import jaxnorm.flax_common.serialization  # noqa: F401  (registers Moments)
from jaxnorm.flax_common.constructors import check_arguments
from jaxnorm.linen import (
    adoption,
    attention,
    cells,
    comparison,
    conditional,
    conditional_batch,
    diagnosis,
    evonorm,
    folding,
    freezing,
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
from jaxnorm.linen.adoption import *  # noqa: F403  (its __all__)
from jaxnorm.linen.attention import *  # noqa: F403  (its __all__)
from jaxnorm.linen.batch import BatchNorm, SwitchableNorm
from jaxnorm.linen.cells import *  # noqa: F403  (its __all__)
from jaxnorm.linen.comparison import *  # noqa: F403  (its __all__)
from jaxnorm.linen.conditional import *  # noqa: F403  (its __all__)
from jaxnorm.linen.conditional_batch import *  # noqa: F403  (its __all__)
from jaxnorm.linen.diagnosis import *  # noqa: F403  (its __all__)
from jaxnorm.linen.evonorm import *  # noqa: F403  (its __all__)
from jaxnorm.linen.folding import *  # noqa: F403  (its __all__)
from jaxnorm.linen.freezing import *  # noqa: F403  (its __all__)
from jaxnorm.linen.gated import *  # noqa: F403  (its __all__)
from jaxnorm.linen.ghost import *  # noqa: F403  (its __all__)
from jaxnorm.linen.graphs import *  # noqa: F403  (its __all__)
from jaxnorm.linen.groups import *  # noqa: F403  (its __all__)
from jaxnorm.linen.layers import *  # noqa: F403  (its __all__)
from jaxnorm.linen.named import *  # noqa: F403  (its __all__)
from jaxnorm.linen.pointwise import *  # noqa: F403  (its __all__)
from jaxnorm.linen.recalibration import accumulate, population, recalibrate, stop_accumulating
from jaxnorm.linen.recurrent import *  # noqa: F403  (its __all__)
from jaxnorm.linen.renorm import *  # noqa: F403  (its __all__)
from jaxnorm.linen.response import *  # noqa: F403  (its __all__)
from jaxnorm.linen.reversible import *  # noqa: F403  (its __all__)
from jaxnorm.linen.surgery import *  # noqa: F403  (its __all__)
from jaxnorm.linen.vectors import *  # noqa: F403  (its __all__)
from jaxnorm.linen.weights import SpectralNorm, WeightNorm

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
__all__ += freezing.__all__
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
