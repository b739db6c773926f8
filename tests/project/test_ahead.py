"""Test programs for accelerators, compiled ahead of time without one.

They are programs of norms, of a recurrent network and of blocks of models. The tests need the
libtpu that jax[tpu] of the installed JAX asks for, which the nightly run installs; those of GPUs
need jax-cuda12-pjrt besides.
"""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import jaxnorm as jn
from bench import blocks, passes
from bench.shapes import Shape
from bench.speed import with_gradients
from bench.targets import TARGETS, NoCompilerError, compiling_for
from bench.transfers import BANDWIDTH, CLOCK, COLLECTIVE, cycles, transferred
from jaxnorm import recurrent
from jaxnorm.core import plan
from jaxnorm.kernels import placement

pytest.importorskip("libtpu")
pytestmark = pytest.mark.usefixtures("usual_compile", "ordinary_promotion")

ROWS, IMAGES = (Shape.sizes(name) for name in ("32768x4096", "256x56x56x256"))
NORMS = {
    "layer": (lambda x, scale, bias: jn.layer_norm(x, scale=scale, bias=bias), ROWS),
    "batch": (lambda x, scale, bias: jn.batch_norm(x, scale=scale, bias=bias)[0], IMAGES),
    "group": (lambda x, scale, bias: jn.group_norm(x, scale=scale, bias=bias), IMAGES),
}
CHIPS = {"v5e": "TPU v5 lite", "v6e": "TPU v6 lite"}


@pytest.fixture(params=CHIPS)
def chip(request, monkeypatch):
    """``chip(*shape)`` is the type of a float32 array on one, for which jaxnorm plans."""
    monkeypatch.setattr(placement, "platform", lambda: "tpu")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # there is none to be asked about
    jax.devices()  # looks for plug-ins
    device = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{request.param}:2x2"
    ).devices[0]
    assert device.device_kind == CHIPS[request.param]
    jax.clear_caches()  # what was traced for another platform
    yield lambda *shape: jax.ShapeDtypeStruct(
        shape, "float32", sharding=SingleDeviceSharding(device)
    )
    jax.clear_caches()


def compiled(function, *types):
    return jax.jit(function).trace(*types).lower().compile()


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_moves_its_input_a_few_times(name, chip):
    """Between memory and cores at most 3 1/8 times for the output, and 7 1/8 times for it and all
    gradients.
    """
    norm, shape = NORMS[name]
    x, param = chip(*shape), chip(shape[-1])
    programs = compiled(norm, x, param, param), compiled(with_gradients(norm), x, param, param, x)
    output, both = (transferred(program.as_text()) / (4 * math.prod(shape)) for program in programs)
    assert output < 3.14  # the rest: scale, bias, statistics
    assert both < 7.15


