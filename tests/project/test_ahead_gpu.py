"""Test the Pallas kernels for GPUs, compiled ahead of time for an H100, without a GPU.

They need jax-cuda12-pjrt, jax-cuda12-plugin and the NVIDIA packages that bench/targets.py names.
"""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import jaxnorm as jn
from bench.speed import with_gradients
from bench.targets import H100
from bench.transfers import transferred
from jaxnorm.kernels import placement
from jaxnorm.kernels.pallas import norm

pytest.importorskip("jax_plugins.xla_cuda12")
pytestmark = [
    pytest.mark.usefixtures("usual_compile", "forgotten"),
    pytest.mark.skipif(
        jax.__version_info__ < norm.VERSION, reason="the kernels are for JAX 0.12 and newer"
    ),
]
KERNEL, WHOLE = "mosaic_gpu", PartitionSpec()
NORMS = {
    "layer": partial(jn.layer_norm, implementation="pallas"),
    "rms": partial(jn.rms_norm, implementation="pallas"),
}


@pytest.fixture
def devices(monkeypatch):
    """Four of them."""
    monkeypatch.setattr(placement, "platform", lambda: "gpu")
    jax.devices()  # looks for plug-ins
    target = {"topology": "1x1x4", "target_config": H100}
    return topologies.get_topology_desc(platform="cuda", **target).devices


@pytest.fixture
def on_one(devices):
    """``on_one(*shape)`` is the type of an array on one."""
    sharding = SingleDeviceSharding(devices[0])
    return lambda *shape, dtype="float32": jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def program(function, *types):
    return jax.jit(function).trace(*types).lower().compile().as_text()


def normalize(x, scale, bias, name="layer"):
    return NORMS[name](x, scale=scale, bias=bias)


def gradients_alone(norm):
    return lambda x, scale, bias, dy: jax.vjp(norm, x, scale, bias)[1](dy)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NORMS)
def test_x_is_read_once(name, dtype, on_one):
    """And dy once, for gradients; 5 % are for the sums of scale and bias of each thread block."""
    shape, function = (32768, 4096), partial(normalize, name=name)
    x, param = on_one(*shape, dtype=dtype), on_one(4096)
    sizes = lambda text: transferred(text) / (math.prod(shape) * x.dtype.itemsize)
    assert sizes(program(function, x, param, param)) < 2.01
    found = sizes(program(gradients_alone(function), x, param, param, x))
    assert found < (3.04 if dtype == "float32" else 3.08)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_jax_reads_rows_once_for_kept_statistics(dtype, on_one):
    """The output alone is one kernel. For gradients, besides a sample: x for the statistics, x and
    dy for the sums over rows, and x and dy for y and dx, and for the sums of scale and bias.
    """
    norm = lambda x, scale, bias: jn.layer_norm(x, scale=scale, bias=bias)
    x, param = on_one(32768, 4096, dtype=dtype), on_one(4096)
    sizes = lambda text: transferred(text) / (math.prod(x.shape) * x.dtype.itemsize)
    alone = program(norm, x, param, param)
    assert sizes(alone) < 2.01
    assert len(re.findall(r"^ .* fusion\(", alone[alone.index("\nENTRY") :], re.MULTILINE)) == 1
    assert sizes(program(with_gradients(norm), x, param, param, x)) < 7.2


WIDTHS = [(32, "bfloat16"), (1024, "bfloat16"), (1984, "float32"), (4096, "bfloat16")]


@pytest.mark.parametrize(("width", "dtype"), WIDTHS)
def test_no_register_spills(width, dtype, on_one, monkeypatch, tmp_path):
    """Of the widths that take the most registers."""
    for what in ("PTXAS", "TO"):
        monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{what}", str(tmp_path) if what == "TO" else "1")
    x, param = on_one(1000, width, dtype=dtype), on_one(width)
    program(with_gradients(normalize), x, param, param, x)
    told = [path.read_text(errors="replace") for path in tmp_path.glob("*.ptxas")]
    assert len(told) == 2
    for text in told:
        assert re.findall(r"(\d+) bytes spill", text) == ["0", "0"]


def sharded(mesh, *shape, spec=WHOLE):
    return jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))


@pytest.mark.parametrize("spec", [PartitionSpec("d"), PartitionSpec(None, "d")], ids=str)
def test_nothing_is_gathered_where_xla_shards_arrays(spec, devices):
    """Plain JAX runs, whose sums are reduced over devices."""
    mesh = Mesh(np.array(devices), ("d",))
    x, param = sharded(mesh, 4096, 1024, spec=spec), sharded(mesh, 1024)
    text = program(with_gradients(normalize), x, param, param, x)
    assert "all-gather" not in text
    assert KERNEL not in text


@pytest.mark.parametrize("how", ["shard_map", "unchecked shard_map", "explicit"])
def test_each_device_runs_them_on_its_part(how, devices):
    types = (AxisType.Explicit if how == "explicit" else AxisType.Auto,)
    mesh, rows = Mesh(np.array(devices), ("d",), axis_types=types), PartitionSpec("d")
    x, param = sharded(mesh, 4096, 1024, spec=rows), sharded(mesh, 1024)
    function = normalize
    if how != "explicit":
        options = {"in_specs": (rows, WHOLE, WHOLE), "out_specs": rows, "mesh": mesh}
        function = jax.shard_map(normalize, check_vma=how == "shard_map", **options)
    text = program(with_gradients(function), x, param, param, x)
    assert len(re.findall(rf'custom_call_target="{KERNEL}', text)) == 2
    assert "all-gather" not in text


def loss(x, scale, bias):
    return jnp.sin(normalize(x, scale, bias)).sum()


def scanned(x, scale, bias):
    return jax.lax.scan(lambda x, _: (normalize(x, scale, bias), None), x, length=3)[0].sum()


def summed(x, scale, bias):
    return jnp.sin(jax.vmap(normalize)(x, scale, bias)).sum()


ROWS, BATCH = ((64, 128), (128,)), ((8, 64, 128), (8, 128))
TRANSFORMED = {  # with the shapes of x and params, and how many kernels run at least
    "vmap": (jax.vmap(normalize), *BATCH, 1),
    "grad of vmap": (jax.grad(summed, (0, 1, 2)), *BATCH, 2),
    "jvp": (lambda *given: jax.jvp(normalize, given, given), *ROWS, 1),
    "hessian": (jax.hessian(loss), (4, 32), (32,), 1),
    "scan": (jax.grad(scanned), *ROWS, 2),
    "checkpoint": (jax.grad(jax.checkpoint(loss), (0, 1, 2)), *ROWS, 2),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations_compile(name, on_one):
    function, shape, params, least = TRANSFORMED[name]
    text = program(function, on_one(*shape), on_one(*params), on_one(*params))
    assert len(re.findall(rf'custom_call_target="{KERNEL}', text)) >= least


def test_what_they_do_not_take_is_plain_where_a_program_is_made_on_a_cpu(on_one, monkeypatch):
    """There, it is not known at the call that the program is for a GPU."""
    monkeypatch.setattr(placement, "platform", lambda: "cpu")
    x, param = on_one(64, 100), on_one(100)
    assert KERNEL not in program(with_gradients(normalize), x, param, param, x)


def test_exported_programs_are_plain(on_one):
    x, param = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 128), (128,)))
    exported = jax.export.export(jax.jit(normalize), platforms=["cuda", "cpu"])(x, param, param)
    assert KERNEL not in exported.mlir_module()
