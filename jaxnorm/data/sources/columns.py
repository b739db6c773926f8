"""Arrow columns of numbers, lists and tensors as NumPy arrays, with a mask for nulls."""

from typing import Any

import numpy as np

Shape = tuple[int, ...]


class RaggedError(ValueError):
    """An error of lists with different lengths in one column.

    Attributes:
      lengths: the first few lengths that were found, in words.
    """

    def __init__(self, found: set[int], expected: int):
        super().__init__(", ".join(map(str, sorted(found | {expected})[:5])))
        self.lengths = ", ".join(map(str, sorted(found)[:5]))


def dtype_and_shape(kind) -> tuple[np.dtype | None, Shape | None]:
    """Return the dtype of a column's numbers, and the shape of a row if the type fixes it.

    The dtype is None if the column holds no numbers. Decimals are read as float64.
    """
    import pyarrow as pa
    from pyarrow import types

    if isinstance(kind, pa.FixedShapeTensorType):
        return _number(kind.value_type), tuple(kind.shape[axis] for axis in _order(kind))
    if types.is_fixed_size_list(kind):
        dtype, shape = dtype_and_shape(kind.value_type)
        return dtype, None if shape is None else (kind.list_size, *shape)
    if _is_list(kind):
        return dtype_and_shape(kind.value_type)[0], None
    if isinstance(kind, pa.BaseExtensionType):
        return dtype_and_shape(kind.storage_type)
    return _number(kind.value_type if types.is_dictionary(kind) else kind), ()


def _number(kind) -> np.dtype | None:
    from pyarrow import types

    if types.is_decimal(kind):
        return np.dtype(np.float64)
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        return np.dtype(kind.to_pandas_dtype())
    return None


def _is_list(kind) -> bool:
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _order(tensor) -> Any:
    """Return the axes of a tensor in the order that they have in memory."""
    return tensor.permutation or range(len(tensor.shape))


def depth(kind) -> int:
    """Return how deep a column nests its numbers in lists; 0 for bare numbers."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return depth(kind.storage_type)
    return 1 + depth(kind.value_type) if _is_list(kind) else 0


def first_shape(column) -> Shape | None:
    """Return the shape of the first row that is not empty, or None if all rows are."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(column.type, pa.BaseExtensionType):
        return first_shape(column.storage)
    if not _is_list(column.type):
        return ()
    full = column.filter(pc.greater(pc.list_value_length(column), 0))[:1]
    inner = first_shape(full.flatten()) if len(full) else None
    return None if inner is None else (len(full[0]), *inner)


def values(column, shape: Shape) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the numbers of a column whose rows have this shape, and a mask if it has nulls.

    A null list is masked as a whole.

    Raises:
      RaggedError: lists of other lengths.
    """
    import pyarrow as pa

    kind = column.type
    if isinstance(kind, pa.FixedShapeTensorType):
        flat, mask = values(column.storage, (kind.storage_type.list_size,))
        return _transposed(flat, kind), None if mask is None else _transposed(mask, kind)
    if _is_list(kind):
        return _lists(column, shape)
    if isinstance(kind, pa.BaseExtensionType):
        return values(column.storage, shape)
    if pa.types.is_dictionary(kind):
        return values(column.dictionary_decode(), shape)
    # NumPy has no decimals, and float64 is the dtype of the statistics
    if pa.types.is_decimal(kind):
        column = column.cast(pa.float64())
    if not column.null_count:
        return column.to_numpy(zero_copy_only=False), None
    if pa.types.is_float16(kind):
        # pyarrow cannot fill nulls of float16
        column = column.cast(pa.float32())
    filled = column.fill_null(pa.scalar(0).cast(column.type))
    return filled.to_numpy(zero_copy_only=False), ~np.asarray(column.is_null())


def _transposed(flat: np.ndarray, tensor) -> np.ndarray:
    axes = (axis + 1 for axis in _order(tensor))
    return flat.reshape(-1, *tensor.shape).transpose(0, *axes)


def _lists(column, shape: Shape) -> tuple[np.ndarray, np.ndarray | None]:
    import pyarrow.compute as pc

    # null lists may have any length, so they are dropped here and put back as masked zeros
    full = column.drop_null()
    lengths = set(pc.list_value_length(full).unique().to_pylist())
    if lengths - {shape[0]}:
        raise RaggedError(lengths, shape[0])
    inner, inner_mask = values(full.flatten(), shape[1:])
    inner = inner.reshape(len(full), *shape)
    mask = None if inner_mask is None else inner_mask.reshape(len(full), *shape)
    if not column.null_count:
        return inner, mask
    mask = np.ones_like(inner, bool) if mask is None else mask
    valid = ~np.asarray(column.is_null())
    return _scattered(inner, valid), _scattered(mask, valid)


def _scattered(rows: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Return the rows in the positions where ``valid`` is true, and zeros elsewhere."""
    result = np.zeros((len(valid), *rows.shape[1:]), rows.dtype)
    result[valid] = rows
    return result
