"""Test which rows of the tests the gate takes."""

from types import SimpleNamespace

import pytest
from reach import ROOT, reached
from selection import of_each

TESTS = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/*/test_*.py"))]


def row(test: str, *params: str, slow: bool = False, **values):
    """A test that has been collected, as pytest describes it."""
    item = SimpleNamespace(
        nodeid=f"{test}[{'-'.join(params)}]", get_closest_marker=lambda name: name if slow else None
    )
    item.callspec = SimpleNamespace(id="-".join(params), params=values)
    return item


def test_a_row_by_each_implementation_of_cases_not_met_before():
    rows = [
        row("accuracy", "layer", "xla", implementation="xla", slow=True),
        row("accuracy", "batch", "xla", implementation="xla"),
        row("accuracy", "batch", "native", implementation="native"),
        row("masks", "batch", "xla", implementation="xla"),
        row("masks", "layer", "xla", implementation="xla"),
        row("hessian", "batch", slow=True),
        row("hessian", "layer", slow=True),
        SimpleNamespace(nodeid="without_rows", get_closest_marker=lambda name: None),
    ]
    once, rest = of_each(rows, 1)
    assert [item.nodeid for item in once] == [
        "accuracy[batch-xla]",  # of the README's command, though "layer" comes before it
        "accuracy[batch-native]",
        "masks[layer-xla]",
        "hessian[batch]",
        "without_rows",
    ]
    assert len(once) + len(rest) == len(rows)
    assert of_each(rows, 2) == (rows, [])


@pytest.mark.parametrize(
    ("changed", "among", "not_among"),
    [
        ("jaxnorm/data/files.py", "data/test_fit.py", "laws/test_masks.py"),
        ("jaxnorm/nnx/batch.py", "modules/test_nnx.py", "laws/test_masks.py"),
        ("jaxnorm/experiments/runs.py", "project/test_runs.py", "modules/test_nnx.py"),
        ("tests/recurrent_cases.py", "recurrent/test_ragged.py", "laws/test_masks.py"),
        ("tests/laws/test_masks.py", "laws/test_masks.py", "laws/test_groups.py"),
    ],
)
def test_tests_that_a_change_can_reach(changed, among, not_among):
    found = reached(TESTS, [changed])
    assert f"tests/{among}" in found
    assert f"tests/{not_among}" not in found


@pytest.mark.parametrize(
    "changed", ["jaxnorm/kernels/cpu/forward.cc", "jaxnorm/__init__.py", "tests/conftest.py"]
)
def test_what_all_tests_depend_on_reaches_them_all(changed):
    assert reached(TESTS, ["README.md", changed]) == TESTS


def test_documents_need_no_sweeps():
    assert reached(TESTS, ["README.md", "docs/guides/speed.md", "bench/speed.py"]) == []
