"""Moments in float64 NumPy: for workers that have no accelerator, or where JAX cannot be imported.

``Moments``, ``moments`` and ``merge`` obey the laws, and raise the messages, of their namesakes in
:mod:`jaxnorm`. Two things differ: everything is computed in float64, whatever the dtype of the
data, and integers are accepted, since they are what data sets hold (images of uint8). There is no
``axis_name``.
"""

from jaxnorm.data.host.statistics import Moments, merge, moments

__all__ = ["Moments", "merge", "moments"]
