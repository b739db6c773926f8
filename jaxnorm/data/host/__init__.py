"""Moments in float64 NumPy, for workers without an accelerator and programs without JAX.

``Moments``, ``moments`` and ``merge`` obey the same laws and raise the same messages as their
namesakes in :mod:`jaxnorm`. Three things differ. Everything is computed in float64, whatever the
dtype of the data. Integers are accepted, since data sets hold them (images of uint8). There is no
``axis_name``.
"""

from jaxnorm.data.host.statistics import Moments, merge, moments

__all__ = ["Moments", "merge", "moments"]
