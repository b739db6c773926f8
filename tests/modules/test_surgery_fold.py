"""Test that folding keeps outputs, by numbers and against float64, and refuses what would not."""

import json
import math
from dataclasses import fields
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as fnx

import jaxnorm as jn

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (2, 6, 6, 4))
POINTS = X.mean((1, 2))


class Chain(fnn.Module):
    """Modules one after the other, by their own names; a function may stand among them."""

    parts: Any  # a function, or linen would name the modules

    @fnn.compact
    def __call__(self, x):
        for part in self.parts():
            x = made(part)(x)
        return x


def chain(*parts):
    return Chain(lambda: parts)


def made(part):
    """Make a module within the module that calls this."""
    if not isinstance(part, fnn.Module):
        return part
    given = {field.name: getattr(part, field.name) for field in fields(part)}
    return type(part)(**{name: value for name, value in given.items() if name != "parent"})


class Rejoined(fnn.Module):
    """A sum of a norm's output and its input."""

    @fnn.compact
    def __call__(self, x):
        y = fnn.Dense(3, name="dense")(x)
        return y + fnn.BatchNorm(True, name="norm")(y)


def initialized(model, x):
    """Return variables of which none is a default, and the variances positive."""
    variables = model.init(KEY, x)
    leaves, structure = jax.tree.flatten(variables)
    keys = jax.random.split(KEY, len(leaves))
    return structure.unflatten(
        [a + 0.3 * jax.random.uniform(key, a.shape) for a, key in zip(leaves, keys, strict=True)]
    )


def rows_of(model, x, **options):
    variables = initialized(model, x)
    folded, new, report = jn.linen.fold(model, variables, x, **options)
    expected, found = model.apply(variables, x), jax.jit(folded.apply)(new, x)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    assert found.dtype == expected.dtype
    return new, report.rows


BATCH = fnn.BatchNorm(True, name="norm")
LAYER = fnn.LayerNorm(name="norm")


@pytest.mark.parametrize(
    ("layer", "x", "axis"),
    [
        (fnn.Dense(3, name="layer"), POINTS, -1),
        (fnn.Dense(3, use_bias=False, name="layer"), POINTS, -1),
        (fnn.DenseGeneral((2, 3), axis=(-2, -1), name="layer"), X, -1),
        (fnn.DenseGeneral((2, 3), name="layer"), POINTS, (-2, -1)),
        (fnn.DenseGeneral((2, 3), name="layer"), POINTS, -2),
        (fnn.Conv(6, (3, 3), use_bias=False, feature_group_count=2, name="layer"), X, -1),
        (fnn.Conv(6, (3,), strides=2, padding="CAUSAL", name="layer"), X[:, 0], -1),
        (fnn.ConvTranspose(3, (3, 3), strides=(2, 2), name="layer"), X, -1),
        (fnn.ConvTranspose(3, (2, 2), transpose_kernel=True, name="layer"), X, -1),
    ],
)
@pytest.mark.parametrize("family", [fnn, jn.linen])
def test_batch_norm_goes_into_the_layer_before(layer, x, axis, family):
    model = chain(layer, family.BatchNorm(True, axis=axis, name="norm"), fnn.relu)
    new, (row,) = rows_of(model, x)
    assert (row.path, row.outcome, row.into) == ("norm", "folded", ("layer",))
    assert set(new) == {"params"}
    assert set(new["params"]) == {"layer"}
    assert row.difference < 1e-5 < row.largest


