"""Rows of a small Parquet file, read by pyarrow."""

from pathlib import Path
from typing import Any

from jaxnorm.data.formats.contents import FormatError


def read(path: Path, prefix: str) -> list[dict[str, Any]]:
    """Return the rows of a file as dicts, of the columns whose names begin with a prefix."""
    try:
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"{path} needs pyarrow, which is not installed: pip install 'jaxnorm[formats]'.",
            name="pyarrow",
        ) from None
    try:
        names = [name for name in parquet.read_schema(path).names if name.startswith(prefix)]
        # one file, not a data set, whose folders would be columns
        rows = parquet.ParquetFile(path).read(columns=names).to_pylist()
    except Exception as error:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) is not None:
            raise
        # pyarrow raises errors of several types at damaged bytes, OSError without a number too
        raise FormatError(f"{path} must hold Parquet: it is none, or damaged.") from None
    if not names:
        raise FormatError(f"{path} must hold columns such as '{prefix}action/mean': it has none.")
    return rows
