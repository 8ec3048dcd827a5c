"""Columns of samples: element type and shape, their representation in Arrow, and numpy views without a copy.

Called by the reader and the writer of shards, so that both agree. Opens no file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Array = npt.NDArray[Any]
Range = tuple[float, float]

VERSION = 1
"""Version of the format; a reader rejects newer ones."""
VERSION_KEY = b"ortflow.version"
"""Key of the version in the schema's metadata."""
RANGES_KEY = b"ortflow.ranges"
"""Key of {column: [minimum, maximum]} in a record batch's metadata, which is known when the batch is written."""

_DTYPES = {
    pa.from_numpy_dtype(dtype): dtype
    for dtype in map(np.dtype, ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"))
}
"""Element types that Arrow stores as numpy does; in Arrow bool is one bit, so it is stored as uint8."""


class UnusableError(Exception):
    """A file or column cannot be viewed as numbers; the message gives the reason, the reader adds the file."""


@dataclass(frozen=True)
class Column:
    """Samples of one column: each has `shape` and `dtype` or, if `variable`, one axis of its own length.

    `minimum` and `maximum` are over all elements; None if no shard records them. The integers of a `quantity` are
    numbers like any other, not bytes of an image or numbers of classes: an input of floats takes them.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    variable: bool = False
    minimum: float | None = None
    maximum: float | None = None
    quantity: bool = False

    def __str__(self) -> str:
        shape = "variable" if self.variable else "x".join(map(str, self.shape)) or "scalar"
        return f"{self.dtype.name} {shape}"

    @property
    def is_finite(self) -> bool:
        """Whether the recorded range shows that no element is NaN or infinite."""
        ends = (self.minimum, self.maximum)
        return all(end is not None and math.isfinite(end) for end in ends)

    def like(self, other: Column) -> bool:
        """Whether both hold the same kind of sample, regardless of values."""
        return (self.dtype, self.shape, self.variable) == (other.dtype, other.shape, other.variable)

    def with_range(self, span: Range | None) -> Column:
        """The column with its minimum and maximum."""
        return replace(self, minimum=span[0], maximum=span[1]) if span else self


@dataclass(frozen=True)
class Ragged:
    """Samples of different length: sample i is `values[offsets[i]:offsets[i + 1]]`."""

    values: Array
    offsets: npt.NDArray[np.int64]

    @classmethod
    def of(cls, samples: Sequence[Array], dtype: np.dtype[Any]) -> Ragged:
        """Arrays [length], one after the other; `dtype` is theirs, also if there are none."""
        offsets = np.cumsum([0, *map(len, samples)], dtype=np.int64)
        return cls(np.concatenate([np.empty(0, dtype), *samples]), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Array:
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of elements of each sample."""
        return np.diff(self.offsets)


def column_of(field: pa.Field) -> Column:
    """The column that an Arrow field describes.

    Supports scalars, fixed_shape_tensor, fixed_size_list and (large_)list of numbers. Raises UnusableError for others.
    """
    kind = field.type
    shape: tuple[int, ...] = ()
    variable = False
    if isinstance(kind, pa.FixedShapeTensorType):
        if kind.permutation is not None and list(kind.permutation) != sorted(kind.permutation):
            raise UnusableError(f"column {field.name!r} has permuted axes")
        kind, shape = kind.value_type, tuple(kind.shape)
    elif pa.types.is_fixed_size_list(kind):
        kind, shape = kind.value_type, (kind.list_size,)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind, variable = kind.value_type, True
    dtype = _DTYPES.get(kind)
    if dtype is None:
        hint = "; store it as uint8" if pa.types.is_boolean(kind) else ""
        raise UnusableError(f"column {field.name!r} is of {field.type}, which is not a plain number{hint}")
    return Column(dtype, shape, variable)


def view(array: pa.Array, name: str, column: Column) -> Array | Ragged:
    """The array's samples without a copy: [n, *shape], or Ragged. Raises UnusableError if values are missing."""
    storage = array.storage if isinstance(array, pa.ExtensionArray) else array
    offsets = None
    values = storage
    if column.variable:
        offsets, values = storage.offsets.to_numpy().astype(np.int64, copy=False), storage.values
    elif column.shape:
        # Not `flatten`: it imports pyarrow.compute, which takes 30 ms of each rank's start.
        # `values` also has the elements before and behind a slice.
        size = storage.type.list_size
        values = storage.values.slice(storage.offset * size, len(storage) * size)
    if storage.null_count or values.null_count:
        raise UnusableError(f"column {name!r} has missing values (nulls)")
    numbers: Array = values.to_numpy(zero_copy_only=True)
    return numbers.reshape(len(array), *column.shape) if offsets is None else Ragged(numbers, offsets)


def to_arrow(samples: Array | Ragged) -> pa.Array:
    """Samples as an Arrow array; the inverse of `view`."""
    if isinstance(samples, Ragged):
        # Some releases of pyarrow write offsets that do not begin at 0 without the values before them.
        first, last = samples.offsets[0], samples.offsets[-1]
        return pa.LargeListArray.from_arrays(pa.array(samples.offsets - first), pa.array(samples.values[first:last]))
    flat = pa.array(np.ascontiguousarray(samples).reshape(-1))
    if samples.ndim == 1:
        return flat
    shape = samples.shape[1:]
    kind = pa.fixed_shape_tensor(flat.type, shape)
    return pa.ExtensionArray.from_storage(kind, pa.FixedSizeListArray.from_arrays(flat, math.prod(shape)))


def value_range(samples: Array | Ragged) -> Range | None:
    """Minimum and maximum of all elements, NaN if one is NaN; None if there are none."""
    values = samples.values[samples.offsets[0] : samples.offsets[-1]] if isinstance(samples, Ragged) else samples
    return (values.min().item(), values.max().item()) if values.size else None


def join_ranges(ranges: Sequence[Range]) -> Range | None:
    """The range over several ranges; NaN if one is NaN."""
    ends = [end for span in ranges for end in span]
    # Python's min and max of numbers with a NaN depend on their order.
    if any(end != end for end in ends):
        return (math.nan, math.nan)
    return (min(ends), max(ends)) if ends else None


def encode_ranges(ranges: Mapping[str, Range]) -> dict[bytes, bytes]:
    """Encode ranges as a record batch's metadata."""
    # NaN and infinity are written as words, which JSON lacks and Python's parser reads.
    return {RANGES_KEY: json.dumps(ranges).encode()}


def decode_ranges(metadata: Mapping[bytes, bytes] | None) -> dict[str, Range]:
    """Decode the ranges by column from a record batch's metadata; empty if it has none."""
    try:
        ranges = json.loads((metadata or {}).get(RANGES_KEY, b"{}"))
    except (ValueError, RecursionError):
        ranges = None
    if not isinstance(ranges, dict) or not all(_is_range(span) for span in ranges.values()):
        raise UnusableError("the ranges in its metadata are damaged")
    return {name: (low, high) for name, (low, high) in ranges.items()}


def _is_range(span: object) -> bool:
    return isinstance(span, list) and len(span) == 2 and all(isinstance(end, (int, float)) for end in span)