@pytest.mark.parametrize(
    ("norm", "layers", "x"),
    [
        (fnn.LayerNorm, [fnn.Dense(3, use_bias=False, name="layer")], POINTS),
        (jn.linen.LayerNorm, [fnn.Dense(3, name="layer")], POINTS),
        (lambda **o: jn.linen.RMSNorm(scale_offset=1.0, **o), [fnn.Dense(3, name="layer")], POINTS),
        (fnn.RMSNorm, [fnn.Conv(4, (3, 3), feature_group_count=2, name="layer")], X),
        (fnn.LayerNorm, [fnn.Conv(3, (1, 1), strides=2, name="layer")], X),
        (fnn.LayerNorm, [fnn.Conv(6, 3, padding=0, feature_group_count=2, name="layer")], X[:, 0]),
        (lambda **o: fnn.GroupNorm(2, **o), [fnn.Conv(3, (2, 2), padding="VALID", name="layer")],
         X),
        (jn.linen.InstanceNorm, [fnn.DenseGeneral(3, axis=(-2, -1), name="layer")], X),
        (lambda **o: fnn.LayerNorm(reduction_axes=(-2, -1), feature_axes=(-2, -1), **o),
         [fnn.DenseGeneral((2, 2), axis=(-1, -2), name="layer")], X),
        (lambda **o: fnn.BatchNorm(True, **o), [fnn.Dense(3, name="layer")], POINTS),
        (lambda **o: fnn.LayerNorm(use_bias=False, **o),
         [fnn.ConvTranspose(3, (3, 3), transpose_kernel=True, name="layer")], X),
    ],
)  # fmt: skip
def test_gain_and_bias_go_into_the_layer_after(norm, layers, x):
    new, (row,) = rows_of(chain(norm(name="norm"), *layers), x)
    assert (row.outcome, row.into) == ("folded", ("layer",))
    assert set(new) == {"params"}
    assert set(new["params"]) == {"layer"}


def test_weights_are_exact():
    """((x @ W + b) - mean) / sqrt(var) * scale + bias, with numbers that float32 holds."""
    model = chain(fnn.Dense(2, name="layer"), fnn.BatchNorm(True, epsilon=0.0, name="norm"))
    variables = {
        "params": {
            "layer": {"kernel": jnp.array([[1.0, 2.0]]), "bias": jnp.array([1e6, 3.0])},
            "norm": {"scale": jnp.array([4.0, 1.0]), "bias": jnp.array([0.5, -1.0])},
        },
        "batch_stats": {
            "norm": {"mean": jnp.array([1e6 + 0.25, 1.0]), "var": jnp.array([4.0, 0.25])}
        },
    }
    before = jax.tree.map(np.asarray, variables)
    _, new, report = jn.linen.fold(model, variables, jnp.array([[1.0], [2.0]]))
    assert new["params"]["layer"]["kernel"].tolist() == [[2.0, 4.0]]
    assert new["params"]["layer"]["bias"].tolist() == [0.0, 3.0]  # 1e6 cancels in float64
    assert report.difference == 0
    # (|2 x + 0| + 0) / |2 x|, and (|4 x| + 3) / |4 x + 3|
    assert report.rows[0].condition == 1
    jax.tree.map(np.testing.assert_array_equal, variables, before)


def test_queries_keys_and_values_share_a_norm():
    class Attention(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            y = fnn.LayerNorm(name="norm")(x)
            return x + fnn.MultiHeadDotProductAttention(2, name="attention")(y)

    new, (row,) = rows_of(Attention(), X[0])
    assert row.into == ("attention/query", "attention/key", "attention/value")
    assert "norm" not in new["params"]


def test_a_layer_takes_a_norm_on_either_side():
    model = chain(LAYER, fnn.Dense(3, name="layer"), fnn.BatchNorm(True, name="after"), fnn.relu)
    _, rows = rows_of(model, POINTS)
    assert [(row.path, row.into) for row in rows] == [("norm", ("layer",)), ("after", ("layer",))]
    assert rows[0].difference == rows[1].difference  # both show where the second norm ends


class Twice(fnn.Module):
    """One layer that is called twice."""

    @fnn.compact
    def __call__(self, x):
        layer = fnn.Dense(x.shape[-1], name="layer")
        return made(BATCH)(layer(layer(x)))


class Looped(fnn.Module):
    @fnn.compact
    def __call__(self, x):
        block = fnn.scan(
            lambda own, x, _: (own(x), None),
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True},
            length=2,
        )
        return block(chain(fnn.Dense(4, name="layer"), BATCH), x, None)[0]


