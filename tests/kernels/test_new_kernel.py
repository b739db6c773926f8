"""Test kernels that are registered from outside: toy_rows.py, as CONTRIBUTING.md says."""

import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_rows
from cases import BY_NAME

import jaxnorm as jn
from jaxnorm import kernels
from jaxnorm.arguments.axes import resolve
from jaxnorm.engine import reference
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.spec import Operands, Spec
from jaxnorm.kernels import placement
from jaxnorm.kernels.cpu import loading
from jaxnorm.kernels.norm import Found, NormKernels

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
        "takes neither correction, epsilon_in, full_range nor a tiny epsilon": {"correction": 1},
    }
    for words, options in refused.items():
        with pytest.raises(ValueError, match=f"implementation='toy' {re.escape(words)}"):
            jn.plan(x, "n h [c]", implementation="toy", **options)
    params = jn.recurrent.init_lstm(jax.random.key(0), 8, 4)
    with pytest.raises(ValueError, match="has no kernel for this network"):
        jn.recurrent.lstm(x, params, implementation="toy")


def test_the_environment_variable_names_it(monkeypatch):
    monkeypatch.setenv("JAXNORM_IMPLEMENTATION", "toy")
    found = jn.plan(jnp.ones((4, 6)), "n [c]")
    assert (found.implementation, found.derivative) == ("toy", "a kernel")
    assert set(found.others.values()) == {"JAXNORM_IMPLEMENTATION=toy asks for toy"}


def test_kernels_that_are_not_reached_have_a_reason_of_their_own(monkeypatch):
    taking = replace(kernels.TABLE["toy"], only_by_name="")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(
        kernels, "TABLE", {"first": taking, "second": taking, "toy": kernels.TABLE["toy"]}
    )
    assert jn.plan(jnp.ones((4, 6)), "n [c]").others == {
        "reference": "a kernel takes these arguments",
        "xla": "a kernel takes these arguments",
        "second": "first comes first in the table of kernels",
        "toy": "it runs only where it is named",
    }


def test_statistics_by_a_kernel(monkeypatch, rng):
    """A kernel of "moments" takes the loops, whose spec has the options."""
    asked = []

    def statistics(loops, x, where):
        asked.append((loops.spec.axes, loops.spec.centered, where))
        return reference.statistics(loops, x, where)

    module = ModuleType("moments_alone")
    module.obstacle = lambda x, spec, operands: None if spec.centered else "takes no RMS"
    module.statistics = statistics
    monkeypatch.setitem(sys.modules, "moments_alone", module)
    family = kernels.Family(("cpu",), {"moments": "moments_alone"})
    monkeypatch.setattr(kernels, "TABLE", {"alone": family})
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    x = rng.normal(5, 2, (4, 23)).astype(np.float32)
    found = jn.moments(x, "n [c]")
    assert asked == [((1,), True, None)]
    np.testing.assert_allclose(found.mean[:, 0], x.astype(float).mean(1), rtol=2e-7)
    np.testing.assert_allclose(found.var[:, 0], x.astype(float).var(1), rtol=1e-6)
    jn.moments(x, "n [c]", centered=False)
    assert len(asked) == 1


def test_a_kernel_may_choose_any_scale_exponent(monkeypatch, rng):
    """Off the CPU too, where plain JAX by itself chooses among a few."""

    def forward(static, given):
        x, scale, bias, where = given
        loops = PlainLoops(static.loops_over(x.shape).spec)
        y, (scaling, low_mean, var) = reference.forward(loops, x, where, scale, bias)
        return Found(y, scaling.shift, low_mean, var, scaling.exponent.astype(jnp.float32))

    module = ModuleType("any_exponent")
    module.obstacle = lambda x, spec, operands: None
    module.forward = NormKernels("any_exponent", forward={"cpu": forward}).forward
    monkeypatch.setitem(sys.modules, "any_exponent", module)
    kernels.register("any", platforms=("tpu",), norm="any_exponent")
    monkeypatch.setattr(placement, "platform", lambda: "tpu")
    x, dy = (jnp.asarray(rng.normal(size=(4, 64)), jnp.bfloat16) for _ in range(2))
    x = x * jnp.bfloat16(1e3)
    gradient = lambda name: jax.grad(
        lambda x: (jn.layer_norm(x, implementation=name) * dy).astype(jnp.float32).sum()
    )(x)
    close(*(gradient(name).astype(jnp.float32) for name in ("any", "xla")), 2**-7)


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("y", lambda y: y[..., :1], "must return y of shape (4, 1, 1, 6) and dtype float32: got "),
        ("y", lambda y: y.astype("bfloat16"), "got (4, 1, 1, 6) and bfloat16"),
        ("var", lambda var: var[0], "must return var of shape (4, 1, 1, 1)"),
        ("dscale", lambda dscale: dscale * jnp.ones((4, 1, 1, 1)), "must return dscale of shape"),
        ("dx", lambda dx: dx[:1], "must return dx of shape (4, 6)"),
    ],
)
def test_results_of_a_wrong_shape_name_the_kernel(name, wrong, words):
    """With the shape that is wanted, whether the output or the gradients are wrong."""

    def forward(static, given):
        found = toy_rows.run_forward(static, given)
        return found._replace(**{name: wrong(getattr(found, name))}) if name in "y var" else found

    def backward(static, *given):
        found = dict(
            zip(("dx", "dscale", "dbias"), toy_rows.run_backward(static, *given), strict=True)
        )
        return (found | {name: wrong(found[name])}).values() if name in found else found.values()

    family = NormKernels(f"wrong_{name}", forward={"cpu": forward}, backward={"cpu": backward})
    x, spec = jnp.ones((4, 6)), Spec(resolve("n [c]", (4, 6)), dtype=jnp.dtype("float32"))
    norm = lambda x, scale: family.forward(
        PlainLoops(spec), Operands(x, scale=scale), moments=False
    )[0].sum()
    with pytest.raises(TypeError, match=f"kernel .*{re.escape(words)}"):
        jax.grad(norm, (0, 1))(x, jnp.ones((1, 6)))


def test_a_module_that_cannot_be_imported_is_a_reason(monkeypatch):
    """Plain JAX runs, unless the kernels are asked for by name."""
    kernels.register("absent", platforms=("cpu",), norm="no_such_module")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    x, cannot = jnp.ones((4, 6)), "cannot be imported: No module named 'no_such_module'"
    assert jn.plan(x, 1, dtype="float16").others["absent"] == cannot
    with pytest.raises(ValueError, match=f"implementation='absent' {cannot}"):
        jn.layer_norm(x, implementation="absent")


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"name": "xla"}, ValueError, "name must not be taken: 'xla' is."),
        ({"name": "native"}, ValueError, "name must not be taken: 'native' is."),
        ({"platforms": "cpu"}, TypeError, "platforms must be a tuple of names: got 'cpu'."),
        ({"platforms": ("cuda",)}, ValueError, "platforms must be some of 'cpu', 'gpu', 'tpu'"),
        ({"platforms": ()}, ValueError, "platforms must be some of"),
        ({"platforms": None}, TypeError, "platforms must be a tuple of names: got None."),
        ({"name": 3}, TypeError, "name must be a word: got 3."),
        ({"name": ["a"]}, TypeError, "name must be a word: got ['a']."),
        ({"name": " "}, TypeError, "name must be a word: got ' '."),
        ({"load": 3}, TypeError, "load must be a function: got 3."),
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
