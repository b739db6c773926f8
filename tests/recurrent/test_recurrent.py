"""Compare recurrent networks with the papers' equations in float64.

Shapes, dtypes and layouts are tested too.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import long_sweep
from recurrent_cases import CASES, FEATURES, HIDDEN, OF_ONE, by_few, sequences, small_chunks

import jaxnorm as jn
from jaxnorm import recurrent
from jaxnorm.recurrent import native, scan

pytestmark = pytest.mark.usefixtures("several_chunks")
CHUNK_LENGTH = scan.chunk_length


@pytest.mark.parametrize("case", long_sweep(CASES, quick=CASES[::3]), ids=str)
def test_values_are_those_of_the_equations(case, rng):
    x, params = sequences(rng, 5, 7), case.params()
    state, outputs = case.call(x, params)
    truth_state, truth = case.oracle(x, params)
    np.testing.assert_allclose(outputs, truth, atol=2e-6)
    for part, expected in zip(state, truth_state, strict=True):
        np.testing.assert_allclose(part, expected, atol=4e-6)


# Not the GRU's candidate over the sum, of which the mean is not known before the reset gate is,
# if that comes after the product.
NOT_CENTERED = [("gru", "sum", True), ("gru", "gate", True)]
CENTERED_BY_KERNELS = [
    case
    for case in OF_ONE
    if case.norm == "layer" and (case.cell, case.placement, case.reset_after) not in NOT_CENTERED
]


@pytest.mark.parametrize("case", CENTERED_BY_KERNELS, ids=str)
def test_a_large_mean_of_the_kernels_rows_costs_no_digits(case, rng):
    """Kernels are centered in place of what they are multiplied with: by rows whose mean is 1e4
    deviations, to the last digits.
    """
    x, params = sequences(rng, 5, 7), case.params()
    shifted = {
        name: leaf + 1e4 if name in ("input_kernel", "recurrent_kernel") else leaf
        for name, leaf in params.items()
    }
    for found, truth in zip(case.call(x, shifted)[1], case.oracle(x, shifted)[1], strict=True):
        np.testing.assert_allclose(found, truth, atol=2e-5)


@pytest.mark.parametrize("time", [1, 2, 31, 97, 100, 101, 400, 1601, 3000])
@pytest.mark.parametrize("batch", [1, 32, 128, 5000])
@pytest.mark.parametrize("chunks", [scan.PLAIN, native.CHUNKS], ids=["plain", "native"])
def test_chunks_waste_little(chunks, time, batch):
    x, kernel = (
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((time, batch, 100), (128, 512))
    )
    length = CHUNK_LENGTH(chunks, {"recurrent_kernel": kernel}, x)
    assert 1 <= length <= time
    assert -time % length <= time / 20


@by_few
def test_outputs_have_the_dtype_of_x(case, rng):
    x, params = sequences(rng, 2, 5), case.params()
    exact = np.asarray(case.call(x, params)[1])
    for dtype, bound in ((jnp.bfloat16, 0.02), (jnp.float16, 3e-3)):
        state, outputs = case.call(
            *jax.tree.map(lambda a, dtype=dtype: np.asarray(a).astype(dtype), (x, params))
        )
        assert outputs.dtype == dtype
        assert all(part.dtype == jnp.float32 for part in state)
        assert np.abs(np.asarray(outputs).astype(np.float32) - exact).max() < bound


@by_few
def test_batches_of_any_rank(case, rng):
    x, params = sequences(rng, 2, 3, 5), case.params()
    (state, y), (flat_state, flat) = (
        case.call(x, params),
        case.call(x.reshape(6, 5, FEATURES), params),
    )
    np.testing.assert_array_equal(y.reshape(flat.shape), flat)
    np.testing.assert_array_equal(state[0].reshape(flat_state[0].shape), flat_state[0])
    alone_state, alone = case.call(x[1, 2], params)
    np.testing.assert_allclose(alone, y[1, 2], atol=1e-6)
    assert alone_state[0].shape == state[0].shape[2:]


@by_few
def test_time_may_come_first(case, rng):
    x, params = sequences(rng, 3, 5), case.params()
    where = jnp.asarray(rng.random((3, 5)) < 0.7)
    state, y = case.call(x, params, where=where)
    swapped_state, swapped = case.call(x.swapaxes(0, 1), params, where=where.T, time_major=True)
    np.testing.assert_array_equal(swapped.swapaxes(0, 1), y)
    np.testing.assert_array_equal(swapped_state[0], state[0])


@pytest.mark.parametrize("case", long_sweep(OF_ONE, quick=OF_ONE[::3]), ids=str)
def test_reverse_is_the_reversed_sequence(case, rng):
    x, params = sequences(rng, 2, 5), case.params()
    state, y = case.call(x, params, reverse=True)
    truth_state, truth = case.oracle(x[:, ::-1], params)
    np.testing.assert_allclose(y[:, ::-1], truth, atol=2e-6)
    np.testing.assert_allclose(state[-1], truth_state[-1], atol=4e-6)


@by_few
def test_a_sequence_in_two_halves_is_the_whole(case, rng):
    x, params = sequences(rng, 2, 8), case.params()
    state, y = case.call(x, params)
    middle, first = case.call(x[:, :3], params)
    last, second = case.call(x[:, 3:], params, initial=middle if len(middle) > 1 else middle[0])
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), y, atol=1e-6)
    np.testing.assert_allclose(last[0], state[0], atol=1e-6)


def test_the_whole_is_kept_as_states_alone(rng, monkeypatch):
    """What jax.vjp holds on to: x, h and c, those of the chunks' starts twice; not the gates of any
    step.
    """
    small_chunks(monkeypatch, 15)
    x = jnp.asarray(rng.standard_normal((8, 60, 10)).astype(np.float32))
    params = jn.recurrent.init_lstm(jax.random.key(0), 10, 16)

    def kept(time):
        _, pullback = jax.vjp(
            jax.jit(lambda x, p: jn.recurrent.lstm(x, p, time_major=True)[1]),
            x[:, :time].swapaxes(0, 1),
            params,
        )
        return sum(leaf.nbytes for leaf in jax.tree.leaves(pullback) if hasattr(leaf, "nbytes"))

    per_step_and_sample = (kept(60) - kept(30)) / (30 * 8) / 4
    assert per_step_and_sample <= 10 + 2 * 16 * (1 + 1 / 15)


@pytest.mark.slow
def test_zero_variance_is_finite_for_any_epsilon():
    params = jn.recurrent.init_lstm(jax.random.key(0), FEATURES, HIDDEN)
    x = jnp.zeros((2, 4, FEATURES))
    for epsilon in (0.0, 1e-30, 1e-6):
        value, gradient = jax.value_and_grad(
            lambda x, e=epsilon: jn.recurrent.lstm(x, params, epsilon=e)[1].sum()
        )(x)
        assert np.isfinite(value)
        assert np.isfinite(gradient).all() or epsilon == 1e-30


@pytest.mark.parametrize("name", ["rnn", "gru", "lstm"])
def test_initial_kernels_are_decomposed_one_at_a_time(name):
    """On a CPU a stack of decompositions waits for threads of XLA's pool; two stacks at once may
    hold them all, for ever.
    """
    init = partial(getattr(recurrent, f"init_{name}"), in_features=3, features=4)
    calls = [
        line
        for line in jax.jit(init).lower(jax.random.key(0)).as_text().splitlines()
        if "geqrf" in line or "orgqr" in line
    ]
    assert len(calls) == 2
    assert all(
        "tensor<4x4xf32>" in line and not re.search(r"tensor<\d+x\d+x\d+xf32>", line)
        for line in calls
    )


def test_initializers_are_compiled_once(caplog):
    """A second network of the same sizes draws other numbers and compiles nothing."""
    first = recurrent.init_gru(jax.random.key(0), 3, 4)
    with jax.log_compiles():
        second = recurrent.init_gru(jax.random.key(1), 3, 4)
        assert not caplog.messages
        jax.jit(lambda x: x + 1)(0)
    assert any("compilation" in message for message in caplog.messages)
    np.testing.assert_array_less(
        0, np.abs(first["recurrent_kernel"] - second["recurrent_kernel"]).max()
    )


class Unhashable:
    """An initializer that is no key of a dict, and reads a number that it draws."""

    __hash__ = None

    def __call__(self, key, shape, dtype):
        return jnp.full(shape, float(jax.random.uniform(key)), dtype)


def test_an_initializer_is_called_as_flax_calls_it():
    """Once for each block, with arrays that are not traced, whatever the initializer is."""
    kernel = recurrent.init_gru(jax.random.key(0), 3, 4, kernel_init=Unhashable())["input_kernel"]
    blocks = kernel.reshape(3, 3, 4)
    np.testing.assert_array_equal(blocks, jnp.broadcast_to(blocks[:1, :, :1], blocks.shape))
    assert len(set(blocks[0, :, 0].tolist())) == 3


@pytest.mark.parametrize("name", ["rnn", "gru", "lstm"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_parameters_in_half_precision_are_those_of_float32_rounded(name, dtype):
    make = getattr(jn.recurrent, f"init_{name}")
    found, wide = (make(jax.random.key(0), 3, 4, dtype=kind) for kind in (dtype, jnp.float32))
    for leaf in wide:
        assert found[leaf].dtype == dtype
        np.testing.assert_array_equal(found[leaf], wide[leaf].astype(dtype))


@pytest.mark.parametrize("make", [np.int64, jnp.asarray], ids=["NumPy's", "JAX's"])
def test_sizes_may_be_of_numpy_and_jax(make):
    found = recurrent.init_lstm(jax.random.key(0), make(3), make(4), projection=make(2))
    wanted = recurrent.init_lstm(jax.random.key(0), 3, 4, projection=2)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
