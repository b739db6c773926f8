"""Test the diagnosis of norms: its numbers by NumPy, and three faults that it must find."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import long_sweep
from flax import linen as nn
from flax import nnx
from jax.experimental import checkify

import jaxnorm as jn
from jaxnorm.linen import assert_healthy, diagnose, plot_diagnoses
from jaxnorm.norms.table import find

pytestmark = pytest.mark.usefixtures("ordinary_promotion")
KEY = jax.random.key(0)
X = np.random.default_rng(0).standard_normal((6, 5, 4, 8)).astype("f4") * 3 + 2


def linen_of(module, x=X, **arguments):
    call = {"mask": arguments["mask"]} if "mask" in arguments else {}
    variables = module.init(KEY, x, **call)
    return diagnose(module, variables, x, **arguments)


def close(found, truth):
    np.testing.assert_allclose(found, truth, rtol=2e-5, atol=1e-6)


GROUPS = {
    "batch": ((0, 1, 2), X),
    "layer": (3, X),
    "rms": (3, X),
    "instance": ((1, 2), X),
    "group": ((1, 2, 4), X.reshape(6, 5, 4, 2, 4)),
}
OPTIONS = {"group": {"num_groups": 2}, "batch": {"use_running_average": False}}


@pytest.mark.parametrize("package", [jn.linen, nn], ids=["ours", "flax"])
@pytest.mark.parametrize("name", GROUPS)
def test_numbers_are_those_of_numpy(name, package):
    module = getattr(package, find(name).linen)(epsilon=7.0, **OPTIONS.get(name, {}))
    found = linen_of(module)[""]
    axes, x = GROUPS[name]
    x = x.astype("f8")
    mean, var = x.mean(axes), x.var(axes)
    close(found.mean, x.mean())
    close(found.deviation, np.sqrt(var.mean()))
    level = var if name != "rms" else var + mean**2
    close(found.collapsed, (level < 7).mean())
    if name == "rms":
        assert found.offset is None
    else:
        close(found.offset, abs(mean / np.sqrt(var)).max())
    size = np.sqrt((X.astype("f8") ** 2).mean((0, 1, 2)))
    close(found.exploding, size.max() / np.median(size))
    assert (found.channel, found.dead, found.not_finite) == (size.argmax(), 0, 0)
    assert (found.gain_min, found.gain_max) == (1, 1)
    if name == "batch":
        ratio = (var + 7) / (1 + 7)
        close(found.mean_distance, abs(mean).max() / np.sqrt(8))
        close(found.var_ratio, ratio[abs(np.log(ratio)).argmax()])
    else:
        assert found.mean_distance is found.var_ratio is None


NNX = {"group": {"num_groups": 2}}


@pytest.mark.parametrize("name", GROUPS)
def test_nnx_agrees(name):
    linen = linen_of(jn.linen.norm(name, **OPTIONS.get(name, {})))
    module = jn.nnx.norm(name, 8, rngs=nnx.Rngs(0), **NNX.get(name, {}))
    found = jn.nnx.diagnose(module, X)
    jax.tree.map(np.testing.assert_array_equal, found, linen)
    assert (found.paths, found.names) == (linen.paths, linen.names)


MODULE_OPTIONS = {
    "evonorm_s0": {"num_groups": 2},
    "gated_rms": {"gate_first": True},
    "ghost_batch": {"num_chunks": 2},
    "group": {"num_groups": 2},
}


WITH_STATISTICS = [name for name, row in jn.available_norms().items() if row.axes]
QUICK = ("evonorm_b0", "gated_rms", "qk", "pair", "switchable")


@pytest.mark.parametrize("name", long_sweep(WITH_STATISTICS, quick=QUICK))
def test_every_norm_with_statistics_is_seen(name):
    row = jn.available_norms()[name]
    more = ()
    if "condition" in row.call:
        more = (X[..., :3],) if name == "spade" else (X[:, 0, 0, :3],)
    if "gate)" in row.call or "q, k" in row.call:
        more = (X,)
    options = MODULE_OPTIONS.get(name, {}) | ({"use_running_average": False} if row.running else {})
    module = jn.linen.norm(name, **options)
    variables = jax.jit(lambda: module.init(KEY, X, *more))()
    found = diagnose(module, variables, X, *more)
    assert len(found.norms) == (2 if name == "qk" else 1)
    assert not found.missing
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    assert (found.norms[0].var_ratio is not None) == ("batch_stats" in variables)
    sizes = (3,) if "condition" in row.call else ()
    twin = getattr(jn.nnx, row.nnx)(8, *sizes, rngs=nnx.Rngs(0), **options)
    assert len(jn.nnx.diagnose(twin, X, *more).norms) == len(found.norms)


def test_masks_count(rng):
    mask = rng.random((6, 5, 1, 1)) > 0.4
    x = np.where(mask, X, np.nan).astype("f4")
    module = jn.linen.BatchNorm(use_running_average=False)
    found = linen_of(module, x, mask=mask)[""]
    known = X[mask[..., 0, 0]].astype("f8")
    close(found.mean, known.mean())
    close(found.offset, abs(known.mean((0, 1)) / known.std((0, 1))).max())
    twin = jn.nnx.diagnose(jn.nnx.BatchNorm(8, rngs=nnx.Rngs(0)), x, mask=mask).norms[0]
    jax.tree.map(np.testing.assert_array_equal, twin, found)
    for package in (jn.nnx, nnx):  # which take it by position
        norm = package.RMSNorm(8, rngs=nnx.Rngs(0))
        close(jn.nnx.diagnose(norm, np.where(mask, x, 0), mask).norms[0].mean, known.mean())
    gated = jn.nnx.GatedRMSNorm(8, gate_first=False, rngs=nnx.Rngs(0))
    close(jn.nnx.diagnose(gated, X, X).norms[0].mean, X.mean(dtype="f8"))


def test_integers_and_complex_numbers():
    """Which norms take, too."""
    norm = jn.linen.LayerNorm()
    close(linen_of(norm, np.arange(12).reshape(2, 6))[""].mean, 5.5)
    z = X + 1j * X[::-1]
    found = linen_of(jn.linen.BatchNorm(use_running_average=False, use_bias=False), z)[""]
    close(found.mean, abs(z.mean(dtype="c16")))
    close(found.offset, abs(z.mean((0, 1, 2)) / z.std((0, 1, 2))).max())


def test_segments_and_residuals():
    module = jn.linen.LayerNorm(reduction_axes=(1, 2, 3))
    ids = np.array([0, 0, 0, 1, 1])
    variables = module.init(KEY, X)
    found = diagnose(module, variables, X, segments=ids, num_segments=2)[""]
    parts = [X[:, :3], X[:, 3:]]
    close(found.offset, max(abs(p.mean((1, 2, 3)) / p.std((1, 2, 3))).max() for p in parts))
    close(diagnose(module, variables, X, residual=2 * X)[""].mean, 3 * X.mean(dtype="f8"))


class Net(nn.Module):
    """A model of Flax's norms and ours; ``scale`` is of the first kernel."""

    scale: float = 1.0

    @nn.compact
    def __call__(self, x, train=True):
        make = nn.initializers.variance_scaling(self.scale**2, "fan_in", "normal")
        x = nn.Dense(16, use_bias=False, kernel_init=make)(x)
        x = nn.relu(nn.LayerNorm()(x))
        x = nn.Dense(16)(x)
        x = jn.linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        norm = jn.linen.RMSNorm()
        return nn.Dense(2)(norm(norm(x) + x))


