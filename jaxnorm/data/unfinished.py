"""The state of a fit of files that has not come to its end, in a file that outlives the process."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from jaxnorm.data import files
from jaxnorm.data.normalizer import Normalizer
from jaxnorm.data.sources import SourceError, fingerprint


class Unfinished:
    """The file of a state, and what it holds.

    Its name tells fits of other files and options apart. Within it stand the fingerprints of the
    files, so that none that was replaced is gone on with, and the number of pieces, so that a state
    is only ever replaced by one that holds more.

    Args:
      out: the file of the statistics, beside which the state lies.
      arguments: what the fit is of: files, patterns, options, as JSON can hold them.
      pieces: the pieces of the files.
    """

    def __init__(self, out: Path, arguments: Sequence, pieces: Sequence):
        self.path = out.with_name(f".{out.stem}.{_hash(arguments)}{out.suffix}")
        self.total = len(pieces)
        self.files = {
            path: fingerprint(path) for path in dict.fromkeys(piece.path for piece in pieces)
        }
        self.cuts = _hash(pieces)
        self.held = self._held()

    def exists(self) -> bool:
        return self.path.exists()

    def resumed(self) -> Normalizer:
        """Return what was fitted.

        Raises:
          SourceError: there is no state, or the files have changed since.
        """
        again = "Leave --resume out"
        if not self.path.exists():
            must = "there must be an interrupted fit of these files and patterns to go on with"
            raise SourceError(f"{must}: {self.path} is not there. {again}.")
        with files.parsed(self.path):
            facts, _ = files.read(self.path)
            before, cuts = facts["files"], facts["pieces"]
        for path, now in self.files.items():
            if before.get(path) != now:
                must = "files must be as they were when the fit was interrupted"
                raise SourceError(
                    f"{must}: {path} has changed since. {again}, to fit all of them anew."
                )
        if cuts != self.cuts:
            must = "files must be read in the same pieces as when the fit was interrupted"
            raise SourceError(
                f"{must}: another version of jaxnorm or of a reader cuts them otherwise. {again}."
            )
        return Normalizer.load(self.path)

    def save(self, fitted: Normalizer) -> None:
        """Write the state, unless one that holds as much or more is there already."""
        if fitted.batches > self.held:
            facts, arrays = fitted._saved()
            files.write(self.path, facts | {"files": self.files, "pieces": self.cuts}, arrays)
            self.held = fitted.batches

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _held(self) -> int:
        """Return how many pieces a state holds: 0 if files have changed, or it cannot be read."""
        try:
            return self.resumed().batches
        except (SourceError, ValueError, OSError):
            return 0


def _hash(facts: Sequence) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
