"""A user's file, which uses every public name: to type checkers nothing in it is Any.
tests/project/test_types.py checks and runs it.
"""

from collections.abc import Callable
from typing import TypeAlias, assert_type

import flax.linen
import flax.nnx
import jax
import numpy as np

import jaxnorm as jn
from jaxnorm.flax_common.comparison import Comparison
from jaxnorm.flax_common.diagnosis import Diagnosis
from jaxnorm.flax_common.running import Seen
from jaxnorm.norms.depth import DeepNorm
from jaxnorm.recurrent.options import Carry

Array: TypeAlias = jax.Array
Pair: TypeAlias = tuple[Array, Array]
Params: TypeAlias = dict[str, Array]
key = jax.random.key(0)
x, ones = jax.random.normal(key, (4, 5, 6)), np.ones(6, np.float32)
h = x[:, 0, :3]


def statistics() -> None:
    m = assert_type(
        jn.moments(x, "n [t] c", where=x > 0, centered=True, axis_name=None), jn.Moments
    )
    assert_type(jn.moments(np.ones((4, 6)), "n (g [c])", g=2), jn.Moments)
    assert_type((m.count, m.mean, m.var), tuple[Array, Array, Array])
    low = assert_type(m.low, jn.Low)
    assert_type((low.count[1], low.mean, low.var), tuple[Array, Array, Array])
    assert_type(m.merge(0), jn.Moments)
    assert_type(m.merge("[n] t (g [c])", g=2, axis_name=None), jn.Moments)
    assert_type(jn.merge(m, m, m), jn.Moments)
    assert_type(jn.ema(m, m, momentum=0.9, unbiased=True), jn.Moments)
    assert_type(
        jn.ema(m, jn.Moments(count=m.count, mean=m.mean, var=m.var), momentum=np.float32(0.9)),
        jn.Moments,
    )
    by = jn.moments(x, "[n] t c", segments=np.zeros(4, int), num_segments=1).merge(2)
    assert_type(jn.normalize(x, by, segments=np.zeros(4, int), axes="[n] t c"), Array)
    assert_type(
        jn.normalize(
            x,
            m,
            scale=ones,
            bias=0.0,
            epsilon=1e-3,
            correction=1,
            epsilon_in="std",
            dtype="bfloat16",
        ),
        Array,
    )


def styled() -> None:
    assert_type(
        jn.ada_instance_norm(x, x[:1], style_where=ones > 0, correction=1, dtype="float32"), Array
    )


def standardized() -> None:
    assert_type(
        jn.standardize(x, (0, 1), scale=ones, where=x > 0, epsilon_in="std", full_range=True), Array
    )
    assert_type(jn.standardize(x, "n t (g [c])", implementation="xla", dtype="float32", g=2), Array)
    plan = assert_type(jn.plan(x, -1, scale=ones, implementation="reference"), jn.Plan)
    assert_type(plan.implementation, str)
    assert_type(plan.others["native"], str)


def spectral_step(kernel: Array, u: Array) -> Pair:
    kernel, u, _ = jn.spectral_norm(kernel, u)
    return kernel, u


