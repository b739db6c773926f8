"""Register Moments with :mod:`flax.serialization`.

A state that holds Moments is then saved and restored like the state of a module.
"""

from dataclasses import fields
from typing import Any

from flax import serialization

from jaxnorm.core.statistics import Moments


# Flax reads and writes no dataclass but its own, flax.struct, without these two
# functions.
def _to_state(moments: Moments) -> dict[str, Any]:
    return {
        field.name: serialization.to_state_dict(getattr(moments, field.name))
        for field in fields(moments)
    }


def _from_state(target: Moments, state: dict[str, Any]) -> Moments:
    names = [field.name for field in fields(target)]
    return Moments(
        **{
            name: serialization.from_state_dict(getattr(target, name), state[name], name=name)
            for name in names
        }
    )


serialization.register_serialization_state(Moments, _to_state, _from_state)
