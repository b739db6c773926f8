"""Test kernels that are registered from outside: toy_rows.py, as CONTRIBUTING.md says."""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_NAME

import jaxnorm as jn
from jaxnorm import kernels
from jaxnorm.kernels.cpu import loading

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"
LAYER, RMS = BY_NAME["layer"], BY_NAME["rms"]
TOY, XLA = {"implementation": "toy"}, {"implementation": "xla"}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """What the section's code block registers."""
    monkeypatch.setattr(kernels, "TABLE", dict(kernels.TABLE))
    section = GUIDE.read_text().split("## A new kernel")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(code, {})


def norm(case, **options):
    """The norm of x, scale and bias."""
    return lambda x, scale, bias: case(x, scale=scale, bias=bias, **options)


def arguments(case, rng):
    x = rng.normal(3, 2, case.shape).astype(np.float32)
    return tuple(map(jnp.asarray, (x, *case.params(rng))))


def close(found, expected, bound=2e-6):
    """Whether arrays differ by no more than this share of the largest element."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= bound * np.abs(b).max()


@pytest.mark.parametrize("case", [LAYER, RMS], ids=str)
class TestKernel:
    def test_value_and_gradients_are_those_of_the_oracle(self, case, rng):
        x, scale, bias = arguments(case, rng)
        dy = rng.normal(size=case.shape).astype(np.float32)
        y, vjp = jax.vjp(norm(case, **TOY), x, scale, bias)
        truth = case.truth(x, scale=scale, bias=bias, cotangent=dy)
        expected = (truth.y, truth.dx, truth.dscale, truth.dbias)
        close((y, *vjp(jnp.asarray(dy))), expected)

    def test_the_kernel_runs(self, case, rng):
        given = arguments(case, rng)
        assert "toy_rows" in str(jax.make_jaxpr(norm(case, **TOY))(*given))
        program = jax.jit(norm(case, **TOY)).lower(*given).as_text()
        assert "while" in program  # the interpreter's loop over rows
        assert "while" not in jax.jit(norm(case, **XLA)).lower(*given).as_text()

    @pytest.mark.parametrize(
        "transform",
        [
            lambda f: lambda *a: jax.jvp(f, a, tuple(map(jnp.cos, a))),
            lambda f: lambda *a: jax.vmap(f, (0, None, None))(jnp.stack([a[0], 2 * a[0]]), *a[1:]),
            lambda f: (
                lambda x, scale, bias: jax.vmap(
                    jax.grad(lambda x, scale: (f(x, scale, bias) ** 3).sum(), (0, 1))
                )(jnp.stack([x, 2 * x]), jnp.stack([scale, scale + 1]))
            ),
            lambda f: jax.hessian(lambda x, *a: (f(x, *a) ** 3).sum(), 1),
            lambda f: jax.grad(lambda *a: (jax.checkpoint(f)(*a) ** 3).sum(), (0, 1, 2)),
        ],
        ids=["jvp", "vmap", "vmap_grad", "hessian", "checkpoint"],
    )
    def test_transforms_are_those_of_plain_jax(self, case, transform, rng):
        given = arguments(case, rng)
        f, g = (transform(norm(case, **options)) for options in (TOY, XLA))
        close(f(*given), g(*given), 1e-5)

    def test_what_is_exported_runs_in_plain_jax(self, case, rng):
        given = arguments(case, rng)
        exported = jax.export.export(jax.jit(norm(case, **TOY)), platforms=("cpu", "tpu"))(*given)
        again = jax.export.deserialize(exported.serialize())
        close(again.call(*given), norm(case, **XLA)(*given))


def test_moments_of_positional_norm_and_their_gradients(rng):
    """The statistics that the kernel returns, and their cotangents."""
    x = jnp.asarray(rng.normal(5, 2, (4, 24)).astype(np.float32))

    def loss(x, implementation):
        y, m = jn.positional_norm(x, implementation=implementation)
        return (y * jnp.arange(24.0)[None]).sum() + (m.mean**2).sum() + (m.var * m.mean).sum()

    found, expected = (jax.value_and_grad(loss)(x, name) for name in ("toy", "xla"))
    close(found, expected)


def test_the_plan_says_why_it_does_not_run(monkeypatch):
    x = jnp.ones((4, 6, 8))
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(loading, "built", lambda: False)
    asked = lambda *a, **options: jn.plan(x, *a, **options).others["toy"]
    assert asked("n h [c]") == "it runs only where it is named"
    refused = {
        "takes no mask": {"where": x[..., :1] > 0},
        "takes no axis_name": {"axis_name": "devices"},
        "takes neither correction, epsilon_in='std', full_range nor a tiny epsilon": {
            "correction": 1
        },
    }
    for words, options in refused.items():
        with pytest.raises(ValueError, match=f"implementation='toy' {re.escape(words)}"):
            jn.plan(x, "n h [c]", implementation="toy", **options)
    params = jn.recurrent.init_lstm(jax.random.key(0), 8, 4)
    with pytest.raises(ValueError, match="has no kernel for this network"):
        jn.recurrent.lstm(x, params, implementation="toy")


def test_the_environment_variable_names_it(monkeypatch):
    monkeypatch.setenv("JAXNORM_IMPLEMENTATION", "toy")
    assert jn.plan(jnp.ones((4, 6)), "n [c]").implementation == "toy"


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"name": "xla"}, ValueError, "name must not be taken: 'xla' is."),
        ({"name": "native"}, ValueError, "name must not be taken: 'native' is."),
        ({"platforms": "cpu"}, TypeError, "platforms must be a tuple of names: got 'cpu'."),
        ({"platforms": ("cuda",)}, ValueError, "platforms must be some of 'cpu', 'gpu', 'tpu'"),
        ({"platforms": ()}, ValueError, "platforms must be some of"),
        ({"norm": None}, ValueError, "norm, moments or lstm must name a module"),
        ({"norm": jn}, TypeError, "norm must be the name of a module"),
    ],
)
def test_rows_that_are_no_kernels_are_refused(wrong, error, words):
    given = {"name": "mine", "platforms": ("cpu",), "norm": "mine", **wrong}
    before = dict(kernels.TABLE)
    with pytest.raises(error, match=re.escape(words)):
        kernels.register(given.pop("name"), **given)
    assert before == kernels.TABLE


def test_registering_again_changes_nothing():
    again = partial(kernels.register, "mine", platforms=("tpu",), norm="mine")
    again()
    before = dict(kernels.TABLE)
    again()
    assert before == kernels.TABLE
