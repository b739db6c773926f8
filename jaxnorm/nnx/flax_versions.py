"""Stand-ins for what older versions of :mod:`flax.nnx` lack, back to 0.11.2, the oldest supported.

Only this file of the folder depends on the version of Flax. Each stand-in names the version of Flax
that first has the original. It can go when that version is the oldest supported.
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
        """The constructor of Flax's InstanceNorm.

        Its parameters equal a LayerNorm's, so a LayerNorm makes them.
        """

        def __init__(self, num_features: int, **options: Any) -> None:
            if "reduction_axes" in options:
                raise TypeError(
                    "InstanceNorm takes no reduction_axes: they are all axes but the batch's and "
                    "feature_axes."
                )
            super().__init__(num_features, **options)

    # what may be given by name, which some read from the signature
    takes = inspect.signature(nnx.LayerNorm.__init__).parameters
    InstanceNorm.__init__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter for name, parameter in takes.items() if name != "reduction_axes"]
    )


class Absent(nnx.Module):
    """A stand-in for a class that the installed Flax lacks; its constructor raises ImportError."""

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


# Whether the running statistics of a BatchNorm take part in the promotion of its output
# dtype. They do since Flax 0.12.1, which also gave modules a promotion rule of the
# user's choice.
RUNNING_PROMOTE = "promote_dtype" in inspect.signature(nnx.BatchNorm.__init__).parameters


def get_value(variable: nnx.Variable) -> Any:
    """Return ``variable.get_value()``, which variables have since Flax 0.12.1."""
    return variable.get_value() if hasattr(nnx.Variable, "get_value") else variable.value


def set_value(variable: nnx.Variable, value: Any) -> None:
    """Call ``variable.set_value(value)``, which variables have since Flax 0.12.1."""
    if hasattr(nnx.Variable, "set_value"):
        variable.set_value(value)
    else:
        variable.value = value


def promotion(module: Any) -> Any:
    """Return the user's own promotion rule, or None for Flax's rule.

    Modules take a rule since Flax 0.12.1.
    """
    rule = getattr(module, "promote_dtype", dtypes.promote_dtype)
    return None if rule is dtypes.promote_dtype else rule
