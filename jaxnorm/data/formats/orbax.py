"""Orbax checkpoints: trees of arrays in a folder. They need orbax-checkpoint, and with it JAX."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxnorm.data.formats.contents import FormatError

METADATA = "_METADATA"


def mentions(path: Path, word: bytes) -> bool:
    """Return whether a folder is a checkpoint in which a name occurs, without orbax-checkpoint."""
    try:
        return word in (Path(path) / METADATA).read_bytes()
    except OSError:
        return False


def load(path: Path) -> Any:
    """Return the tree of a checkpoint, in NumPy arrays."""
    path = Path(path).absolute()
    if not (path / METADATA).is_file():
        steps = [one.parent.name for one in sorted(path.glob(f"*/{METADATA}"))]
        way = f" Name one of its steps: {', '.join(steps[-3:])}." if steps else ""
        raise FormatError(f"{path} must be the folder of an Orbax checkpoint: it is none.{way}")
    jax, checkpoint = _libraries(path)
    try:
        checkpointer = checkpoint.PyTreeCheckpointer()
        metadata = checkpointer.metadata(path).item_metadata
        asked = jax.tree.map(lambda _: checkpoint.RestoreArgs(restore_type=np.ndarray), metadata)
        return checkpointer.restore(path, checkpoint.args.PyTreeRestore(restore_args=asked))
    except Exception as error:
        # orbax and tensorstore raise errors of any type at damaged files
        said = str(error).partition("\n")[0][:160].rstrip(".")
        raise FormatError(
            f"{path} cannot be read, it may be damaged: {type(error).__name__}, {said}."
        ) from error


def check(path: Path) -> None:
    """Refuse a path where something is, or whose library is missing."""
    if path.exists():
        raise FileExistsError(f"{path} must not exist: it does. Name another folder, or remove it.")
    _libraries(path)


def save(path: Path, tree: Any) -> None:
    """Write a checkpoint in one step, to a folder that does not exist."""
    check(path)
    _, checkpoint = _libraries(path)
    checkpoint.PyTreeCheckpointer().save(Path(path).absolute(), tree)


def _libraries(path: Path) -> tuple[Any, Any]:
    try:
        import jax
        from orbax import checkpoint
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"{path} needs orbax-checkpoint, which is not installed: pip install "
            "'jaxnorm[processes]'.",
            name="orbax",
        ) from None
    return jax, checkpoint
