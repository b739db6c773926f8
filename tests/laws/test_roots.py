"""Test that 1 / sqrt(var + epsilon) is written once in JAX, with a case for 0."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxnorm
from jaxnorm import online

ROOT = Path(jaxnorm.__file__).parent
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
FILES = [path for path in FILES if path.parts[0] != "kernels"]  # which have their own, in C++
INVERSE = re.compile(r"\brsqrt\(|/ *\(?(?:jnp|lax|jax\.lax)\.sqrt\(|\*\* *-0?\.5")


@pytest.mark.parametrize("path", FILES, ids=str)
def test_the_inverse_root_is_written_once(path):
    """Everything else calls inverse_root; NumPy on the host cannot."""
    found = INVERSE.findall((ROOT / path).read_text())
    assert bool(found) == (path == Path("engine/groups.py"))


def test_denormalizing_constants_without_an_epsilon():
    """The root of 0 is 0; one over its inverse, 0 where it would be Inf, is not."""
    state = online.update(online.init(jnp.zeros(())), jnp.array([2.0, 2.0]))
    found = online.denormalize(jnp.array([-1.0, 5.0]), state, epsilon=0.0)
    np.testing.assert_array_equal(found, [2.0, 2.0])
