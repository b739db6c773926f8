"""Test what only the CPU kernels have: chunks, thresholds, layouts and refusals.

The laws are in the other files.
"""

import sys
from dataclasses import replace
from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_NAME, KERNELS, long_sweep
from hard import HARD, check
from wide import WIDE, arguments, close, with_gradients

import jaxnorm as jn
from jaxnorm import kernels
from jaxnorm.arguments.axes import resolve
from jaxnorm.core import plan
from jaxnorm.engine.spec import Operands, Spec
from jaxnorm.kernels import placement
from jaxnorm.kernels.layout import find


@pytest.mark.parametrize("by_name", [False, True], ids=["by the variable", "by name"])
@pytest.mark.parametrize("case", KERNELS, ids=str)
def test_the_laws_reach_a_kernel(case, by_name, use):
    """By the variable, as laws ask for it, and by the argument, whatever the variable says;
    full_range is no obstacle.
    """
    use("xla" if by_name else "native")
    run = partial(
        case.__call__, full_range=True, **({"implementation": "native"} if by_name else {})
    )
    assert (
        "Jaxnorm"
        in jax.jit(jax.grad(lambda x: run(x).sum())).lower(jnp.zeros(case.shape)).as_text()
    )


# Of more than 512 positions: the kernel has the statistics, and XLA the output.
MANY = {
    "batch_conv": replace(BY_NAME["batch_conv"], shape=(2, 17, 18, 8)),
    "instance": replace(BY_NAME["instance"], shape=(3, 23, 24, 4)),
    "group": replace(BY_NAME["group"], shape=(3, 23, 24, 8), split=(3, 23, 24, 4, 2)),
}


@pytest.mark.parametrize("name", MANY)
@pytest.mark.usefixtures("usual_compile_of_class")
class TestStatisticsByAKernel:
    def test_it_has_no_more(self, name, use):
        use("native")
        case = MANY[name]
        text = jax.jit(case.__call__).lower(jnp.zeros(case.shape)).as_text()
        assert "JaxnormStatistics" in text
        assert "JaxnormForward" not in text

    @pytest.mark.parametrize("hard", long_sweep(HARD, quick=HARD[::12]), ids=str)
    def test_hard_inputs(self, name, hard, rng, use):
        use("native")
        check(MANY[name], hard, rng)


@pytest.mark.parametrize("name", long_sweep(WIDE, quick=list(WIDE)[::8]))
def test_arrays_of_many_chunks(name, rng, use):
    """Against plain JAX in float64; the same bits whatever thread comes first."""
    norm, shape = WIDE[name]
    given = arguments(rng, shape)
    use("native")
    run = jax.jit(partial(with_gradients, norm))
    found, again = run(*given), run(*given)
    jax.tree.map(np.testing.assert_array_equal, found, again)
    few = [a.astype(jnp.bfloat16) if a.ndim > 1 else a for a in given]
    half = run(*few)
    close(found, float64(run, given), 2e-6)
    close(half, float64(run, few), 2**-8)


