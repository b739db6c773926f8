"""The README's code and that of its pages runs as it stands, their links lead somewhere, and their table is that of the committed run."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxnorm as jn
from jaxnorm.experiments import report

ROOT = Path(__file__).parents[1]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}


def run(page):
    """The names that each block of code of a page defines."""
    found = []
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL):
            found.append({})
            exec(block, found[-1])
    return found


def test_every_block_of_code_runs_by_itself():
    idea, training, linen, nnx, recurrent = run("README.md")
    np.testing.assert_allclose(idea["y"], jn.standardize(idea["x"], (0, 1, 2)), atol=1e-6)
    assert training["evaluated"].shape == (8, 3)
    assert linen["logits"].shape == (8, 10)
    assert float(abs(nnx["block"].norm.mean[...]).max()) > 0
    assert (recurrent["outputs"].shape, recurrent["both_ways"].shape) == ((4, 20, 16), (4, 20, 32))
    functions, layers = run("docs/recurrent.md")
    assert (functions["outputs"].shape, layers["outputs"].shape) == ((4, 20, 16), (4, 20, 32))


def test_the_table_is_that_of_the_committed_run():
    results = report.read(ROOT / "bench" / "results" / "compare-mnist")
    assert report.markdown(results) in PAGES["docs/experiments.md"]


def links():
    for page, text in PAGES.items():
        for target in sorted(set(re.findall(r"\]\(([^)]+)\)", text))):
            yield page, target


@pytest.mark.parametrize(("page", "target"), [*links()])
def test_links_lead_somewhere(page, target):
    assert ((ROOT / page).parent / target).exists()


def test_the_readme_is_short():
    assert PAGES["README.md"].count("\n") <= 200
