"""The formulas with plain loops, which run where a platform has none of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES

from jaxnorm.arguments.axes import resolve
from jaxnorm.core import plan
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.spec import Spec
from jaxnorm.engine.xla import XlaCpuLoops

# of no other test: what has been traced for a CPU is not taken again
EPSILON = 1.25e-5


@pytest.fixture
def elsewhere(monkeypatch):
    """As on a platform other than the CPU."""
    monkeypatch.setattr(plan, "platform", lambda: "gpu")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradients_are_those_of_the_oracle(case, masked, elsewhere, rng):
    x = rng.normal(100, 2, case.shape).astype(np.float32)
    dy = rng.normal(size=case.shape).astype(np.float32)
    scale, bias = case.params(rng)
    where = rng.random(case.shape) < 0.7 if masked else None
    norm = lambda *a: case(a[0], scale=a[1], bias=a[2], where=where, epsilon=EPSILON)
    program = str(jax.make_jaxpr(norm)(x, scale, bias))
    assert "jaxnorm_optimization_barrier" not in program
    y, vjp = jax.vjp(norm, *map(jnp.asarray, (x, scale, bias)))
    options = {} if where is None else {"where": where}
    truth = case.truth(x, scale=scale, bias=bias, cotangent=dy, epsilon=EPSILON, **options)
    found = (y, *vjp(jnp.asarray(dy)))
    for a, b in zip(found, (truth.y, truth.dx, truth.dscale, truth.dbias), strict=True):
        assert np.abs(a - b).max() <= 2e-5 * np.abs(b).max()


def test_loops_are_those_of_the_platform(monkeypatch):
    spec = Spec(resolve("n [h] (g [c])", (4, 6, 8), {"g": 2}))
    assert plan.usual_loops(spec) == XlaCpuLoops(spec)
    fast = plan.loops_for(spec, "xla", None)
    assert fast == XlaCpuLoops(spec, keep_low_mean=False, barriers=True, merge_last_axis=True)
    assert plan.loops_for(spec, "reference", None) == XlaCpuLoops(spec)
    monkeypatch.setattr(plan, "platform", lambda: "tpu")
    assert plan.usual_loops(spec) == PlainLoops(spec)
    assert plan.loops_for(spec, "xla", None) == PlainLoops(spec, keep_low_mean=False)
