"""Test norms by name: each prints, trains in both families, and is listed."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as flax_linen
from flax import nnx as flax_nnx

import jaxnorm as jn
from jaxnorm.norms import command

NAMES = list(jn.available_norms())
X = np.random.default_rng(0).standard_normal((8, 4, 4, 8)).astype(np.float32) * 3 + 2
# what a module needs besides the defaults
OPTIONS = {
    "group": {"num_groups": 2},
    "evonorm_s0": {"num_groups": 2},
    "ghost_batch": {"num_chunks": 2},
}
ALONE = [name for name, row in jn.available_norms().items() if row.call.endswith("norm(x)")]


def first(y):
    return y[0] if isinstance(y, tuple) else y


@pytest.fixture
def own():
    """A norm of the user's own, of both families."""

    class Doubled(flax_linen.Module):
        @flax_linen.compact
        def __call__(self, x):
            return 2 * jn.rms_norm(x)

    yield jn.register_norm("doubled", linen=Doubled, nnx=jn.nnx.RMSNorm, formula="2 x / rms(x)")
    jn.unregister_norm("doubled")


@pytest.mark.parametrize("name", NAMES)
def test_rows_say_what_there_is(name):
    row = jn.available_norms()[name]
    linen, nnx = (getattr(package, row.linen) for package in (jn.linen, jn.nnx))
    assert linen.__name__ == nnx.__name__ == row.nnx
    assert row.running == ("use_running_average" in inspect.signature(linen.__init__).parameters)
    assert row.running == ("use_running_average" in inspect.signature(nnx.__init__).parameters)
    if row.function:
        assert callable(getattr(jn, row.function))
    assert str(row).startswith(name)
    assert row.formula in str(row)
    assert re.search(r"\d{4}", row.source)


@pytest.mark.parametrize("name", ALONE)
def test_each_trains_by_name_in_both_families(name, rng):
    """A step of gradient descent on the mean square of the output, at a rate found safe."""
    target = rng.standard_normal(X.shape).astype(np.float32)
    options = OPTIONS.get(name, {})
    if jn.available_norms()[name].running:
        options = options | {"use_running_average": False}
    linen = jn.linen.norm(name, **options)
    variables = linen.init(jax.random.key(0), X)
    if not (params := variables.get("params")):
        return
    state = {key: value for key, value in variables.items() if key != "params"}
    tx = optax.sgd(1e-2)

    def loss(params):
        y, _ = linen.apply({"params": params, **state}, X, mutable=list(state))
        return jnp.square(first(y) - target).mean()

    before, slope = jax.value_and_grad(loss)(params)
    stepped = optax.apply_updates(params, tx.update(slope, tx.init(params))[0])
    assert loss(stepped) < before

    nnx = jn.nnx.norm(name, 8, rngs=flax_nnx.Rngs(0), **options)
    optimizer = flax_nnx.Optimizer(nnx, tx, wrt=flax_nnx.Param)
    mean_square = lambda model: jnp.square(first(model(X)) - target).mean()
    found, slope = flax_nnx.value_and_grad(mean_square)(nnx)
    np.testing.assert_array_equal(found, before)
    optimizer.update(nnx, slope)
    assert mean_square(nnx) < before


def test_a_norm_of_ones_own_is_found(own, capsys):
    assert jn.available_norms()["doubled"] == own
    assert "\ndoubled " in repr(jn.available_norms())
    np.testing.assert_allclose(jn.linen.norm("doubled").apply({}, X), 2 * jn.rms_norm(X))
    assert type(jn.nnx.norm("doubled", 8, rngs=flax_nnx.Rngs(0))) is jn.nnx.RMSNorm
    assert command.main(["doubled", "rms"]) == 0
    assert capsys.readouterr().out.splitlines()[1].strip() == "2 x / rms(x)"


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: jn.linen.norm("rsm"), ValueError, "got 'rsm'. Did you mean 'rms'?"),
        (
            lambda: jn.nnx.norm("layers", 8, rngs=flax_nnx.Rngs(0)),
            ValueError,
            "Did you mean 'layer'?",
        ),
        (lambda: jn.linen.norm("LayerNorm"), ValueError, "Did you mean 'layer'?"),
        (lambda: jn.linen.norm("rms_norm"), ValueError, "Did you mean 'rms'?"),
        (lambda: jn.linen.norm("batchnorm"), ValueError, "Did you mean 'batch'?"),
        (lambda: jn.linen.norm(["rms"]), ValueError, "got ['rms']. Did you mean 'rms'?"),
        (lambda: jn.linen.norm("rms", eps=1), TypeError, "Did you mean epsilon?"),
        (
            lambda: jn.register_norm("a", linen=jn.linen.LayerNorm()),
            TypeError,
            "linen or nnx must be the class of a module: got {'linen': LayerNorm(",
        ),
        (
            lambda: jn.register_norm("a", linen=jn.linen.LayerNorm, formula=3),
            TypeError,
            "formula must be a string: got 3.",
        ),
        (
            lambda: jn.register_norm("a", linen=jn.linen.LayerNorm, running="no"),
            TypeError,
            "running must be True or False: got 'no'.",
        ),
        (lambda: jn.register_norm("rms", linen=int), ValueError, "name must not be taken"),
        (lambda: jn.register_norm("a b", linen=int), ValueError, "must be a word"),
        (lambda: jn.register_norm("a"), TypeError, "must be the class of a module: got neither."),
        (lambda: jn.register_norm("a", linen="LayerNorm"), TypeError, "must be the class"),
        (lambda: jn.unregister_norm("rms"), ValueError, "'rms' is one of jaxnorm's."),
    ],
)
def test_errors_say_which_names_there_are(call, error, said):
    with pytest.raises(error, match=re.escape(said)):
        call()


def test_the_number_of_features_may_come_by_name():
    assert jn.nnx.norm("rms", num_features=8, rngs=flax_nnx.Rngs(0)).num_features == 8


def test_a_norm_of_linen_alone_is_none_of_nnx():
    jn.register_norm("linen_only", linen=jn.linen.RMSNorm)
    try:
        with pytest.raises(ValueError, match=r"'linen_only' has none\. Register it with nnx="):
            jn.nnx.norm("linen_only", 8, rngs=flax_nnx.Rngs(0))
    finally:
        jn.unregister_norm("linen_only")


def test_the_command_imports_what_registers_norms(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "halves.py").write_text(
        "import jaxnorm as jn\njn.register_norm('halved', linen=jn.linen.RMSNorm, source='mine')\n"
    )
    (tmp_path / "broken.py").write_text("1 / 0")
    try:
        assert command.main(["halved", "--import", "halves"]) == 0
        assert capsys.readouterr().out.splitlines()[-1].strip() == "mine"
    finally:
        jn.unregister_norm("halved")
    assert command.main(["--import", "broken"]) == 1
    assert "--import broken failed: ZeroDivisionError" in capsys.readouterr().err
    assert command.main(["--import", "halves.py"]) == 1
    assert "Name the module, halves." in capsys.readouterr().err
    assert command.main(["rsm"]) == 2
    said = capsys.readouterr().err
    assert "Did you mean 'rms'? A norm of your own needs --import and the module" in said
