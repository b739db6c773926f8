"""The public name of jaxnorm.data.host: Moments in float64 NumPy, without JAX."""

from jaxnorm.data.host import Moments, merge, moments

__all__ = ["Moments", "merge", "moments"]