def float64(run, given):
    """What ``run`` makes of these arrays in float64."""
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        return run(*(jnp.asarray(np.asarray(a, np.float64)) for a in given))


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("name", long_sweep(WIDE, quick=["rows", "batch", "small images"]))
def test_masks_of_many_chunks(name, shared, rng, use):
    """Of positions: single ones, whole chunks, whole examples, alike in all examples or not."""
    norm, shape = WIDE[name]
    where = rng.random((1 if shared else shape[0], *shape[1:-1], 1)) < 0.6
    if len(shape) > 2:
        where[:, : shape[1] // 2] = [[[True]]] if rng.random() < 0.5 else False
        where[1:2] = False
    given = arguments(rng, shape)
    junk = 3.0 if "adaptive" in name else jnp.nan  # scale is made of x there
    masked = (jnp.where(where, given[0], junk), *given[1:])
    use("native")
    run = jax.jit(partial(with_gradients, norm, where=jnp.asarray(where)))
    found, again = run(*masked), run(*masked)
    jax.tree.map(np.testing.assert_array_equal, found, again)
    assert "Jaxnorm" in run.lower(*masked).as_text()
    close(found, float64(run, masked), 2e-6)


FAR = {  # of 512 positions
    "a step": lambda t: np.where(t < 16, 0.0, 100.0),
    "a step in each chunk": lambda t: np.where(t % 64 < 16, 0.0, 100.0),
    "a line": lambda t: 10.0 * t,
    "blank": lambda t: np.full(t.shape, 7.0),
    "blank but for its end": lambda t: np.where(t == 511, 1e4, 0.0),
}


@pytest.mark.parametrize("where", FAR)
@pytest.mark.parametrize("name", ["batch", "instance", "layer"])
def test_positions_unlike_the_first(name, where, rng, use):
    """Statistics that the kernels take from their distance to the first positions, of which too
    much may be lost.
    """
    use("native")
    course = FAR[where](np.arange(512)) + 0.01 * (where != "blank") * rng.standard_normal(
        (2, 70, 512)
    )
    x = (course if name == "layer" else np.moveaxis(course, 1, 2)).astype(np.float32)
    truth = np.asarray(x, np.float64)
    axes = {"batch": (0, 1), "layer": 2}.get(name, 1)
    mean, var = truth.mean(axes, keepdims=True), truth.var(axes, keepdims=True)
    close(
        jn.standardize(jnp.asarray(x), axes, epsilon=1e-5),
        (truth - mean) / np.sqrt(var + 1e-5),
        1e-6,
    )


RECOMPUTED = "a formula in plain JAX, which recomputes the statistics"


def test_a_plan_says_what_runs_and_why(use):
    """The same as standardize runs, or raises, for the same arguments."""
    use("native")
    x = jnp.ones((4, 6))
    plans = [
        ({}, "native", "JAXNORM_IMPLEMENTATION=native asks for native"),
        ({"implementation": "native"}, "native", "implementation='native' is asked for"),
        ({"implementation": "xla"}, "xla", "implementation='xla' is asked for"),
        ({"where": x[:, :1] > 0}, "native", "JAXNORM_IMPLEMENTATION=native asks for native"),
        (
            {"where": x > 0},
            "xla",
            "takes no mask that differs from channel to channel: got shape (4, 6) for x of shape "
            "(4, 6)",
        ),
        ({"where": x[:, :1]}, "xla", "takes no weights, but a boolean mask: got float32"),
        (
            {"dtype": "float16"},
            "xla",
            "takes and gives float32 and bfloat16: got float32 and an output of float16",
        ),
    ]
    for options, name, reason in plans:
        found = jn.plan(x, "n (g [c])", g=2, **options)
        assert (found.implementation, found.others["xla" if name == "native" else "native"]) == (
            name,
            reason,
        )
        assert found.derivative == ("a kernel" if name == "native" else RECOMPUTED)
        text = jax.jit(partial(jn.standardize, axes="n (g [c])", g=2, **options)).lower(x).as_text()
        assert ("Jaxnorm" in text) == (name == "native")
    assert repr(found) == (
        f"xla\n  gradients: {RECOMPUTED}\n"
        "  not reference: it takes as long or longer, for the same result\n"
        "  not pallas: JAXNORM_IMPLEMENTATION=native asks for native\n"
        f"  not native: {reason}"
    )
    for other, name in (("reference", "xla"), ("xla", "reference")):
        use(name)
        assert jn.plan(x, 1).others == dict.fromkeys(
            (other, "native", "pallas"), f"JAXNORM_IMPLEMENTATION={name} asks for {name}"
        )
    for wrong in (
        {"implementation": "native", "where": x > 0},
        {"epsilon": -1.0},
        {"scale": jnp.ones(4)},
    ):
        errors = []
        for call in (jn.plan, jn.standardize):
            with pytest.raises(ValueError) as raised:  # noqa: PT011
                call(x, 1, **wrong)
            errors.append(str(raised.value))
        assert errors[0] == errors[1]


def test_further_kernels_are_tried_in_order_and_give_their_reasons(use, monkeypatch):
    """A family in front of the table: it is asked first, refuses, and is refused by name."""
    other = ModuleType("other_kernels")
    other.obstacle = lambda x, *arguments: "takes no rows"
    monkeypatch.setitem(sys.modules, "other_kernels", other)
    other_family = kernels.Family(("cpu",), {"norm": "other_kernels"})
    monkeypatch.setattr(placement, "known", lambda x: True)  # as on a single device
    monkeypatch.setattr(kernels, "TABLE", {"other": other_family, **kernels.TABLE})
    x, spec = jnp.ones((4, 6)), Spec(resolve("n [c]", (4, 6)), dtype=jnp.dtype("float32"))
    kernel = "a kernel takes these arguments"
    assert plan.select(None, "norm", x, spec, Operands(x)) == plan.Plan(
        "native",
        {
            "reference": kernel,
            "xla": kernel,
            "other": "takes no rows",
            "pallas": "JAX runs on platform cpu, and the kernels are for TPUs and GPUs",
        },
    )
    refused = plan.select(None, "norm", x, spec, Operands(x, epsilon=x[0, 0]))
    assert (refused.implementation, refused.others["other"], refused.others["native"]) == (
        "xla",
        "takes no rows",
        "takes no traced epsilon",
    )
    with pytest.raises(
        ValueError, match=r"implementation='other' takes no rows\. Leave implementation out\."
    ):
        plan.select("other", "norm", x, spec, Operands(x))


# 1 / n times n is not 1 for some
SIZES = (49, 98, 103, 105, 107, *np.random.default_rng(0).integers(2, 3000, 8).tolist())


@pytest.mark.parametrize("n", long_sweep(SIZES, quick=[49, 105]))
@pytest.mark.parametrize(
    ("pattern", "shape"),
    [
        ("[n] c", lambda n: (n, 3)),
        ("n [h] c", lambda n: (2, n, 3)),
        ("n [h c]", lambda n: (2, n, 3)),
    ],
)
def test_a_constant_gives_the_bias_at_any_size(pattern, shape, n, use):
    use("native")
    x = np.broadcast_to(np.float32([0.1, 3.3, 1e6 + 0.3]), shape(n))
    x = np.full_like(x, x[0, 0, 1]) if "c]" in pattern else x

    @jax.jit
    def run(x):
        results = [
            jax.vjp(
                lambda x, e=e: jn.standardize(
                    x, pattern, bias=jnp.full((1,) * x.ndim, 0.7), epsilon=e
                ),
                x,
            )
            for e in (0.0, 1e-5)
        ]
        return [(y, pullback(jnp.ones_like(y))[0]) for y, pullback in results]

    for y, dx in run(x):
        np.testing.assert_array_equal(y, np.full(x.shape, np.float32(0.7)))
        assert np.abs(dx).max() <= 1e-4  # 1 / sqrt(epsilon) times the rounding of a sum that is 0


@pytest.mark.parametrize(
    ("size", "of_cotangent"),
    [(1.0, 1.0), (1e10, 1e30), (1e6, 1e34), (1e-12, 1e-20), (1e30, 1.0), (1e13, 1e-12)],
)
@pytest.mark.parametrize("where", ["noise", "a step"])
@pytest.mark.parametrize("positions", [49, 700])
def test_gradients_of_large_and_small_cotangents(positions, where, size, of_cotangent, rng, use):
    """Of few positions sums are found in one reading with mean and variance; products may leave
    float32's range, on either side.
    """
    use("native")
    noise, ct = rng.standard_normal((2, 5, positions, 70))
    course = (
        noise if where == "noise" else np.where(np.arange(positions) < 16, 0, 100)[:, None] + noise
    )
    x, ct = (size * course).astype(np.float32), (of_cotangent * ct).astype(np.float32)
    dx = jax.vjp(partial(jn.instance_norm, epsilon=0.0), jnp.asarray(x))[1](jnp.asarray(ct))[0]
    truth, ct = np.asarray(x, np.float64), np.asarray(ct, np.float64)
    root = 1 / truth.std(1, keepdims=True)
    y = (truth - truth.mean(1, keepdims=True)) * root
    close(
        dx / of_cotangent * size,
        root
        * size
        / of_cotangent
        * (ct - ct.mean(1, keepdims=True) - y * (y * ct).mean(1, keepdims=True)),
        1e-6,
    )


@pytest.mark.parametrize("axes", [1, 0], ids=["rows", "channels"])
@pytest.mark.parametrize("size", [3e-15, 3e-9, 1.0, 3e16])
def test_numbers_that_hardly_differ(size, axes, rng, use):
    """By a few last bits: their squared deviations may leave float32's range where those of the
    numbers do not.
    """
    use("native")
    x = (size * (1 + 1e-6 * rng.uniform(size=(64, 64)))).astype(np.float32)
    truth = np.asarray(x, np.float64)
    truth = (truth - truth.mean(axes, keepdims=True)) / truth.std(axes, keepdims=True)
    close(jn.standardize(jnp.asarray(x), axes, epsilon=0.0), truth, 1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: jn.standardize(x, 1, where=x > 0, implementation="native"),
            "takes no mask that differs from channel to channel: got shape (4, 6) for x of shape "
            "(4, 6)",
        ),
        (
            lambda x: jn.standardize(x.astype(jnp.float16), 1, implementation="native"),
            "takes and gives float32 and bfloat16: got float16 and an output of float16",
        ),
        (
            lambda x: jn.standardize(x.reshape(2, 2, 2, 3), (0, 2), implementation="native"),
            r"reduces no such axes: (0, 2) of (2, 2, 2, 3)",
        ),
        (
            lambda x: jn.standardize(x[:0], 1, implementation="native"),
            "takes no empty arrays: got (0, 6)",
        ),
    ],
)
def test_what_it_cannot_take_is_told(call, message, use):
    use("native")
    with pytest.raises(ValueError, match=r"implementation='native' ") as error:
        call(jnp.ones((4, 6)))
    assert message in str(error.value)
    assert str(error.value).endswith("Leave implementation out.")