@pytest.mark.skipif(jax.__version_info__ < plan.BRANCHES, reason="takes a sample")
def test_batch_norm_reads_nothing_for_its_statistics_after_a_convolution(chip):
    """Its sums are made where the convolution makes x: x is written and read once, y written."""
    x, weight, param = chip(64, 56, 56, 128), chip(3, 3, 128, 128), chip(128)

    def call(x, weight, scale):
        x = jax.lax.conv_general_dilated(
            x, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jn.batch_norm(x, scale=scale)[0]

    moved = transferred(compiled(call, x, weight, param).as_text())
    assert moved / (4 * math.prod(x.shape)) < 4.1  # the convolution reads its input


KERNELS = {
    "layer": (partial(jn.layer_norm, implementation="pallas"), (32768, 1024), 2, 3),
    "rms": (partial(jn.rms_norm, implementation="pallas"), (32768, 1024), 2, 3),
    "instance": (partial(jn.instance_norm, implementation="pallas"), (512, 14, 14, 512), 2, 3),
    "group": (partial(jn.group_norm, implementation="pallas"), (512, 14, 14, 512), 2, 3),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_read_once(name, chip):
    """The output takes two sizes of x, and the gradients given the residuals three."""
    norm, shape, output, gradients = KERNELS[name]
    call = lambda x, scale, bias: norm(x, scale=scale, bias=bias)
    given = chip(*shape), chip(shape[-1]), chip(shape[-1])
    size = 4 * math.prod(shape)
    assert transferred(compiled(call, *given).as_text()) / size < output + 0.01
    assert transferred(passes.gradients(call, *given)) / size < gradients + 0.01


def test_a_kernel_adds_and_normalizes(chip):
    x, param = chip(32768, 2048), chip(2048)
    call = lambda x, residual, scale: jn.add_norm(x, residual, scale=scale, implementation="pallas")
    moved = transferred(compiled(call, x, x, param).as_text())
    assert moved / (4 * math.prod(x.shape)) < 4.01


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5e:2x4"])
@pytest.mark.parametrize("axes", ["Auto", "Explicit"])
def test_nothing_is_gathered_for_a_kernel(axes, topology, chip):
    """XLA shards plain JAX; explicitly sharded rows have kernels on each chip."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    kind = getattr(jax.sharding.AxisType, axes)
    mesh = jax.sharding.Mesh(np.array(devices), ("d",), axis_types=(kind,))
    place = lambda shape, *spec: jax.ShapeDtypeStruct(
        shape, "float32", sharding=NamedSharding(mesh, PartitionSpec(*spec))
    )
    norm = lambda x, scale, bias: jn.layer_norm(x, scale=scale, bias=bias, implementation="pallas")
    x, param = place((512, 1024), "d"), place((1024,))
    text = compiled(with_gradients(norm), x, param, param, x).as_text()
    assert text.count("tpu_custom_call") == (2 if axes == "Explicit" else 0)
    assert set(re.findall(COLLECTIVE, text)) == {"all-reduce"}


def test_the_gradients_of_a_layer_normalized_lstm(chip):
    """Forward and backward each loop over chunks, and over the steps of a chunk."""
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
    params = jax.eval_shape(lambda key: recurrent.init_lstm(key, in_features=16, features=32), key)
    params = jax.tree.map(lambda leaf: chip(*leaf.shape), params)
    program = compiled(
        jax.value_and_grad(lambda params, x: recurrent.lstm(x, params)[1].sum()),
        params,
        chip(8, 20, 16),
    )
    loss, gradient = program.out_info
    assert loss.shape == ()
    assert jax.tree.map(lambda leaf: leaf.shape, gradient) == jax.tree.map(
        lambda leaf: leaf.shape, params
    )
    assert len(re.findall(r" while\(", program.as_text())) <= 4


def test_a_pallas_kernel_counts_for_the_bytes_that_it_moves(chip):
    """XLA's text says nothing of what happens inside of it."""

    def double(x_ref, y_ref):
        y_ref[...] = 2 * x_ref[...]

    rows = pl.BlockSpec((256, 1024), lambda i: (i, 0))
    x = chip(65536, 1024)  # more than lies beside the cores
    kernel = pl.pallas_call(double, out_shape=x, grid=(256,), in_specs=[rows], out_specs=rows)
    program = compiled(kernel, x).as_text()
    size = 4 * math.prod(x.shape)
    assert transferred(program) == 2 * size
    assert cycles(program) == round(2 * size * CLOCK / BANDWIDTH)


# Compilation for a TPU takes the longer the larger a block is.
SMALL = {"tpu": blocks.mlps((4096, 128), 128), "gpu": blocks.mlps()}


@pytest.mark.parametrize("name", TARGETS)
def test_a_block_moves_about_as_much_with_our_norms_as_with_those_of_flax(name):
    target, block = TARGETS[name], SMALL[name]
    try:
        with compiling_for(target) as devices:
            found = {
                kind: blocks.count(block, kind, devices[0], target) for kind in blocks.kinds(name)
            }
    except NoCompilerError as error:
        pytest.skip(str(error))
    without = found.pop("no norm")
    least = 4 * 2 * math.prod(block.x) / blocks.MIB  # x, y and their gradients
    for counters in found.values():
        assert least <= counters["mib"] <= 1.1 * found["flax"]["mib"]
        assert counters["cost"] > without["cost"]


@pytest.mark.parametrize("options", [{}, {"lengths": True}], ids=["all steps", "lengths"])
def test_a_layer_norm_doubles_the_cycles_of_an_lstm_at_most(options, chip):
    """Output and gradients; without loops of its own, the norm took 3.3 times as many."""

    def count(norm):
        init = lambda: recurrent.init_lstm(jax.random.key(0), 128, 128, norm=norm)
        params = jax.tree.map(lambda leaf: chip(*leaf.shape), jax.eval_shape(init))
        lengths = jnp.arange(32) + 40 if options else None
        run = lambda params, x: recurrent.lstm(x, params, norm=norm, lengths=lengths)[1]

        def with_gradients(params, x, dy):
            y, vjp = jax.vjp(run, params, x)
            return y, vjp(dy)

        x = chip(32, 100, 128)
        return cycles(compiled(with_gradients, params, x, x).as_text())

    assert count("layer") < 2 * count(None)