def norms() -> None:
    options = assert_type(jn.NormOptions(dtype="float32", implementation="xla"), jn.NormOptions)
    assert_type(
        jn.batch_norm(x, scale=ones, bias=ones, feature_axes=-1, where=x > 0, **options),
        tuple[Array, jn.Moments],
    )
    assert_type(
        jn.batch_renorm(x, jn.moments(x, (0, 1)), r_max=3.0, d_max=5.0, scale=ones, **options),
        tuple[Array, jn.Moments],
    )
    assert_type(jn.ghost_batch_norm(x, size=2, where=x > 0), tuple[Array, jn.Moments])
    assert_type(
        jn.layer_norm(x, axes=(1, 2), correction=1, epsilon_in="std", axis_name=None), Array
    )
    assert_type(jn.layer_norm(np.ones((4, 6)), scale=ones, bias=ones, **options), Array)
    assert_type(
        jn.positional_norm(x, scale=ones, epsilon=np.float32(1e-3)), tuple[Array, jn.Moments]
    )
    assert_type(jn.rms_norm(x, axes="n t [c]", scale=ones, batch_invariant=True), Array)
    assert_type(jn.rms_norm(x, scale=ones, scale_offset=1, rounding="twice"), Array)
    assert_type(jn.rms_norm(x, epsilon_in="max"), Array)
    assert_type(jn.unit_norm(x, ord=1, axes=(1, 2), scale=np.ones((5, 6))), Array)
    assert_type(jn.scale_norm(x, 2.0, where=x > 0, dtype="float32"), Array)
    assert_type(jn.add_norm(x, x, norm="layer", scale=ones), tuple[Array, Array])
    assert_type(
        jn.gated_rms_norm(x, x, gate_first=True, activation="sigmoid", num_groups=2, **options),
        Array,
    )
    assert_type(jn.dynamic_tanh(x, 0.5, scale=ones, bias=ones, where=x > 0), Array)
    assert_type(jn.dynamic_erf(x, ones, np.zeros(1, np.float32), dtype="bfloat16"), Array)
    assert_type(jn.instance_norm(x, scale=ones, where=x > 0), Array)
    assert_type(jn.instance_norm(x[0], segments=np.zeros(5, int), num_segments=1), Array)
    assert_type(
        jn.graph_norm(x[0], ones, segments=np.zeros(5, int), num_segments=1, scale=ones), Array
    )
    assert_type(jn.pair_norm(x[0], 2.0, where=x[0] > 0), Array)
    row = jn.register_norm("own", linen=jn.linen.RMSNorm, call="y = norm(x)", running=False)
    assert_type(jn.available_norms()[row.name].formula, str)
    jn.unregister_norm(row.name)
    assert_type(jn.filter_response_norm(x, threshold=ones, scale=ones, **options), Array)
    assert_type(jn.global_response_norm(x, scale=ones, bias=ones, where=x > 0), Array)
    assert_type(jn.evonorm_s0(x, ones, 2, epsilon=1e-3), Array)
    found = assert_type(jn.evonorm_b0(x, ones, axis_name=None), tuple[Array, jn.Moments])
    assert_type(jn.evonorm_b0(x, ones, running=found[1], scale=ones)[0], Array)
    series = assert_type(jn.reversible_instance_norm(x, axes=1), tuple[Array, jn.Moments])
    assert_type(jn.reverse_instance_norm(x, series[1], scale=ones, dtype="float32"), Array)
    assert_type(jn.group_norm(x, 2, feature_axes=-1, axes=(1,), dtype="bfloat16"), Array)
    y, batch = assert_type(
        jn.switchable_norm(x, np.zeros(3), np.zeros(3)), tuple[Array, jn.Moments]
    )
    assert_type(
        jn.switchable_norm(y, np.zeros(3), np.zeros(3), running=batch, scale=ones)[0], Array
    )
    assert_type(jn.weight_norm(x[0], ones, feature_axes=-1, dtype="float32"), Array)
    assert_type(jn.weight_norm(x[0], centered=True, epsilon_in="max"), Array)
    assert_type(jn.weight_standardization(x[0], ones, by_fan_in=True, correction=1), Array)
    params = assert_type(jn.kernels_by_path({"kernel": x}), Params)
    assert_type(jn.quantize(x, -1), jn.Quantized)
    assert_type(jn.dequantize(jn.quantize(x)), jax.Array)
    assert_type(jn.deepnorm_constants(6, 6)[0], DeepNorm | None)
    assert_type(jn.subln_gains(decoder_layers=6)[1], float | None)
    us = assert_type(jn.spectral_vectors(key, params), Params)
    assert_type(jn.map_kernels(jn.weight_norm, params, match="kernel"), Params)
    assert_type(jn.map_kernels(spectral_step, params, us, has_aux=True), tuple[Params, Params])
    assert_type(jn.spectral_norm(x[0], np.ones((1, 6)), n_steps=2), tuple[Array, Array, Array])
    assert_type(jn.AxisGroups("data", ((0, 1), (2, 3))), jn.AxisGroups)


