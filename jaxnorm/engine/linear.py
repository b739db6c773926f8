"""The tangent of normalizing as linear primitives, whose transpose is the closed form."""

from jaxnorm.engine import reference
from jaxnorm.engine.primitives import linear
from jaxnorm.engine.reference import Inputs, Residuals
from jaxnorm.engine.rows import backward_of_rows
from jaxnorm.engine.spec import Spec


def _inputs_like(residuals: Residuals) -> Inputs:
    return Inputs(residuals.x, residuals.scale, residuals.bias)


def _batched(spec: Spec, size: int) -> Spec:
    return spec.batched(size)


tangent = linear("jaxnorm_normalize", reference.tangent, reference.backward, _inputs_like, _batched, results=3)
tangent_of_rows = linear(
    "jaxnorm_normalize_rows",
    reference.tangent,
    backward_of_rows,
    _inputs_like,
    _batched,
    results=3,
    elsewhere=reference.backward,
)
