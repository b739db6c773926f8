"""What a Normalizer has fitted so far: a value that is replaced as one, merged and saved."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxnorm.data import files
from jaxnorm.data.fitted import Fitted
from jaxnorm.data.formula import OURS, Formula, checked_missing
from jaxnorm.data.leaves import check_leaves, check_shape, naming_leaf
from jaxnorm.data.trees import flatten


class State(NamedTuple):
    """Everything that a batch changes, replaced as one, so that an interrupt cannot split it.

    Attributes:
      leaves: the statistics of each leaf, by its path.
      structure: the tree of a batch, whose leaves are their paths, or None where a leaf is not
        fitted.
      batches: the number of batches.
    """

    leaves: dict[str, Fitted]
    structure: Any
    batches: int

    def merge(self, other: "State", axes: Mapping) -> "State":
        """Return the state of the data of both.

        Raises:
          ValueError: the leaves or their shapes differ, or statistics lack what merging needs.
        """
        if not (self.leaves and other.leaves):
            kept = self if self.leaves else other
            return kept._replace(batches=self.batches + other.batches)
        check_leaves(other.leaves, axes, self.leaves)
        both = {}
        for path, fitted in self.leaves.items():
            check_shape(path, fitted.shape, other.leaves[path].shape)
            try:
                both[path] = fitted.merge(other.leaves[path])
            except ValueError as error:
                raise naming_leaf(path, error) from None
        return State(both, self.structure, self.batches + other.batches)


EMPTY = State({}, None, 0)


def to_file(state: State, formula: Formula) -> tuple[dict, dict[str, np.ndarray]]:
    """Return the metadata and the arrays of a state and of how it normalizes."""
    metadata = {"batches": state.batches, "structure": files.encode(state.structure)}
    changed = {
        name: value for name, value in formula._asdict().items() if value != getattr(OURS, name)
    }
    unknown = {path: sorted(leaf.unknown) for path, leaf in state.leaves.items() if leaf.unknown}
    if changed or unknown or any(leaf.mask is not None for leaf in state.leaves.values()):
        # versions that know the first format alone would normalize by these in another way
        metadata |= {"format": files.FORMAT, "formula": changed, "unknown": unknown}
    return metadata, files.named_arrays(state.leaves)


def of_file(metadata: dict, arrays: dict[str, np.ndarray]) -> tuple[State, Formula]:
    """Return the state and the formula of a file."""
    structure = files.decode(metadata["structure"])
    unknown = metadata.get("unknown", {})
    leaves = {
        leaf: files.fitted(arrays, leaf, unknown.get(leaf, ()))
        for leaf in flatten(structure).values()
    }
    changed: dict[str, Any] = metadata.get("formula", {})
    for name, value in changed.items():
        if name == "missing":
            checked_missing(value)
            continue
        usual = getattr(OURS, name)
        kinds = (bool,) if isinstance(usual, bool) else (int, float)
        if not isinstance(value, kinds) and not (usual is None and value is None):
            raise ValueError(f"the formula's {name} must be a number: it is {value!r}")
    batches = metadata["batches"]
    if not isinstance(batches, int) or batches < 0:
        raise ValueError(f"the number of batches must be an integer: it is {batches!r}")
    return State(leaves, structure, batches), OURS._replace(**changed)