@pytest.mark.parametrize(
    ("pattern", "shape", "params", "layout"),
    [
        ("n [c]", (6, 5), ((1, 5),), (6, 1, 1, 5, 1)),
        ("n h w [c]", (2, 3, 4, 5), ((1, 1, 1, 5),), (24, 1, 1, 5, 1)),
        ("[n h w] c", (2, 3, 4, 5), ((1, 1, 1, 5),), (1, 24, 5, 1, 1)),
        ("n [h w] c", (2, 3, 4, 5), ((2, 1, 1, 5), (1, 1, 1, 5)), (2, 12, 5, 1, 2)),
        ("n [h w c]", (2, 3, 4, 5), ((1, 1, 1, 5),), (2, 12, 1, 5, 1)),
        ("n [h w c]", (2, 3, 4, 5), ((1, 3, 4, 5),), (2, 1, 1, 60, 1)),
        ("n [h w c]", (2, 3, 4, 5), (), (2, 1, 1, 60, 1)),
        ("[n] h c", (3, 1, 5), ((1, 1, 5),), (1, 3, 5, 1, 1)),
        ("n [c]", (6, 5), ((6, 5),), None),
        ("n [h] c", (2, 3, 5), ((1, 3, 5),), None),
        ("n [c]", (0, 5), (), None),
    ],
)
def test_layouts(pattern, shape, params, layout):
    found = find(resolve(pattern, shape), *params)
    assert (None if found is None else found[:5]) == layout
