"""What the conditional norms of nnx share: options, checks and the layer ``modulation``."""

from typing import Any, ClassVar, TypedDict

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer
from jax.nn import initializers

from jaxnorm.flax_common import conditional
from jaxnorm.flax_common.conditional import Activation


class ModulationOptions(TypedDict, total=False):
    """The arguments that the constructors of all conditional norms take by keyword."""

    dtype: Dtype | None
    param_dtype: Dtype
    bias_init: Initializer
    axis_name: str | None
    axis_index_groups: Any


class Conditional(nnx.Module):
    """What all conditional norms have: options, and the sizes of ``x`` and of the condition."""

    def __init__(
        self,
        num_features: int,
        condition_features: int | None,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        bias_init: Initializer = initializers.zeros,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
    ) -> None:
        self.num_features, self.condition_features = num_features, condition_features
        self.dtype, self.param_dtype, self.bias_init = dtype, param_dtype, bias_init
        self.axis_name, self.axis_index_groups = axis_name, axis_index_groups

    def check_features(self, name: str, size: int, shape: tuple[int, ...]) -> None:
        if not shape or shape[-1] != size:
            raise ValueError(
                f"{name} must have as many features as {type(self).__name__} was made for, {size}: "
                f"got {name} of shape {shape}."
            )


class Modulated(Conditional):
    """A norm with a dense layer ``modulation`` from vectors to parts as wide as the features."""

    parts: ClassVar[int] = 2
    activation: Activation | None = None

    def add_modulation(self, kernel_init: Initializer, rngs: nnx.Rngs) -> None:
        assert self.condition_features is not None
        self.modulation: Any = nnx.Linear(
            self.condition_features,
            self.parts * self.num_features,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=kernel_init,
            bias_init=self.bias_init,
            rngs=rngs,
        )

    def modulate(self, condition: jax.Array, shape: tuple[int, ...]) -> list[jax.Array]:
        """Return the parts of the output of the layer, which broadcast against x of a shape."""
        self.check_features("x", self.num_features, shape)
        condition = conditional.vectors(self, condition, shape)
        assert self.condition_features is not None
        self.check_features("condition", self.condition_features, condition.shape)
        if self.activation is not None:
            condition = self.activation(condition)
        return conditional.spread(self.modulation(condition), self.parts, shape)
