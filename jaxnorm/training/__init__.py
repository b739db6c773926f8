"""Tools for optimizers such as optax: roles of parameters, weight decay, Muon, weights of length 1.

    labels              a role for each leaf of a tree of parameters, for optax.multi_transform
    weight_decay_mask   True for the weights, for the mask of optax.adamw
    muon_dimensions     which axes of each weight are its matrix, for optax.contrib.muon
    scale_invariant     the weights whose scale no output depends on
    unit_weights        a transformation of optax that keeps weights at length 1, as nGPT does

They take any tree of parameters: the ``params`` of linen, a ``State`` of nnx, dicts of Haiku. Only
:func:`muon_dimensions` and :func:`unit_weights` import optax.
"""

from jaxnorm.training.invariance import ScaleInvariance, scale_invariant
from jaxnorm.training.lengths import unit_weights
from jaxnorm.training.muon import muon_dimensions
from jaxnorm.training.roles import ROLES, labels, weight_decay_mask

__all__ = [
    "ROLES",
    "ScaleInvariance",
    "labels",
    "muon_dimensions",
    "scale_invariant",
    "unit_weights",
    "weight_decay_mask",
]