class Mapped(fnn.Module):
    @fnn.compact
    def __call__(self, x):
        return made(BATCH)(EACH(4, name="layer")(x))


class Weighted(fnn.Module):
    @fnn.compact
    def __call__(self, x):
        return made(BATCH)(fnn.WeightNorm(fnn.Dense(3, name="layer"))(x))


class Masked(fnn.Module):
    @fnn.compact
    def __call__(self, x):
        return fnn.Dense(3)(fnn.LayerNorm(name="norm")(x, mask=jnp.ones(x.shape, bool)))


EACH = fnn.vmap(fnn.Dense, variable_axes={"params": 0}, split_rngs={"params": True})
DENSE = fnn.Dense(3, name="layer")
MASKED = fnn.Conv(3, (1,), mask=jnp.ones((1, 4, 3)), name="layer")
DOTS = lambda *given, **named: jax.lax.dot_general(*given, **named)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (chain(DENSE, fnn.relu, BATCH, fnn.relu),
         "its input comes from max, not from a layer; max reads its output"),
        (chain(fnn.relu, BATCH),
         "its input comes from max, not from a layer; the model's output reads its output"),
        (Rejoined(), "add also reads the output of dense; add reads its output"),
        (Twice(), "layer runs 2 times"),
        (Looped(), "norm runs within a scan"),
        (Mapped(), "layer runs within a vmap; the model's output reads its output"),
        (Weighted(), "layer computes with other weights than the model stores"),
        (chain(LAYER, fnn.relu, DENSE), "max reads its output"),
        (chain(LAYER, lambda x: x), "the model's output reads its output"),
        (chain(fnn.LayerNorm(use_scale=False, use_bias=False, name="norm"), DENSE),
         "it has neither scale nor bias"),
        (chain(lambda x: x[:, None], LAYER, fnn.Conv(3, (3,), name="layer")),
         "its bias does not reach the padding of layer"),
        (chain(DENSE, fnn.BatchNorm(True, axis=0, use_bias=False, name="norm"), fnn.relu),
         "its features are not the features of layer; max reads its output"),
        (chain(fnn.BatchNorm(True, axis=0, name="norm"), DENSE),
         "its input comes from outside the model, not from a layer; "
         "its features are not those that layer contracts"),
        (chain(fnn.Dense(3, name="layer", dot_general=DOTS), BATCH, fnn.relu),
         "layer takes no norm: it has a dot_general of its own; max reads its output"),
        (chain(lambda x: x[:, None], MASKED, BATCH, fnn.relu),
         "layer takes no norm: its weights have a mask; max reads its output"),
        (chain(fnn.DenseGeneral(3, batch_dims=0, name="layer"), BATCH, fnn.relu),
         "layer takes no norm: it has batch axes; max reads its output"),
        (Masked(), "it is called with mask"),
    ],
)  # fmt: skip
def test_what_would_change_outputs_stays(model, reason):
    variables = initialized(model, POINTS)
    folded, new, report = jn.linen.fold(model, variables, POINTS)
    (row,) = report.rows
    assert row.outcome == "kept"
    assert reason in row.reason
    jax.tree.map(np.testing.assert_array_equal, new, variables)
    np.testing.assert_array_equal(folded.apply(new, POINTS), model.apply(variables, POINTS))