ROWS = np.random.default_rng(1).standard_normal((64, 8)).astype("f4")
PATHS = ("LayerNorm_0", "BatchNorm_0", "RMSNorm_0", "RMSNorm_0:1")


def warmed(model, x, momentum=None):
    """Variables whose running statistics are those of x."""
    variables = model.init(KEY, x, train=False)
    return jn.linen.recalibrate(model, variables, [x], train=True)


@pytest.fixture(scope="module")
def healthy():
    model = Net()
    return model, warmed(model, ROWS)


def test_a_healthy_model_has_no_findings(healthy):
    model, variables = healthy
    found = diagnose(model, variables, ROWS)
    assert found.paths == PATHS
    assert found.names == ("LayerNorm", "BatchNorm", "RMSNorm", "RMSNorm")
    assert_healthy(found)
    lines = str(found).splitlines()
    assert len(lines) == 1 + len(PATHS)  # no line below the table
    assert lines[0].startswith("norm ")
    assert [line.split()[0] for line in lines[1:]] == list(PATHS)


def complaints(found):
    """What stands below the table."""
    return str(found).partition("\n\n")[2].splitlines()


def test_running_statistics_that_never_follow(healthy):
    """Momentum 1 keeps the old value, as PyTorch's 0.1 does nearly when it is taken for Flax's."""
    model, variables = healthy
    stats = {"BatchNorm_0": {"mean": jnp.full(16, 20.0), "var": jnp.full(16, 1e4)}}
    found = diagnose(model, variables | {"batch_stats": stats}, ROWS, train=False)
    assert [line.split(":")[0] for line in complaints(found)] == ["BatchNorm_0"]
    assert "batch variance over running variance is" in complaints(found)[0]
    norm = jn.linen.BatchNorm(momentum=1.0, use_running_average=False)
    state = norm.init(KEY, ROWS)
    for _ in range(3):
        state |= norm.apply(state, ROWS * 5 + 10, mutable=["batch_stats"])[1]
    (mean, var) = complaints(diagnose(norm, state, ROWS * 5 + 10))
    assert mean.startswith("BatchNorm: a running mean is 1")
    assert var.startswith("BatchNorm: batch variance over running variance is")
    with pytest.raises(checkify.JaxRuntimeError, match="a running mean is"):
        assert_healthy(diagnose(norm, state, ROWS * 5 + 10))


