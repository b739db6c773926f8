"""Test that the code of the README and its pages runs as it stands.

Their links lead somewhere, and their table is the table of the committed run.
"""

import re

import numpy as np
import pytest
from pages import PAGES, ROOT, blocks, run

import jaxnorm as jn
from jaxnorm.experiments import report


def test_the_readme_computes_what_it_says():
    linen, nnx, idea, recurrent = map(run, blocks("README.md"))
    np.testing.assert_allclose(idea["y"], jn.standardize(idea["x"], (0, 1, 2)), atol=1e-6)
    assert linen["logits"].shape == (8, 10)
    assert float(abs(nnx["block"].norm.mean[...]).max()) > 0
    assert (recurrent["outputs"].shape, recurrent["both_ways"].shape) == ((4, 20, 16), (4, 20, 32))


def test_the_training_guide_computes_what_it_says():
    assert run(blocks("docs/guides/training.md")[0])["evaluated"].shape == (8, 3)


BLOCKS = [(page, i) for page in PAGES if page != "README.md" for i in range(len(blocks(page)))]


@pytest.mark.parametrize(("page", "number"), BLOCKS)
def test_every_block_of_code_runs_by_itself(page, number):
    run(blocks(page)[number])


def test_the_table_is_that_of_the_committed_run():
    results = report.read(ROOT / "bench" / "results" / "compare-mnist")
    assert report.markdown(results) in PAGES["docs/experiments.md"]


def links():
    for page, text in PAGES.items():
        for target in sorted(set(re.findall(r"\]\(([^)]+)\)", text))):
            if not target.startswith(("http:", "https:", "#")):
                yield page, target.split("#")[0]


@pytest.mark.parametrize(("page", "target"), [*links()])
def test_links_lead_somewhere(page, target):
    assert ((ROOT / page).parent / target).exists()


def test_the_readme_is_short():
    assert PAGES["README.md"].count("\n") <= 200