def for_optimizers() -> None:
    params: Params = {"scale": x[0, 0], "kernel": x[0]}
    model: Callable[[Params], Array] = lambda params: jn.rms_norm(params["kernel"])
    report = assert_type(
        jn.training.scale_invariant(model, params, axis=-1), jn.training.ScaleInvariance
    )
    assert_type(report.leaves[0].slope, float)
    assert_type(jn.training.ROLES, tuple[str, ...])
    jn.training.labels(params, offset="scale", qk="q", before_norm=report)
    jn.training.weight_decay_mask(params, also="scale", before_norm=report)
    jn.training.muon_dimensions(params, stacked=None, leave="embedding")
    jn.training.unit_weights(axes=0, match="kernel", epsilon=1e-6)


def recurrent_parameters() -> None:
    make = jax.nn.initializers.he_normal()
    assert_type(
        jn.recurrent.init_rnn(key, 6, 3, norm="rms", kernel_init=make, dtype="float32"), Params
    )
    assert_type(jn.recurrent.init_gru(key, 6, 3, norm=None, recurrent_kernel_init=make), Params)
    assert_type(
        jn.recurrent.init_lstm(
            key, 6, 3, placement="sum", scale=0.1, forget_bias=0.0, projection=2
        ),
        Params,
    )
    options = assert_type(
        jn.recurrent.ParameterOptions(norm="rms", scale=0.1), jn.recurrent.ParameterOptions
    )
    assert_type(jn.recurrent.init_gru(key, 6, 3, reset_after=False, **options), Params)


def recurrent_networks(keep: bool) -> None:
    lstm = jn.recurrent.init_lstm(key, 6, 3, norm="batch")
    state, outputs = assert_type(
        jn.recurrent.lstm(x, lstm, norm="batch", lengths=np.array([5, 3, 1, 5])), tuple[Pair, Array]
    )
    both = assert_type(
        jn.recurrent.lstm(x, lstm, norm="batch", initial=state, return_moments=True),
        tuple[Pair, Array, dict[str, jn.Moments]],
    )
    assert_type(
        jn.recurrent.lstm(
            x, lstm, norm="batch", running=both[2], longer="raise", return_moments=False
        ),
        tuple[Pair, Array],
    )
    assert_type(
        jn.recurrent.lstm(x, lstm, norm="batch", return_moments=keep),
        tuple[Pair, Array] | tuple[Pair, Array, dict[str, jn.Moments]],
    )
    gru = jn.recurrent.init_gru(key, 6, 3)
    final, _ = assert_type(
        jn.recurrent.gru(x, gru, where=x[..., 0] > 0, zoneout=0.1, key=key), tuple[Array, Array]
    )
    assert_type(
        jn.recurrent.gru(
            x, gru, initial=final, segments=np.zeros((4, 5), int), implementation="xla"
        ),
        tuple[Array, Array],
    )
    first = jn.recurrent.init_gru(key, 6, 3, norm="batch", reset_after=False)
    assert_type(
        jn.recurrent.gru(x, first, norm="batch", reset_after=False, return_moments=True),
        tuple[Array, Array, dict[str, jn.Moments]],
    )
    assert_type(
        jn.recurrent.rnn(
            x, jn.recurrent.init_rnn(key, 6, 3), activation="relu", lengths=np.array([5, 3, 1, 5])
        ),
        tuple[Array, Array],
    )
    rnn = jn.recurrent.init_rnn(key, 6, 3, norm="batch")
    found = assert_type(
        jn.recurrent.rnn(x, rnn, norm="batch", return_moments=True),
        tuple[Array, Array, dict[str, jn.Moments]],
    )
    assert_type(
        jn.recurrent.rnn(x, rnn, norm="batch", reverse=True, running=found[2]), tuple[Array, Array]
    )
    options = assert_type(
        jn.recurrent.NetworkOptions(norm="batch", epsilon=1e-3), jn.recurrent.NetworkOptions
    )
    assert_type(jn.recurrent.lstm(x, lstm, **options), tuple[Pair, Array])
    assert_type(outputs, Array)