def test_collapsed_variance():
    model = Net(scale=1e-4)
    found = diagnose(model, warmed(model, ROWS), ROWS)
    assert found["LayerNorm_0"].collapsed == 1
    assert complaints(found) == [
        "LayerNorm_0: a share of 1 of its groups has a variance below epsilon."
    ]
    with pytest.raises(checkify.JaxRuntimeError, match=r"'LayerNorm_0'.*below epsilon"):
        assert_healthy(found)
    assert_healthy(found, collapsed=1.0)


def test_a_channel_at_a_million(healthy):
    model, variables = healthy
    params = dict(variables["params"])
    kernel = params["Dense_1"]["kernel"]
    params["Dense_1"] = {"kernel": kernel.at[:, 3].mul(1e6), "bias": params["Dense_1"]["bias"]}
    found = diagnose(model, variables | {"params": params}, ROWS)
    ill = found["BatchNorm_0"]
    assert ill.channel == 3
    assert 1e5 < ill.exploding < 1e7
    assert complaints(found)[0].startswith("BatchNorm_0: its largest channel is ")
    assert " at 3 " in str(found)
    with pytest.raises(checkify.JaxRuntimeError, match=r"'BatchNorm_0'.*its largest channel"):
        assert_healthy(found)


def test_dead_channels_cancellation_and_nan():
    x = ROWS.copy()
    x[:, :2] = 5.0
    norm = jn.linen.BatchNorm(use_running_average=False)
    found = linen_of(norm, x)[""]
    assert found.dead == found.collapsed == 0.25
    far = ROWS + np.float32(1e4)
    shifted = linen_of(norm, far)
    close(shifted[""].offset, abs(far.mean(0, dtype="f8") / far.std(0, dtype="f8")).max())
    assert any("one pass" in line for line in complaints(shifted))
    x[0, 0] = np.nan
    broken = linen_of(norm, x)[""]
    close(broken.not_finite, 1 / x.size)
    assert np.isfinite(broken.mean)


def test_within_jit_in_one_forward_pass(healthy):
    model, variables = healthy
    passes = []

    @jax.jit
    def step(variables, x):
        passes.append(1)
        found = diagnose(model, variables, x)
        assert "traced" in str(found)
        return found, found.metrics()["LayerNorm_0/mean"]

    found, mean = step(variables, ROWS)
    assert sum(passes) == 1
    assert mean == found["LayerNorm_0"].mean
    jax.tree.map(lambda a, b: close(a, b), found, diagnose(model, variables, ROWS))
    assert str(found).startswith("norm")
    metrics = found.metrics()
    assert all(type(value) is float for value in metrics.values())
    assert metrics["BatchNorm_0/channel"] == float(found["BatchNorm_0"].channel)
    assert "LayerNorm_0/var_ratio" not in metrics


def test_checkify_under_jit(healthy):
    model, variables = healthy

    def step(variables, x):
        assert_healthy(diagnose(model, variables, x))
        return x.sum()

    checked = jax.jit(checkify.checkify(step))
    error, _ = checked(variables, ROWS)
    error.throw()
    error, _ = checked(variables, ROWS * np.nan)
    with pytest.raises(checkify.JaxRuntimeError, match=r"share of 1.* of its input is NaN"):
        error.throw()
    with pytest.raises(ValueError, match="not functionalized"):
        jax.jit(step)(variables, ROWS)


class Stack(nn.Module):
    carried: bool = True

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return x + nn.Dense(8)(jn.linen.RMSNorm()(x)), None

        axes = {"params": 0} | ({"diagnosis": 0} if self.carried else {})
        layers = nn.scan(Layer, variable_axes=axes, split_rngs={"params": True}, length=3)
        return nn.LayerNorm()(layers(name="layers")(x, None)[0])


