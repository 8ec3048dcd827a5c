"""What is known of each column of a table: its kind, and minimum, maximum, mean, missing values and classes.

Made by the pass that indexes a table; recorded in the index.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MOST_CLASSES = 65_536
"""Different values of a column up to which they are counted: more are not classes."""
KINDS = {
    "missing": pa.null(),
    "boolean": pa.bool_(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "text": pa.string(),
    "date": pa.date32(),
    "time": pa.timestamp("us"),
    "zoned time": pa.timestamp("us", "UTC"),
    "integers": pa.list_(pa.int64()),
    "numbers": pa.list_(pa.float64()),
}
"""Kind of a column -> the type that it is read as."""
NUMERIC = ("boolean", "integer", "number")
DATED = ("date", "time", "zoned time")
DAY = 86_400_000_000
"""Microseconds."""
_WIDER = {
    ("integer", "number"): "number",
    ("date", "time"): "time",
    ("integers", "numbers"): "numbers",
}


def kind_of(kind: pa.DataType) -> str:
    """The kind of an Arrow type; `unsupported` for structures and others that are neither numbers nor text."""
    if pa.types.is_null(kind):
        return "missing"
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_integer(kind):
        return "integer"
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "number"
    if pa.types.is_date(kind):
        return "date"
    if pa.types.is_timestamp(kind):
        return "time" if kind.tz is None else "zoned time"
    if pa.types.is_dictionary(kind):
        return kind_of(kind.value_type)
    if (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_time(kind)
    ):
        return "text"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = kind_of(kind.value_type)
        return {"integer": "integers", "missing": "integers", "number": "numbers"}.get(inner, "unsupported")
    return "unsupported"


def wider(kind: str, other: str) -> str:
    """The kind that holds the values of both: text if nothing narrower does."""
    if kind == other or other == "missing":
        return kind
    if kind == "missing":
        return other
    pair: tuple[str, str] = (kind, other) if (kind, other) in _WIDER else (other, kind)
    if pair in _WIDER:
        return _WIDER[pair]
    lists = {"integers", "numbers", "unsupported"}
    return "unsupported" if lists & {kind, other} else "text"


@dataclass
class Summary:
    """The values of a column so far. Missing values count in `missing` alone; in text an empty one is missing."""

    kind: str = "missing"
    rows: int = 0
    missing: int = 0
    first_missing: int | None = None
    """Number of the first row without a value."""
    minimum: float | None = None
    """Of dates in days, and of times in microseconds, since 1970-01-01."""
    maximum: float | None = None
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared differences from the mean."""
    not_numbers: int = 0
    """NaN among the values."""
    classes: dict[str, int] | None = field(default_factory=dict)
    """Value as text -> its count; None for fractions, lists, and more than `MOST_CLASSES`."""
    shortest: int | None = None
    longest: int | None = None
    """Elements of a list, characters of a text."""
    elements: int = 0
    """Elements of all lists."""
    reread: bool = False
    """Whether an earlier part was read as another kind than text, so that its text must be read again."""

    @property
    def present(self) -> int:
        """Rows with a value."""
        return self.rows - self.missing

    @property
    def deviation(self) -> float:
        """Standard deviation over all values (with N in the denominator)."""
        return math.sqrt(self.squares / self.present) if self.present else 0.0

    def add(self, column: pa.ChunkedArray, from_text: bool = False) -> None:
        """Add the rows of a part of the table, in order.

        With `from_text`, values were inferred from text, so that a missing value may be a text such as NA.
        """
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        # pyarrow reads 12:30 in a CSV as a time of day; and no time keeps less than microseconds.
        if pa.types.is_time(column.type) or (from_text and _has_nanoseconds(column)):
            column, self.reread = column.cast(pa.string()), self.reread or from_text
        kind = kind_of(column.type)
        merged = wider(self.kind, kind)
        if merged == "text" and self.rows and len(column):
            lossless = ("text",) if from_text else ("text", "missing")
            self.reread = self.reread or self.kind not in lossless or kind not in lossless
        if (self.kind, merged) == ("date", "time") and self.minimum is not None and self.maximum is not None:
            self.minimum, self.maximum = self.minimum * DAY, self.maximum * DAY
        self.kind = merged
        counted = pc.value_counts(column) if kind == "text" and self.classes is not None else None
        absent = _absent(column, kind, counted)
        if absent and self.first_missing is None:
            missing = empty(column) if kind == "text" else column.is_null()
            self.first_missing = self.rows + pc.index(missing, True).as_py()
        present = len(column) - absent
        before = self.present
        self.rows += len(column)
        self.missing += absent
        if not present or self.reread or merged == "unsupported":
            return
        if kind == "text":
            texts = column if counted is None else counted.field("values")
            self._add_lengths(pc.utf8_length(texts.filter(pc.invert(empty(texts))) if absent else texts))
            if counted is not None:
                self._add_classes(counted)
        elif kind in ("integers", "numbers"):
            self._add_lengths(pc.list_value_length(column))
            flat = pc.list_flatten(column)
            self._add_numbers(flat, self.elements)
            self.elements += len(flat)
            self.classes = None
        elif kind in NUMERIC:
            self._add_numbers(column, before)
            if kind == "number":
                self.classes = None
            elif self.classes is not None:
                self._add_classes(pc.value_counts(column))
        else:
            # A part may have another unit, or dates alone.
            ticks = column.cast(KINDS[merged], safe=False).cast(pa.int32() if merged == "date" else pa.int64())
            ends = pc.min_max(ticks).as_py()
            self._widen(ends["min"], ends["max"])
            self.classes = None

    def _add_numbers(self, column: pa.ChunkedArray, before: int) -> None:
        if column.null_count:
            column = column.drop_null()
        numbers = column.cast(pa.float64(), safe=False).to_numpy()
        count = len(numbers)
        if not count:
            return
        mean = float(numbers.mean())
        if mean != mean:
            self.not_numbers += int(np.isnan(numbers).sum())
        # Arrow leaves NaN out, unless there is nothing else.
        ends = pc.min_max(column)
        self._widen(ends["min"].as_py(), ends["max"].as_py())
        with np.errstate(invalid="ignore"):  # infinite values have no deviation
            away = numbers - mean
        # Chan, Golub & LeVeque 1979: parts are added without a second pass and without cancellation.
        delta, total = mean - self.mean, before + count
        self.mean += delta * count / total
        # Not `away @ away`: OpenBLAS's threads would spin between the columns.
        self.squares += float(np.square(away, out=away).sum()) + delta * delta * before * count / total

    def _add_lengths(self, lengths: pa.ChunkedArray) -> None:
        ends = pc.min_max(lengths).as_py()
        if ends["min"] is not None:
            self.shortest = ends["min"] if self.shortest is None else min(self.shortest, ends["min"])
            self.longest = ends["max"] if self.longest is None else max(self.longest, ends["max"])

    def _add_classes(self, counted: pa.StructArray) -> None:
        """Add counts of values, as `value_counts` returns them."""
        if self.classes is None or len(counted) > MOST_CLASSES + 2:
            self.classes = None
            return
        for value, count in zip(counted.field("values").to_pylist(), counted.field("counts").to_pylist(), strict=True):
            if value is not None and value != "":
                name = class_name(value)
                self.classes[name] = self.classes.get(name, 0) + count
        if len(self.classes) > MOST_CLASSES:
            self.classes = None

    def _widen(self, low: float, high: float) -> None:
        self.minimum = low if self.minimum is None else min(self.minimum, low)
        self.maximum = high if self.maximum is None else max(self.maximum, high)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Summary:
        """The inverse of `to_json`."""
        return cls(**values)


def _absent(column: pa.ChunkedArray, kind: str, counted: pa.StructArray | None) -> int:
    """Rows without a value; in text also those with an empty one."""
    if kind != "text":
        return int(column.null_count)
    if counted is None:
        return int(pc.sum(empty(column)).as_py() or 0)
    return int(pc.sum(counted.field("counts").filter(empty(counted.field("values")))).as_py() or 0)


def _has_nanoseconds(column: pa.ChunkedArray) -> bool:
    if not pa.types.is_timestamp(column.type) or column.type.unit != "ns":
        return False
    ticks = column.cast(pa.int64())
    return bool(pc.any(pc.not_equal(pc.multiply(pc.divide(ticks, 1000), 1000), ticks)).as_py())


def class_name(value: object) -> str:
    """A value as a class is written: true and false for booleans."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def empty(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Which texts are missing: nulls and empty ones."""
    return pc.fill_null(pc.equal(column, ""), True)