class Norms(flax.linen.Module):
    """What :mod:`jaxnorm.linen` has, within a module of the user's."""

    @flax.linen.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        mask = x > 0
        assert_type(jn.linen.LayerNorm(epsilon=1e-5, use_bias=False), jn.linen.LayerNorm)
        x = assert_type(jn.linen.LayerNorm(epsilon=1e-5)(x, mask=mask), Array)
        x = assert_type(jn.linen.RMSNorm(dtype="float32", scale_offset=1)(x), Array)
        x = assert_type(jn.linen.GatedRMSNorm(gate_first=True)(x, x, mask=mask), Array)
        assert_type(
            jn.linen.QKNorm(norm="layer", per_head_scale=True)(x, x, mask=mask, k_mask=mask), Pair
        )
        x = assert_type(jn.linen.DynamicTanh(feature_axes=-1)(x, mask=mask), Array)
        x = assert_type(jn.linen.DynamicErf(use_bias=False)(x), Array)
        x = assert_type(jn.linen.InstanceNorm(feature_axes=-1)(x), Array)
        x = assert_type(
            jn.linen.GraphNorm(mean_scale_init=flax.linen.initializers.ones)(
                x, segments=np.zeros(5, int), num_segments=1
            ),
            Array,
        )
        x = assert_type(jn.linen.PairNorm(length=2.0)(x, mask=mask), Array)
        assert_type(jn.linen.norm("rms", epsilon=1e-5), flax.linen.Module)
        x = assert_type(jn.linen.UnitNorm(ord=1)(x, mask=mask), Array)
        x = assert_type(jn.linen.ScaleNorm(epsilon=1e-6)(x, mask=mask), Array)
        x = assert_type(jn.linen.GroupNorm(num_groups=None, group_size=3)(x), Array)
        x = assert_type(jn.linen.FilterResponseNorm(use_threshold=False)(x, mask=mask), Array)
        x = assert_type(jn.linen.GlobalResponseNorm(epsilon=1e-5)(x), Array)
        x = assert_type(jn.linen.EvoNormS0(num_groups=2)(x), Array)
        x = assert_type(jn.linen.EvoNormB0(momentum=0.9)(x, not train, mask=mask), Array)
        norm = jn.linen.ReversibleInstanceNorm()
        x, moments = assert_type(norm(x, mask=mask), tuple[Array, jn.Moments])
        x = assert_type(norm.inverse(x, moments, mask=mask), Array)
        x, m = assert_type(jn.linen.PositionalNorm(use_scale=True)(x), tuple[Array, jn.Moments])
        x = assert_type(
            jn.linen.BatchNorm(momentum=0.9, axis_name="data")(
                x + m.mean, use_running_average=not train, mask=mask
            ),
            Array,
        )
        x = assert_type(jn.linen.BatchRenorm(not train, warmup_steps=9)(x, mask=mask), Array)
        x = assert_type(jn.linen.KerasBatchRenorm(renorm_clipping={"rmax": 3})(x, True), Array)
        x = assert_type(jn.linen.GhostBatchNorm(not train, virtual_batch_size=2)(x), Array)
        x = assert_type(
            jn.linen.SwitchableNorm(use_running_average=not train, feature_axes=-1)(x), Array
        )
        x = self.by_condition(x, x[:, 0], train)
        x = assert_type(jn.linen.WeightNorm(flax.linen.Dense(6), feature_axes=-1)(x), Array)
        return assert_type(jn.linen.SpectralNorm(flax.linen.Dense(6))(x, update_stats=train), Array)

    def by_condition(self, x: jax.Array, c: jax.Array, train: bool) -> jax.Array:
        x = assert_type(jn.linen.AdaLayerNorm(norm="rms")(x, c, mask=x > 0), Array)
        x, gate = assert_type(jn.linen.AdaLayerNormZero(epsilon=1e-5)(x, c), tuple[Array, Array])
        x = assert_type(jn.linen.FiLM(scale_offset=0)(x + gate, c), Array)
        x = assert_type(jn.linen.AdaInstanceNorm(activation=jax.nn.silu)(x, c), Array)
        norm = jn.linen.ConditionalBatchNorm(num_classes=3, momentum=0.9)
        x = assert_type(norm(x, (x[:, 0, 0] > 0).astype(int), not train), Array)
        return assert_type(jn.linen.SPADE(hidden_features=4, kernel_size=(3,))(x, x), Array)