def test_stacks_of_layers():
    variables = Stack().init(KEY, ROWS)
    params = {"params": variables["params"]}
    found = diagnose(Stack(), params, ROWS)
    assert found.paths == ("layers/RMSNorm_0", "LayerNorm_0")
    assert found.norms[0].mean.shape == (3,)
    close(found.norms[0].mean[0], ROWS.mean(dtype="f8"))
    assert [path for path, *_ in found.rows()][:3] == [f"layers/RMSNorm_0[{i}]" for i in range(3)]
    assert "layers/RMSNorm_0[2]/mean" in found.metrics()
    assert_healthy(found)
    left = diagnose(Stack(carried=False), params, ROWS)
    assert (left.paths, left.missing) == (("LayerNorm_0",), ("layers/RMSNorm_0",))
    assert complaints(left) == ["layers/RMSNorm_0: gave no numbers, see Diagnosis.missing."]


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.norm, self.last = nnx.BatchNorm(8, rngs=rngs), jn.nnx.RMSNorm(8, rngs=rngs)

    def __call__(self, x):
        return self.last(self.last(self.norm(self.first(x))))


def test_models_of_nnx_stay_as_they_are():
    model = NnxNet(nnx.Rngs(0))
    call = nnx.BatchNorm.__call__
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    found = jn.nnx.diagnose(model, ROWS)
    assert found.paths == ("norm", "last", "last:1")
    assert nnx.BatchNorm.__call__ is call
    after = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    again = nnx.jit(lambda model, x: jn.nnx.diagnose(model, x))(model, ROWS)
    jax.tree.map(lambda a, b: close(a, b), again, found)
    with pytest.raises(TypeError, match=r"dot_general|incompatible"):
        jn.nnx.diagnose(model, ROWS[:, :3])
    assert nnx.BatchNorm.__call__ is call  # after an error as well