def test_a_shift_that_cancels_is_refused_beyond_the_bound():
    """A running mean of 1e4 deviations: |x w| + |b| is 2e4 times |y|."""
    x = jax.random.normal(KEY, (64, 8))
    model = chain(fnn.Dense(1, use_bias=False, name="layer"), BATCH, fnn.relu)
    kernel = np.full((8, 1), 1.0, np.float32)
    x = x + 1e4 / 8
    inner = np.asarray(x, np.float64) @ kernel
    variables = {
        "params": {"layer": {"kernel": kernel}, "norm": {"scale": np.ones(1), "bias": np.zeros(1)}},
        "batch_stats": {"norm": {"mean": inner.mean(0), "var": inner.var(0)}},
    }
    variables = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), variables)
    _, _, kept = jn.linen.fold(model, variables, x)
    (row,) = kept.rows
    size = np.abs(inner - inner.mean()).mean() / inner.std()
    assert row.condition == pytest.approx(2 * inner.mean() / inner.std() / size, rel=1e-2)
    assert row.reason.startswith("its shift cancels in layer: condition number ")
    assert row.reason.endswith("more than the bound 2.9e+03")
    for bound, outcome in (
        (row.condition * 1.01, "folded"),
        (row.condition * 0.99, "kept"),
        (math.inf, "folded"),
    ):
        _, _, report = jn.linen.fold(model, variables, x, bound=bound)
        assert report.rows[0].outcome == outcome
    # what is lost is about what one rounding of the output becomes
    assert report.difference < 3 * row.rounding(2.0**-23) * report.largest


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_errors_of_folded_layers_follow_the_condition_number(dtype, ordinary_promotion):
    """Against float64: folded and unfolded lose alike, as the condition number says."""
    x = jax.random.normal(KEY, (256, 16))
    model = chain(fnn.Dense(4, use_bias=False, dtype=dtype, name="layer"), BATCH)
    x = x + jnp.linspace(0, 2, 16)[None]
    variables = initialized(model, x)
    kernel, norm = variables["params"]["layer"]["kernel"], variables["params"]["norm"]
    inner = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    variables["batch_stats"] = {
        "norm": {
            "mean": jnp.asarray(inner.mean(0), jnp.float32),
            "var": jnp.asarray(inner.var(0), jnp.float32),
        }
    }
    true = (inner - inner.mean(0)) / np.sqrt(inner.var(0) + 1e-5)
    true = true * np.asarray(norm["scale"], np.float64) + np.asarray(norm["bias"], np.float64)
    folded, new, report = jn.linen.fold(model, variables, x, bound=math.inf)
    errors = [
        np.abs(np.asarray(model.apply(values, x), np.float64) - true).max()
        for model, values in ((model, variables), (folded, new))
    ]
    loss = report.rows[0].rounding(float(jnp.finfo(dtype).eps)) * np.abs(true).max()
    assert 0.02 * loss < errors[1] < 2 * loss
    assert errors[1] < 4 * errors[0]


def test_which_norms_are_folded():
    model = chain(
        fnn.Dense(3, name="a"), fnn.BatchNorm(True, name="norm"), fnn.relu,
        fnn.LayerNorm(name="norm2"), fnn.Dense(3, name="b"),
    )  # fmt: skip
    variables = initialized(model, POINTS)

    def paths(**options):
        rows = jn.linen.fold(model, variables, POINTS, **options)[2].rows
        return [row.path for row in rows if row.outcome == "folded"]

    assert paths() == ["norm", "norm2"]
    assert paths(only="norm") == ["norm"]
    assert paths(only=fnn.LayerNorm) == ["norm2"]
    assert paths(only=["norm2", fnn.BatchNorm]) == ["norm", "norm2"]
    assert paths(only=lambda path, module: module.epsilon == 1e-6) == ["norm2"]
    with pytest.raises(ValueError, match=r"only must name norms .* got 'nor'; there are .*'norm'"):
        jn.linen.fold(model, variables, POINTS, only=["norm", "nor"])
    with pytest.raises(TypeError, match="only must be a class, a path"):
        jn.linen.fold(model, variables, POINTS, only=3)


