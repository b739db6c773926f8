"""The README's code runs as it stands, and its table is that of the committed run."""

import re
from pathlib import Path

import jax
import pytest

from jaxnorm.experiments import report

pytestmark = pytest.mark.usefixtures("quick_compile")
ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_code_runs():
    names = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
            exec(block, names)
    assert names["evaluated"].shape == (8, 3)
    assert names["logits"].shape == (8, 10)
    assert float(abs(names["block"].norm.mean[...]).max()) > 0


def test_the_table_is_that_of_the_committed_run():
    results = report.read(ROOT / "bench" / "results" / "compare-mnist")
    assert report.markdown(results) in README


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)]+)\)", README))))
def test_links_lead_somewhere(target):
    assert (ROOT / target).exists()