class Networks(flax.linen.Module):
    """The recurrent networks of :mod:`jaxnorm.linen`."""

    @flax.linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cell = jn.linen.LayerNormLSTMCell(3, forget_bias=1.0)
        start = assert_type(cell.initialize_carry(key, (4, 6)), Pair)
        assert_type(cell(start, x[:, 0]), tuple[Pair, Array])
        assert_type(
            jn.linen.LayerNormGRUCell(3, reset_after=False)(h, x[:, 0]), tuple[Array, Array]
        )
        assert_type(jn.linen.LayerNormSimpleCell(3, norm=None)(h, x[:, 0]), tuple[Array, Array])
        carry, _ = assert_type(
            jn.linen.LSTM(3, num_layers=2, projection=2)(x, return_carry=True), tuple[Carry, Array]
        )
        y = assert_type(
            jn.linen.LSTM(3, num_layers=2, projection=2)(
                x, initial_carry=carry, return_carry=False
            ),
            Array,
        )
        assert_type(
            jn.linen.GRU(3, bidirectional=True, reset_after=False)(
                x, seq_lengths=np.array([5, 3, 1, 5])
            ),
            Array | tuple[Carry, Array],
        )
        assert_type(
            jn.linen.SimpleRNN(3, return_carry=True, activation="relu")(
                x, init_key=key, time_major=True
            ),
            Array | tuple[Carry, Array],
        )
        return y


def nnx_norms() -> None:
    rngs, mask = flax.nnx.Rngs(0), x > 0
    assert_type(jn.nnx.LayerNorm(6, epsilon=1e-5, rngs=rngs), jn.nnx.LayerNorm)
    assert_type(jn.nnx.LayerNorm(6, use_bias=False, rngs=rngs)(x, mask=mask), Array)
    assert_type(jn.nnx.RMSNorm(6, dtype="float32", rngs=rngs)(x, mask), Array)
    assert_type(jn.nnx.RMSNorm(6, scale_offset=1, rounding="twice", rngs=rngs)(x), Array)
    assert_type(jn.nnx.GatedRMSNorm(6, gate_first=True, rngs=rngs)(x, x, mask=mask), Array)
    assert_type(jn.nnx.QKNorm(6, num_heads=5, over="heads", rngs=rngs)(x, x, mask=mask), Pair)
    assert_type(jn.nnx.DynamicTanh(6, dtype="float32", rngs=rngs)(x, mask=mask), Array)
    assert_type(jn.nnx.DynamicErf(6, use_bias=False, rngs=rngs)(x), Array)
    assert_type(jn.nnx.InstanceNorm(6, feature_axes=-1, rngs=rngs)(x), Array)
    assert_type(
        jn.nnx.GraphNorm(6, epsilon=1e-3, rngs=rngs)(x, segments=np.zeros(5, int), num_segments=1),
        Array,
    )
    assert_type(jn.nnx.PairNorm(6, length=2.0, rngs=rngs)(x, mask=mask), Array)
    assert_type(jn.nnx.norm("rms", 6, rngs=rngs, epsilon=1e-5), flax.nnx.Module)
    assert_type(jn.nnx.UnitNorm(6, use_scale=True, ord=1, rngs=rngs)(x, mask=mask), Array)
    assert_type(jn.nnx.ScaleNorm(6, epsilon=1e-6, rngs=rngs)(x, mask=mask), Array)
    assert_type(jn.nnx.GroupNorm(6, num_groups=None, group_size=3, rngs=rngs)(x), Array)
    assert_type(jn.nnx.GroupNorm(6, 2, epsilon=1e-5, rngs=rngs), jn.nnx.GroupNorm)
    assert_type(
        jn.nnx.PositionalNorm(6, use_scale=True, dtype="float32", rngs=rngs)(x),
        tuple[Array, jn.Moments],
    )
    assert_type(jn.nnx.FilterResponseNorm(6, learn_epsilon=True, rngs=rngs)(x), Array)
    assert_type(jn.nnx.GlobalResponseNorm(6, rngs=rngs)(x, mask=mask), Array)
    assert_type(jn.nnx.EvoNormS0(6, num_groups=2, rngs=rngs)(x), Array)
    assert_type(jn.nnx.EvoNormB0(6, momentum=0.9, rngs=rngs)(x, mask=mask), Array)
    norm = jn.nnx.ReversibleInstanceNorm(6, rngs=rngs)
    y, moments = assert_type(norm(x), tuple[Array, jn.Moments])
    assert_type(norm.inverse(y, moments, mask=mask), Array)
    batch = assert_type(
        jn.nnx.BatchNorm(6, momentum=0.9, axis_name="data", rngs=rngs), jn.nnx.BatchNorm
    )
    assert_type(batch(x, use_running_average=True, mask=mask), Array)
    renorm = assert_type(jn.nnx.BatchRenorm(6, r_max=2.0, rngs=rngs), jn.nnx.BatchRenorm)
    assert_type(renorm(x, use_running_average=True, mask=mask), Array)
    assert_type(jn.nnx.KerasBatchRenorm(6, renorm_momentum=0.9, rngs=rngs)(x, mask=mask), Array)
    assert_type(jn.nnx.GhostBatchNorm(6, num_chunks=2, rngs=rngs)(x), Array)
    assert_type(jn.nnx.SwitchableNorm(6, feature_axes=-1, rngs=rngs)(x, mask=mask), Array)


