"""Reports of what was changed in a model."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.arguments.text import in_columns
from jaxnorm.flax_common.plain_json import as_json


@dataclass(frozen=True)
class Row:
    """What happened to one norm.

    Attributes:
      path: its path from the top of the model.
      kind: the name of its class.
      outcome: ``"folded"``, ``"swapped"``, ``"frozen"``, ``"unfrozen"`` or ``"kept"``, as it was.
      into: the layers that took it over, or the class that replaced it.
      kept: parameters and options that the new norm has from the old one.
      dropped: parameters and state that are gone.
      added: parameters and state that are new.
      difference: the largest difference of the outputs, before and after.
      largest: the largest output, before.
      condition: the condition number of the shift that folding adds to a layer's outputs.
      reason: why it stays.
    """

    path: str
    kind: str
    outcome: str
    into: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    difference: float | None = None
    largest: float | None = None
    condition: float | None = None
    reason: str = ""

    def rounding(self, epsilon: float) -> float | None:
        """Return the relative error that one rounding of the outputs becomes by the condition."""
        return None if self.condition is None else self.condition * epsilon / 2


@dataclass(frozen=True)
class Report:
    """What was changed in a model, norm by norm; it prints itself as a table.

    Attributes:
      rows: a row for each norm, in the order of their calls or paths.
      difference: the largest difference of the model's outputs, before and after, or None if
        nothing ran.
      largest: the largest output of the model, before.
    """

    rows: tuple[Row, ...]
    difference: float | None = None
    largest: float | None = None

    def to_json(self) -> str:
        """Return the report as JSON. Numbers that are not finite become null."""
        rows = [
            {key: value for key, value in asdict(row).items() if value not in ((), "", None)}
            for row in self.rows
        ]
        total = {"difference": self.difference, "largest": self.largest}
        return as_json({"rows": rows, **total}, indent=2)

    def __str__(self) -> str:
        heads: tuple[str, ...] = ("path", "norm", "outcome", "details", "difference", "condition")
        heads = (*heads, "float32", "bfloat16")
        table = [(*_words(row), *_numbers(row)) for row in self.rows]
        full = [i for i, _ in enumerate(heads) if any(line[i] for line in table)]
        lines = [[line[i] for i in full] for line in (heads, *table)]
        shown = in_columns(lines)
        if self.difference is not None:
            shown.append(
                f"outputs of the model: difference {self.difference:.3g}, largest "
                f"{self.largest:.3g}"
            )
        return "\n".join(shown)


def changed(rows: Sequence[Row], before: Any, after: Any) -> Report:
    """Return the report of a model with these outputs before and after; None if nothing ran."""
    if before is None:
        return Report(tuple(rows))
    numbers = [
        [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.number)]
        for tree in (before, after)
    ]
    return Report(tuple(rows), *difference(*numbers))


def difference(before: Sequence[Any], after: Sequence[Any]) -> tuple[float, float]:
    """Return the largest difference of arrays, and the largest of them before.

    >>> difference([np.array([1.0, -3.0, -np.inf])], [np.array([1.5, -3.0, -np.inf])])
    (0.5, 3.0)
    """
    wide = [(double(a), double(b)) for a, b in zip(before, after, strict=True)]
    return max((apart(a, b) for a, b in wide), default=0.0), largest_of(a for a, _ in wide)


def apart(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest absolute difference; where both are the same NaN or infinity, it is 0."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        found = np.where(same, 0.0, np.abs(a - b))
    return float(np.nan_to_num(found, nan=np.inf).max(initial=0))


def largest_of(arrays: Iterable[np.ndarray]) -> float:
    """Return the largest absolute value that is finite."""
    sizes = (np.abs(array[np.isfinite(array)]) for array in arrays)
    return max((float(size.max(initial=0)) for size in sizes), default=0.0)


def double(array: Any) -> np.ndarray:
    """Return an array in double precision."""
    kind = np.complex128 if np.iscomplexobj(array) else np.float64
    return np.asarray(array).astype(kind)


def are_values(tree: Any) -> bool:
    """Return whether this process holds all arrays of a tree, none of them abstract or traced."""
    return not any(
        isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer)
        or not getattr(leaf, "is_fully_addressable", True)
        for leaf in jax.tree.leaves(tree)
    )


def _words(row: Row) -> tuple[str, ...]:
    parts = [
        f"{word} {', '.join(names)}"
        for word, names in (
            ("into", row.into),
            ("kept", row.kept),
            ("dropped", row.dropped),
            ("added", row.added),
        )
        if names
    ]
    return row.path or "(the model)", row.kind, row.outcome, row.reason or "; ".join(parts)


def _numbers(row: Row) -> tuple[str, ...]:
    numbers = (row.difference, row.condition, row.rounding(2.0**-23), row.rounding(2.0**-7))
    return tuple("" if number is None else f"{number:.2g}" for number in numbers)
