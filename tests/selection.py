"""Of each test a few of its rows: what the gate has time for."""

from collections import defaultdict


def of_each(items: list, count: int) -> tuple[list, list]:
    """Of each test at most ``count`` rows by each implementation, those of the README's command
    before the long sweeps; and the rest.

    Among them are taken those whose parameters have been met least by that implementation, in this
    test or one before it, so that few rows meet many cases. What is taken depends on nothing but
    the tests.
    """
    tests = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0], implementation(item)].append(item)
    met, taken = set(), set()
    for (_, by), rows in tests.items():
        for _ in range(min(count, len(rows))):
            # the first of equals
            best = min(rows, key=lambda item: (is_slow(item), -len(facts(item, by) - met)))
            met |= facts(best, by)
            rows.remove(best)
            taken.add(best.nodeid)
    return [item for item in items if item.nodeid in taken], [
        item for item in items if item.nodeid not in taken
    ]


def implementation(item) -> str | None:
    return item.callspec.params.get("implementation") if hasattr(item, "callspec") else None


def is_slow(item) -> bool:
    return item.get_closest_marker("slow") is not None


def facts(item, by: str | None) -> set:
    return (
        {(fact, by) for fact in item.callspec.id.split("-")} if hasattr(item, "callspec") else set()
    )