TRANSFORMS = {
    "jit": lambda norm, x: nnx.jit(lambda norm, x: norm(x))(norm, x),
    "remat": lambda norm, x: nnx.remat(lambda norm, x: norm(x))(norm, x),
    "cond": lambda norm, x: nnx.cond(True, lambda m, x: m(x), lambda m, x: m(x), norm, x),
    # what cannot carry numbers out
    "vmap": lambda norm, x: nnx.vmap(lambda norm, x: norm(x), in_axes=(None, 0))(norm, x),
    "checkpoint": lambda norm, x: jax.checkpoint(lambda x: norm(x))(x),
    "jax.vmap": lambda norm, x: jax.vmap(lambda x: norm(x))(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_norms_within_transformations_of_nnx(name):
    class Net(nnx.Module):
        def __init__(self, transform):
            self.transform = transform
            self.norm, self.last = (nnx.LayerNorm(8, rngs=nnx.Rngs(0)) for _ in range(2))

        def __call__(self, x):
            return self.last(self.transform(self.norm, x))

    bare = jn.nnx.diagnose(Net(lambda norm, x: norm(x)), ROWS)
    found = jn.nnx.diagnose(Net(TRANSFORMS[name]), ROWS)
    if name in ("vmap", "checkpoint", "jax.vmap"):
        assert (found.paths, found.missing) == (("last",), ("norm",))
        jax.tree.map(close, found["last"], bare["last"])
        return
    assert (found.paths, found.missing) == (("norm", "last"), ())
    jax.tree.map(close, found.norms, bare.norms)


def test_a_norm_that_calls_its_base_class_is_called_once():
    class Own(nnx.LayerNorm):
        def __call__(self, x):
            return super().__call__(x + 1)

    class LinenOwn(nn.LayerNorm):
        @nn.compact
        def __call__(self, x):
            return super().__call__(x + 1)

    rngs = nnx.Rngs(0)
    of_nnx = jn.nnx.diagnose(nnx.Sequential(Own(8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)), ROWS)
    for found in (of_nnx, linen_of(nn.Sequential([LinenOwn(), nn.LayerNorm()]), ROWS)):
        assert len(found.paths) == 2
        close(found.norms[0].mean, ROWS.mean())


def test_compiled_parts_of_nnx_are_seen_each_time():
    class Net(nnx.Module):
        def __init__(self):
            self.first, self.last = (nnx.LayerNorm(8, rngs=nnx.Rngs(0)) for _ in range(2))

        @nnx.jit
        def part(self, x):
            return self.first(x)

        def __call__(self, x):
            return self.last(self.part(x) + 1)

    model = Net()
    model(ROWS)
    for x in (ROWS, 3 * ROWS, ROWS[:2]):
        found = jn.nnx.diagnose(model, x)
        assert (found.paths, found.missing) == (("first", "last"), ())
        close(found["first"].mean, x.mean())


def test_stacks_of_layers_in_nnx():
    class Layers(nnx.Module):
        def __init__(self):
            make = nnx.vmap(lambda rngs: nnx.BatchNorm(8, rngs=rngs), in_axes=0, out_axes=0)
            self.layers = nnx.split_rngs(splits=3)(make)(nnx.Rngs(0))

        def __call__(self, x):
            body = lambda norm, x: 2 * norm(x) + 1
            return nnx.scan(body, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)

    model = Layers()
    found = jn.nnx.diagnose(model, ROWS)
    assert [path for path, *_ in found.rows()] == [f"layers[{i}]" for i in range(3)]
    x, norm = ROWS, nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    for _, _, health in found.rows():
        jax.tree.map(close, health, jn.nnx.diagnose(norm, x).norms[0])
        x = 2 * nnx.BatchNorm(8, rngs=nnx.Rngs(0))(x) + 1
    again = nnx.jit(lambda model, x: jn.nnx.diagnose(model, x))(model, ROWS)
    jax.tree.map(close, again, found)
    structures = (jax.tree.structure(nnx.state(each)) for each in (model, Layers()))
    assert len(set(structures)) == 1  # nothing is left in the model


def test_a_single_example():
    """It has no channel with a variance that could be 0."""
    found = jn.nnx.diagnose(nnx.LayerNorm(8, rngs=nnx.Rngs(0)), ROWS[0]).norms[0]
    close(found.mean, ROWS[0].mean(dtype="f8"))
    assert (found.dead, found.collapsed) == (0, 0)
    rows = jn.nnx.diagnose(nnx.LayerNorm(8, rngs=nnx.Rngs(0)), ROWS[:1]).norms[0]
    jax.tree.map(close, rows, found)


def test_figures(healthy, tmp_path):
    model, variables = healthy
    first = diagnose(model, variables, ROWS)
    found = [first, jax.tree.map(lambda number: 2 * number, first)]
    figure = found[0].plot(tmp_path / "depth.png")
    assert (tmp_path / "depth.png").stat().st_size > 1000
    assert len(figure.axes[0].lines[0].get_xdata()) == len(PATHS)
    series = plot_diagnoses(found, steps=[0, 100])
    assert series.axes[0].lines[0].get_xdata().tolist() == [0, 100]
    # each norm is named once, and each number once in its picture, however many norms there are
    assert [text.get_text() for text in series.legends[0].get_texts()] == list(PATHS)
    legends = [[text.get_text() for text in ax.get_legend().get_texts()] for ax in series.axes]
    assert legends[0] == ["mean", "deviation"]
    assert legends[2] == ["collapsed", "dead", "not_finite"]


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: linen_of(nn.Dense(3)), ValueError, "Dense calls none of Flax or jaxnorm"),
        (
            lambda: jn.nnx.diagnose(nnx.Linear(8, 2, rngs=nnx.Rngs(0)), ROWS),
            ValueError,
            "Linear calls none",
        ),
        (lambda: assert_healthy(linen_of(nn.RMSNorm()), epsilon=1), TypeError, "epsilon"),
        (lambda: plot_diagnoses([]), ValueError, "one at least: got 0"),
        (lambda: plot_diagnoses(linen_of(nn.RMSNorm())), TypeError, "got one Diagnosis"),
        (
            lambda: plot_diagnoses([linen_of(nn.RMSNorm())], steps=[1, 2]),
            ValueError,
            "got 2 for 1",
        ),
        (lambda: diagnose(ROWS, {}, ROWS), TypeError, r"module of flax\.linen: got ndarray"),
        (
            lambda: jn.nnx.diagnose(nn.RMSNorm(), ROWS),
            TypeError,
            r"module of flax\.nnx: got RMSNorm",
        ),
        (lambda: assert_healthy(3), TypeError, "result of diagnose: got int"),
        (lambda: linen_of(nn.RMSNorm())["norm"], KeyError, "got 'norm'"),
    ],
)
def test_errors(call, error, said):
    with pytest.raises(error, match=said):
        call()


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(),
        jn.linen.BatchNorm(use_running_average=False),
        nn.GroupNorm(num_groups=2),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_an_empty_batch_has_numbers_of_nothing(norm):
    variables = norm.init(jax.random.key(0), jnp.ones((2, 3, 4)))
    found = jn.linen.diagnose(norm, variables, jnp.zeros((0, 3, 4)))
    numbers = found.metrics()
    assert {numbers[f"/{name}"] for name in ("mean", "offset", "collapsed", "not_finite")} == {0}
