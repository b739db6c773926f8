"""Test programs for accelerators, compiled ahead of time without one.

They are programs of norms, of a recurrent network and of blocks of models. The tests need the
libtpu that jax[tpu] of the installed JAX asks for, which the nightly run installs; those of GPUs
need jax-cuda12-pjrt besides.
"""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import jaxnorm as jn
from bench import blocks
from bench.shapes import Shape
from bench.speed import with_gradients
from bench.targets import TARGETS, NoCompilerError, compiling_for
from bench.transfers import BANDWIDTH, CLOCK, cycles, transferred
from jaxnorm import recurrent
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
    """``chip(*shape)`` is the type of a float32 array on one."""
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # there is none to be asked about
    jax.devices()  # looks for plug-ins
    device = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{request.param}:2x2"
    ).devices[0]
    assert device.device_kind == CHIPS[request.param]
    return lambda *shape: jax.ShapeDtypeStruct(
        shape, "float32", sharding=SingleDeviceSharding(device)
    )


def compiled(function, *types):
    return jax.jit(function).trace(*types).lower().compile()


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_moves_its_input_a_few_times(name, chip):
    """Between memory and cores at most 4 times for the output, and 8 times for it and all
    gradients.
    """
    norm, shape = NORMS[name]
    x, param = chip(*shape), chip(shape[-1])
    programs = compiled(norm, x, param, param), compiled(with_gradients(norm), x, param, param, x)
    output, both = (transferred(program.as_text()) / (4 * math.prod(shape)) for program in programs)
    assert output < 4.01  # the rest: scale, bias, statistics
    assert both < 8.01


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
def test_a_layer_norm_doubles_the_cycles_of_an_lstm_at_most(options, chip, monkeypatch):
    """Output and gradients; without loops of its own, the norm took 3.3 times as many."""
    monkeypatch.setattr(placement, "platform", lambda: "tpu")

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
