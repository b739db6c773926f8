"""Moments in float64 NumPy, where JAX cannot be imported: the public name of jaxnorm.data.host."""

from jaxnorm.data.host import Moments, merge, moments

__all__ = ["Moments", "merge", "moments"]