def nnx_conditional() -> None:
    rngs, c, labels = flax.nnx.Rngs(0), x[:, 0], (x[:, 0, 0] > 0).astype(int)
    assert_type(jn.nnx.AdaLayerNorm(6, 6, norm="rms", rngs=rngs)(x, c, mask=x > 0), Array)
    zero = jn.nnx.AdaLayerNormZero(6, 6, dtype="float32", rngs=rngs)
    assert_type(zero(x, c), tuple[Array, Array])
    assert_type(jn.nnx.FiLM(6, 6, scale_offset=0, rngs=rngs)(x, c), Array)
    assert_type(jn.nnx.AdaInstanceNorm(6, 6, axis_name="data", rngs=rngs)(x, c), Array)
    norm = jn.nnx.ConditionalBatchNorm(6, num_classes=3, momentum=0.9, rngs=rngs)
    assert_type(norm(x, labels, use_running_average=True), Array)
    assert_type(jn.nnx.SPADE(6, 6, norm="batch", kernel_size=(3,), rngs=rngs)(x, x), Array)


def nnx_weights() -> None:
    rngs = flax.nnx.Rngs(0)
    assert_type(jn.nnx.WeightNorm(flax.nnx.Linear(6, 2, rngs=rngs), rngs=rngs)(x), Array)
    assert_type(
        jn.nnx.SpectralNorm(flax.nnx.Linear(6, 2, rngs=rngs), n_steps=2, rngs=rngs)(
            x, update_stats=True
        ),
        Array,
    )


def nnx_networks() -> None:
    rngs = flax.nnx.Rngs(0)
    cell = jn.nnx.LayerNormLSTMCell(6, 3, forget_bias=1.0, rngs=rngs)
    start = assert_type(cell.initialize_carry((4, 6), rngs, jax.nn.initializers.ones), Pair)
    assert_type(cell(start, x[:, 0]), tuple[Pair, Array])
    assert_type(cell.parameters(), dict[str, Array])
    assert_type(
        jn.nnx.LayerNormGRUCell(6, 3, reset_after=False, rngs=rngs)(h, x[:, 0]), tuple[Array, Array]
    )
    assert_type(
        jn.nnx.LayerNormSimpleCell(6, 3, norm=None, rngs=rngs)(h, x[:, 0]), tuple[Array, Array]
    )
    layer = assert_type(
        jn.nnx.LSTM(6, 3, num_layers=2, projection=2, forget_bias=0.0, rngs=rngs), jn.nnx.LSTM
    )
    carry, _ = assert_type(layer(x, return_carry=True, deterministic=True), tuple[Carry, Array])
    assert_type(layer(x, initial_carry=carry, return_carry=False, rngs=rngs), Array)
    assert_type(
        jn.nnx.GRU(6, 3, reset_after=False, rngs=rngs)(x, seq_lengths=np.array([5, 3, 1, 5])),
        Array | tuple[Carry, Array],
    )
    assert_type(
        jn.nnx.SimpleRNN(6, 3, activation="relu", rngs=rngs)(x, mask=x[..., 0] > 0),
        Array | tuple[Carry, Array],
    )


