"""Normalization of data sets by statistics fitted on the host, in one pass, without JAX."""

from jaxnorm.data.normalizer import Normalizer

__all__ = ["Normalizer"]
