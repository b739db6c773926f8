"""Normalize data sets: statistics of features, fitted on the host over pytrees of arrays, in one
pass. No JAX in here.
"""

from jaxnorm.data.normalizer import Normalizer

__all__ = ["Normalizer"]
