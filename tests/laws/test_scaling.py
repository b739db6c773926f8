"""Count the collectives of compiled programs.

Batch norm has two all-reduces for the output and one for the gradients. Other norms
have none.
"""

import jax
import pytest
from cases import long_sweep
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxnorm as jn
from bench import scaling

pytestmark = pytest.mark.usefixtures("usual_compile", "ordinary_promotion")

CHANNELS = 4 * 32  # bytes of one number for each of the 32 channels
# of the two dense layers, whose gradients are summed over devices
PARAMS = 4 * (16 * 32 + 32 + 32 * 8 + 8)
MESH = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
# Norm, way, and of output and step the all-reduces and their bytes: sum, offset and square; then
# the two sums of the gradients, which in shard_map are summed once more for scale and bias,
# together with the gradients of the layers.
ALONE = [
    ("batch", "jit", (2, 3 * CHANNELS), (4, 5 * CHANNELS + PARAMS)),
    ("batch", "shard_map", (2, 3 * CHANNELS), (4, 7 * CHANNELS + PARAMS)),
    *(
        (norm, way, (0, 0), (1, 2 * CHANNELS + PARAMS))
        for norm in ("layer", "group")
        for way in scaling.WAYS
    ),
]


def all_reduces(found):
    assert set(found["kinds"]) <= {"all-reduce"}
    return found["kinds"].get("all-reduce", 0), found["bytes"]


@pytest.fixture(autouse=True)
def _plain_jax(monkeypatch):
    monkeypatch.setenv("JAXNORM_IMPLEMENTATION", "xla")


@pytest.mark.parametrize(("norm", "way", "output", "step"), long_sweep(ALONE, quick=ALONE[:1]))
def test_a_norm_alone(norm, way, output, step):
    found = scaling.count(f"one {norm} norm", "jaxnorm", way, 4)
    assert {part: all_reduces(found[part]) for part in scaling.PARTS} == {
        "output": output,
        "step": step,
    }


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize(
    ("model", "per_norm"), [("ResNet stage, batch norm", 3), ("ResNet stage, group norm", 0)]
)
def test_a_model(model, per_norm, devices):
    """Those of each norm, and one for the gradients of all parameters together."""
    found = scaling.count(model, "jaxnorm", "jit", devices)
    assert all_reduces(found["step"])[0] == 1 + per_norm * scaling.MODELS[model][1]


@pytest.mark.slow
def test_one_device_has_none():
    found = scaling.count("one batch norm", "jaxnorm", "jit", 1)
    assert [all_reduces(found[part]) for part in scaling.PARTS] == [(0, 0)] * 2


def forward(way, dtype, masked):
    """The collectives of the function alone."""
    x = jax.ShapeDtypeStruct((16, 32), dtype, sharding=NamedSharding(MESH, P("data")))
    where = (
        jax.ShapeDtypeStruct((16, 1), bool, sharding=NamedSharding(MESH, P("data")))
        if masked
        else None
    )
    norm = lambda x, where: jn.batch_norm(
        x, where=where, axis_name="data" if way == "shard_map" else None
    )[0]
    if way == "shard_map":
        norm = jax.shard_map(norm, mesh=MESH, in_specs=P("data"), out_specs=P("data"))
    return scaling.collectives(jax.jit(norm).lower(x, where).compile().as_text())


# Way, dtype, masked, and the bytes of each all-reduce in turn. bfloat16 takes the largest element
# first. A mask that is the same for all channels has one count, an integer, which joins the sums in
# shard_map alone: in a sharded jit the devices' integers are summed before they become floats.
COUNT, SUMS = 4, 2 * CHANNELS
FUNCTION = [
    ("jit", "float32", False, [CHANNELS, SUMS]),
    ("shard_map", "float32", False, [CHANNELS, SUMS]),
    ("shard_map", "float32", True, [CHANNELS + COUNT, SUMS]),
    ("jit", "float32", True, [COUNT, CHANNELS, SUMS]),
    ("jit", "bfloat16", False, [CHANNELS, CHANNELS, SUMS]),
    ("shard_map", "bfloat16", False, [CHANNELS, CHANNELS, SUMS]),
    ("shard_map", "bfloat16", True, [CHANNELS, CHANNELS + COUNT, SUMS]),
    ("jit", "bfloat16", True, [COUNT, CHANNELS, CHANNELS, SUMS]),
]


@pytest.mark.parametrize(
    ("way", "dtype", "masked", "sizes"), long_sweep(FUNCTION, quick=FUNCTION[::3])
)
def test_the_function(way, dtype, masked, sizes):
    assert forward(way, dtype, masked) == [("all-reduce", size) for size in sizes]