def test_a_folded_model_stands_for_its_model():
    """In jit, in recalibrate, in fold, and with programs within it by nn.jit and nn.remat."""

    class Blocks(fnn.Module):
        @fnn.compact
        def __call__(self, x, train=False):
            for block in (fnn.jit(Block, static_argnums=2), fnn.remat(Block, static_argnums=(2,))):
                x = block()(x, train)
            return x

    class Block(fnn.Module):
        @fnn.compact
        def __call__(self, x, train):
            x = fnn.BatchNorm(not train)(fnn.Dense(4)(x))
            return jn.linen.BatchNorm(not train)(fnn.relu(x))

    model = Blocks()
    variables = initialized(model, POINTS)
    expected = model.apply(variables, POINTS)
    folded, new, report = jn.linen.fold(model, variables, POINTS, train=False)
    # the second norm follows an activation, and goes into the next block
    assert [row.outcome for row in report.rows] == ["folded", "folded", "folded", "kept"]
    np.testing.assert_allclose(folded.apply(new, POINTS), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(model.apply(variables, POINTS), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(folded.apply(new, POINTS), expected, rtol=1e-5, atol=1e-5)
    again = jn.linen.recalibrate(folded, new, [POINTS], train=True)
    assert jax.tree.structure(again) == jax.tree.structure(new)
    _, _, report = jn.linen.fold(folded, new, POINTS, train=False)
    assert [row.reason for row in report.rows][:2] == ["it is folded already"] * 2


KINDS = fnx.Param, fnx.BatchStat


class Network(fnx.Module):
    """As :func:`network` builds it of linen."""

    def __init__(self, norms, rngs):
        self.conv = fnx.Conv(4, 4, (3, 3), use_bias=False, rngs=rngs)
        self.norm = norms.BatchNorm(4, rngs=rngs)
        self.layer = norms.LayerNorm(4, rngs=rngs)
        self.dense = fnx.LinearGeneral(4, (2, 2), use_bias=False, rngs=rngs)
        self.inner = norms.BatchNorm(4, axis=(-2, -1), rngs=rngs)
        self.rms = norms.RMSNorm(2, rngs=rngs)
        self.drop = fnx.Dropout(0.5, rngs=rngs)
        self.out = fnx.Linear(2, 3, rngs=rngs)

    def __call__(self, x):
        x = self.layer(fnx.relu(self.norm(self.conv(x))).mean((1, 2)))
        x = fnx.relu(self.inner(self.dense(x)))
        return self.out(self.drop(self.rms(x)))


def network(model):
    """The same network of linen, and its variables."""
    # fmt: off
    linen = chain(
        fnn.Conv(4, (3, 3), use_bias=False, name="conv"), BATCH, fnn.relu,
        lambda x: x.mean((1, 2)), fnn.LayerNorm(name="layer"),
        fnn.DenseGeneral((2, 2), use_bias=False, name="dense"),
        fnn.BatchNorm(True, axis=(-2, -1), name="inner"), fnn.relu, fnn.RMSNorm(name="rms"),
        fnn.Dense(3, name="out"),
    )
    # fmt: on
    variables = {}
    for collection, kind in (("params", fnx.Param), ("batch_stats", fnx.BatchStat)):
        variables[collection] = fnx.to_pure_dict(fnx.state(model, kind))
    for of_inner in (variables["params"]["inner"], variables["batch_stats"]["inner"]):
        of_inner |= {name: value.reshape(2, 2) for name, value in of_inner.items()}
    return linen, variables


def network_of_nnx(norms=fnx):
    model = Network(norms, fnx.Rngs(0))
    model.eval()
    state = fnx.state(model, KINDS)
    leaves, structure = jax.tree.flatten(state)
    keys = jax.random.split(KEY, len(leaves))
    fnx.update(model, structure.unflatten(
        [a + 0.3 * jax.random.uniform(key, a.shape) for a, key in zip(leaves, keys, strict=True)]
    ))  # fmt: skip
    return model


@pytest.mark.parametrize("norms", [fnx, jn.nnx])
def test_nnx_agrees_with_linen(norms):
    model = network_of_nnx(norms)
    expected, before = model(X), fnx.to_pure_dict(fnx.state(model, KINDS))
    folded, report = jn.nnx.fold(model, X)
    assert [row.outcome for row in report.rows] == ["folded"] * 4
    assert [row.into for row in report.rows] == [("conv",), ("dense",), ("dense",), ("out",)]
    jax.tree.map(np.testing.assert_array_equal, fnx.to_pure_dict(fnx.state(model, KINDS)), before)
    assert type(folded.norm).__name__ == "Identity"
    for _ in range(2):
        found = fnx.jit(lambda model, x: model(x))(folded, X)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        folded.train()
        folded.eval()
    linen, variables = network(model)
    _, new, of_linen = jn.linen.fold(linen, variables, X)
    assert [row.path for row in of_linen.rows] == [row.path for row in report.rows]
    params = fnx.to_pure_dict(fnx.state(folded, fnx.Param))
    jax.tree.map(np.testing.assert_array_equal, new["params"], params)
    assert not jax.tree.leaves(fnx.state(folded, fnx.BatchStat))
    again, _ = jn.nnx.fold(model, X, copy=False)
    assert again is model
    np.testing.assert_array_equal(model(X), folded(X))


def test_what_nnx_cannot_fold():
    rngs = fnx.Rngs(0)
    layer, norm = fnx.Linear(4, 4, rngs=rngs), fnx.BatchNorm(4, rngs=rngs)
    model = fnx.Sequential(layer, norm)
    with pytest.raises(ValueError, match=r"running statistics to be folded: layers/1 uses"):
        jn.nnx.fold(model, POINTS)
    model.eval()
    tied = fnx.Linear(4, 4, rngs=rngs)
    tied.kernel = layer.kernel
    for rest, reason in (
        ([layer, norm, layer], "layers/0 runs 2 times"),
        ([layer, norm, tied], "layers/0 shares its weights"),
    ):
        (row,) = jn.nnx.fold(fnx.Sequential(*rest), POINTS)[1].rows
        assert reason in row.reason
    with pytest.raises(TypeError, match=r"model must be a module of flax.nnx: got BatchNorm"):
        jn.nnx.fold(BATCH, POINTS)
    with pytest.raises(TypeError, match=r"fold takes arrays, outside of jax\.jit"):
        fnx.jit(lambda model, x: jn.nnx.fold(model, x)[0](x))(model, POINTS)
    with pytest.raises(ValueError, match="the model must call a norm"):
        jn.nnx.fold(layer, POINTS)


def test_bounds_and_models_are_checked():
    model = chain(DENSE, BATCH)
    for bound, error in (
        ("3", TypeError),
        (True, TypeError),
        (0.5, ValueError),
        (math.nan, ValueError),
    ):
        with pytest.raises(error, match="bound must be "):
            jn.linen.fold(model, {}, POINTS, bound=bound)
        with pytest.raises(error, match="bound must be "):
            jn.nnx.fold(fnx.BatchNorm(3, rngs=fnx.Rngs(0)), POINTS, bound=bound)
    with pytest.raises(TypeError, match=r"model must be a module of flax\.linen: got Linear"):
        jn.linen.fold(fnx.Linear(4, 3, rngs=fnx.Rngs(0)), {}, POINTS)


def test_reports_print_and_export():
    model = network_of_nnx()
    report = jn.nnx.fold(model, X, bound=1.0)[1]
    text, data = str(report), json.loads(report.to_json())
    assert text.splitlines()[0].split() == [
        "path",
        "norm",
        "outcome",
        "details",
        "difference",
        "condition",
        "float32",
        "bfloat16",
    ]
    assert "norm   BatchNorm  kept" in text
    assert [row["outcome"] for row in data["rows"]] == ["kept", "kept", "kept", "folded"]
    assert data["rows"][0]["condition"] == report.rows[0].condition


class Reading(fnn.Module):
    """A layer whose weights the model reads as well."""

    name_of: str

    @fnn.compact
    def __call__(self, x):
        layer = fnn.Dense(4, name="dense")
        y = fnn.BatchNorm(True, name="norm")(layer(x))
        return y + jnp.sum(layer.variables["params"][self.name_of])


@pytest.mark.parametrize("name", ["kernel", "bias"])
def test_weights_that_the_model_reads_stay(name):
    model = Reading(name)
    variables = initialized(model, POINTS)
    _, new, report = jn.linen.fold(model, variables, POINTS)
    assert report.rows[0].outcome == "kept"
    assert "outside of dense also reads its weights" in report.rows[0].reason
    jax.tree.map(np.testing.assert_array_equal, new, variables)
