"""The state of an unfinished fit of files, in a file that outlives the process."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from jaxnorm.data import files
from jaxnorm.data.normalizer import Normalizer
from jaxnorm.data.sources import SourceError, fingerprint


class Unfinished:
    """The file of a state, and its contents.

    The file holds a hash of the arguments and fingerprints of the data files, so that a fit does
    not resume with other options, or with a file that was replaced. It holds the number of fitted
    pieces, so that a state is only replaced by one with more pieces.

    Args:
      path: the file of the state.
      arguments: the files, patterns and options of the fit, in types that JSON can hold.
      pieces: the pieces of the files.
      again: what to do, in words, if the fit cannot go on with the state.
    """

    def __init__(
        self, path: Path, arguments: Sequence, pieces: Sequence, again: str = "Leave --resume out"
    ):
        self.path, self.fit, self.again = path, _hash(arguments), again
        self.total = len(pieces)
        self.files = {
            path: fingerprint(path) for path in dict.fromkeys(piece.path for piece in pieces)
        }
        self.cuts = _hash(pieces)
        self.held = self._held()

    def exists(self) -> bool:
        return self.path.exists()

    def resumed(self) -> Normalizer:
        """Return the Normalizer fitted so far.

        Raises:
          SourceError: there is no state, or the files have changed since.
        """
        again = self.again
        if not self.path.exists():
            must = "there must be an interrupted fit of these files and patterns to go on with"
            raise SourceError(f"{must}: {self.path} is not there. {again}.")
        with files.parsed(self.path):
            metadata, _ = files.read(self.path)
        if "fit" not in metadata:
            must = "it holds statistics without the files that they are of"
            raise ValueError(f"{self.path} must be a state of fit_files: {must}. {again}.")
        before, cuts = metadata["files"], metadata["pieces"]
        if metadata["fit"] != self.fit:
            must = "a state must be of the same files, axes and options"
            raise SourceError(f"{must}: {self.path} is of others. {again}.")
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
        """Write the state, unless the file already holds as many pieces or more."""
        # a fit that began again must not replace the state of one that came further
        if fitted.batches > self.held:
            metadata, arrays = fitted._saved()
            # Normalizer.load ignores these keys, so it reads a state like any file
            own = {"fit": self.fit, "files": self.files, "pieces": self.cuts}
            files.write(self.path, metadata | own, arrays)
            self.held = fitted.batches

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _held(self) -> int:
        """Return how many pieces the state holds; 0 if it is unreadable or the files changed."""
        try:
            return self.resumed().batches
        except (SourceError, ValueError, OSError):
            # a state that cannot be resumed may be replaced
            return 0


def hidden(out: Path, arguments: Sequence) -> Path:
    """Return the file of a state beside a file of statistics.

    Its name depends on the arguments, so different fits do not collide.
    """
    return out.with_name(f".{out.stem}.{_hash(arguments)}{out.suffix}")


def _hash(values: Sequence) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12]
