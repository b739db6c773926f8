"""Select a few rows of each test, for which the gate has time."""

from collections import defaultdict


def of_each(items: list, count: int) -> tuple[list, list]:
    """Return at most ``count`` rows of each test by each implementation, and the rest.

    Rows that run without ``-m slow`` come before the long sweeps. Among them, rows come
    first whose parameters this implementation has met least, in this test or an earlier
    one, so that few rows meet many cases. The selection depends on nothing but the
    tests.
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
