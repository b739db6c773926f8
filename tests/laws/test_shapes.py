"""Compare the shapes of real networks, which the benchmarks measure, with the oracle."""

from dataclasses import replace

import pytest
from cases import BY_NAME, long_sweep
from hard import HARD, check

import jaxnorm as jn
from bench.shapes import SHAPES, Shape

pytestmark = pytest.mark.usefixtures("usual_compile")

OFFSET = next(hard for hard in HARD if hard.name == "mean_1000")
REAL = [(norm, name, "xla") for name, shape in SHAPES.items() for norm in shape.norms]
# which has no kernel
REAL += [(norm, name, "native") for norm, name, _ in REAL if norm != "switchable"]


def at(norm, name):
    """A row of the table of norms, at this shape; 32 groups."""
    shape = Shape.sizes(name)
    channels, case = (
        shape[-1],
        BY_NAME["batch_conv" if norm == "batch" and len(shape) == 4 else norm],
    )
    if norm == "group":
        parts = (32, channels // 32)
        return replace(
            case,
            call=jn.group_norm,
            shape=shape,
            param=(channels,),
            split=(*shape[:-1], *parts),
            param_split=(1, 1, 1, *parts),
        )
    return replace(
        case, shape=shape, param=(channels,), param_split=(*(1,) * (len(shape) - 1), channels)
    )


@pytest.mark.parametrize(
    ("norm", "name", "implementation"),
    long_sweep(REAL, quick=[row for row in REAL if row[1] == "8x64"]),
    indirect=["implementation"],
)
def test_output_and_gradients_at_shapes_of_real_networks(norm, name, implementation, rng):
    check(at(norm, name), OFFSET, rng, ways=slice(1, None))