def named_x(path: str, norm: object) -> bool:
    return "x" in path


def adoption(variables: dict[str, dict[str, Array]]) -> None:
    with jn.linen.adopted(without=[flax.linen.BatchNorm, "head", named_x]):
        pass
    norm = flax.nnx.LayerNorm(6, rngs=flax.nnx.Rngs(0))
    found = assert_type(
        jn.linen.compare(flax.linen.LayerNorm(), variables, x, rounds=2, float64=False),
        Comparison,
    )
    assert_type((found.agrees(1e-3), found.to_json()), tuple[bool, str])
    assert_type(jn.nnx.compare(norm, x, rounds=2), Comparison)
    assert_type(jn.nnx.adopt(norm, without="head", copy=True), flax.nnx.LayerNorm)


def linen_population(variables: dict[str, dict[str, Array]]) -> None:
    norm = jn.linen.BatchNorm(use_running_average=False)
    jn.linen.stop_accumulating(jn.linen.accumulate(variables))
    seen = assert_type(jn.linen.population(norm, variables, [h]), Seen)
    jn.linen.recalibrate(norm, variables, (), seen=seen)


def diagnoses(variables: dict[str, dict[str, Array]]) -> None:
    norm = jn.nnx.RMSNorm(3, rngs=flax.nnx.Rngs(0))
    found = assert_type(jn.linen.diagnose(jn.linen.RMSNorm(), variables, h), Diagnosis)
    twin = assert_type(jn.nnx.diagnose(norm, h), Diagnosis)
    assert_type(found.norms[0].collapsed, Array)
    jn.linen.assert_healthy(found, offset=1e4, not_finite=0.1)
    jn.nnx.assert_healthy(twin, dead=1.0)
    jn.linen.plot_diagnoses([found, found], steps=[0, 100])
    jn.nnx.plot_diagnoses([twin], "time.png")


def nnx_population() -> None:
    norm = jn.nnx.BatchNorm(3, rngs=flax.nnx.Rngs(0))
    jn.nnx.accumulate(norm)
    jn.nnx.stop_accumulating(norm)
    seen = assert_type(jn.nnx.population(norm, [h]), Seen)
    jn.nnx.recalibrate(norm, (), seen=seen)


def weights(params: Params, state: dict[str, np.ndarray]) -> None:
    options = {"Dense_0": "fc"}
    assert_type(jn.interop.load(params, state, framework="torch", names=options), Params)
    assert_type(jn.interop.save(params, framework="torch", like=state), dict[str, np.ndarray])
    layers: list[str | tuple[str, dict[str, bool]]] = ["Dense", ("Dense", {"use_bias": False})]
    jn.interop.load(params, state, framework="keras", layers=layers)
    found = assert_type(
        jn.interop.match(params, state, framework="torch", allow_unused="*"), jn.interop.Matching
    )
    assert_type(found.problems, list[str])


def linen_surgery(variables: dict[str, dict[str, Array]]) -> None:
    norm = jn.linen.LayerNorm()
    folded, new, report = jn.linen.fold(norm, variables, x, only="norm", bound=10.0)
    print(report.to_json().upper())
    jn.linen.fold(folded, new, x)
    swapped, new, _ = jn.linen.swap(norm, variables, x, to="rms", options={"epsilon": 1e-5})
    frozen, _ = jn.linen.freeze(swapped, new, x)
    print(jn.linen.unfreeze(frozen, only=jn.linen.BatchNorm)[1].to_json().upper())


def nnx_surgery() -> None:
    norm = jn.nnx.BatchNorm(3, use_running_average=True, rngs=flax.nnx.Rngs(0))
    folded, report = jn.nnx.fold(norm, x, only=[jn.nnx.BatchNorm], copy=False)
    print(folded.use_running_average, report.difference or 0.0)
    print(jn.nnx.swap(norm, to="group", options={"num_groups": 1})[1].to_json().upper())
    jn.nnx.unfreeze(jn.nnx.freeze(norm)[0])
