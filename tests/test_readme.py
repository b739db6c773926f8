"""The README's code runs as it stands, and its table is that of the committed run."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxnorm as jn
from jaxnorm.experiments import report

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_every_block_of_code_runs_by_itself():
    found = []
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
            found.append({})
            exec(block, found[-1])
    idea, training, linen, nnx, functions, layers = found
    np.testing.assert_allclose(idea["y"], jn.standardize(idea["x"], (0, 1, 2)), atol=1e-6)
    assert training["evaluated"].shape == (8, 3)
    assert linen["logits"].shape == (8, 10)
    assert float(abs(nnx["block"].norm.mean[...]).max()) > 0
    assert functions["outputs"].shape == (4, 20, 16)
    assert layers["outputs"].shape == (4, 20, 32)


def test_the_table_is_that_of_the_committed_run():
    results = report.read(ROOT / "bench" / "results" / "compare-mnist")
    assert report.markdown(results) in README


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)]+)\)", README))))
def test_links_lead_somewhere(target):
    assert (ROOT / target).exists()
