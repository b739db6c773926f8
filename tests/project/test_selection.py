"""Test which rows of the tests the gate takes."""

from types import SimpleNamespace

from selection import of_each


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
