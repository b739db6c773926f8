"""What older versions of :mod:`flax.nnx` lack, down to 0.11.2, the oldest that is supported.

Nothing else in this folder asks for the version of Flax. A line says since when Flax has what it
stands in for: once that is the oldest that is supported, it goes.
"""

import inspect
from typing import Any

import flax
from flax import nnx
from flax.nnx.nn import dtypes

try:
    from flax.nnx import InstanceNorm  # since Flax 0.12.0
except ImportError:

    class InstanceNorm(nnx.LayerNorm):  # type: ignore[no-redef]
        """The constructor of Flax's InstanceNorm, and its parameters, which are those of a
        LayerNorm.
        """

        def __init__(self, num_features: int, **options: Any) -> None:
            if "reduction_axes" in options:
                raise TypeError(
                    "InstanceNorm takes no reduction_axes: they are all axes but the batch's and "
                    "feature_axes."
                )
            super().__init__(num_features, **options)


class Absent(nnx.Module):
    """In place of a class that the installed Flax lacks; it cannot be made."""

    def __init__(self, *_: Any, **__: Any) -> None:
        name = type(self).__name__
        raise ImportError(
            f"jaxnorm.nnx.{name} needs Flax 0.12.1 or newer, which has the class: Flax "
            f"{flax.__version__} is installed. "
            f"Use jaxnorm.linen.{name}, or a newer Flax."
        )


try:
    from flax.nnx import SpectralNorm, WeightNorm  # since Flax 0.12.1
except ImportError:
    SpectralNorm = WeightNorm = Absent  # type: ignore[misc, assignment]


# Whether the dtype of a BatchNorm's output is promoted with its running statistics: since Flax
# 0.12.1, which also gave modules a rule of promotion of the user's.
RUNNING_PROMOTE = "promote_dtype" in inspect.signature(nnx.BatchNorm.__init__).parameters


def get_value(variable: nnx.Variable) -> Any:
    """``variable.get_value()``, since Flax 0.12.1."""
    return variable.get_value() if hasattr(nnx.Variable, "get_value") else variable.value


def set_value(variable: nnx.Variable, value: Any) -> None:
    """``variable.set_value(value)``, since Flax 0.12.1."""
    if hasattr(nnx.Variable, "set_value"):
        variable.set_value(value)
    else:
        variable.value = value


def promotion(module: Any) -> Any:
    """The user's own rule of promotion, None for Flax's; modules take one since Flax 0.12.1."""
    rule = getattr(module, "promote_dtype", dtypes.promote_dtype)
    return None if rule is dtypes.promote_dtype else rule
