"""What becomes of a table's columns: fitted on the training set, applied to rows of any set.

Pure: works on summaries and on Arrow tables in memory.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ortflow.workflow.data.schema import Array, Column
from ortflow.workflow.data.tables.summary import DATED, DAY, NUMERIC, Summary, empty
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.tables import Field

_TICKS = {"days": DAY, "seconds": 1_000_000, "milliseconds": 1_000, "microseconds": 1}
"""Microseconds of a unit."""
_DTYPES: dict[str, np.dtype[Any]] = {"boolean": np.dtype("u1"), "integer": np.dtype("i8"), "number": np.dtype("f8")}


@dataclass(frozen=True)
class Part:
    """One column of a table on its way to an input."""

    column: str
    classes: tuple[str, ...] | None = None
    one_hot: bool = False
    fill: float | str | None = None
    """What a missing value becomes; None refuses it."""
    mean: float | None = None
    std: float | None = None
    unit: str | None = None

    @property
    def width(self) -> int:
        """Numbers of a sample."""
        return len(self.classes or ()) if self.one_hot else 1

    @property
    def plain(self) -> bool:
        """Whether numbers keep their type."""
        return self.classes is None and self.mean is None and self.std is None and self.unit is None

    def dtype(self, kind: str) -> np.dtype[Any]:
        """The type of its numbers, for a column of a kind."""
        if self.one_hot:
            return np.dtype("u1")
        if self.classes is not None or self.unit is not None:
            return np.dtype("i8")
        keeps_type = self.plain and (self.fill is None or float(self.fill).is_integer())
        return _DTYPES.get(kind, np.dtype("f8")) if keeps_type else np.dtype("f8")

    def span(self, summary: Summary) -> tuple[float, float] | None:
        """The smallest and the largest of its numbers; None if a summary does not say."""
        if self.one_hot:
            return 0, 1
        if self.classes is not None:
            return 0, max(0, len(self.classes) - 1)
        ends = [end for end in (summary.minimum, summary.maximum) if end is not None]
        if not ends or self.unit is not None:
            return None
        if summary.not_numbers:
            return float("nan"), float("nan")
        if summary.missing and self.fill is not None:
            ends.append(float(self.fill))
        low, high = ((end - (self.mean or 0)) / (self.std or 1) for end in (min(ends), max(ends)))
        return (int(low), int(high)) if self.dtype(summary.kind).kind in "iu" else (low, high)


@dataclass(frozen=True)
class Source:
    """How an input, or a column of the same name, is made: one part, or several side by side in one vector."""

    parts: tuple[Part, ...]
    stacked: bool = False

    def column(self, summaries: Mapping[str, Summary]) -> Column:
        """Element type and shape of a sample."""
        kinds = [summaries[part.column].kind for part in self.parts]
        if kinds[0] in ("integers", "numbers"):
            summary = summaries[self.parts[0].column]
            span = (float("nan"),) * 2 if summary.not_numbers else (summary.minimum, summary.maximum)
            return Column(np.dtype("i8" if kinds[0] == "integers" else "f8"), (), True, *span, quantity=True)
        spans = [part.span(summaries[part.column]) for part in self.parts]
        ends = [end for span in spans if span for end in span]
        nan = any(end != end for end in ends)
        value_range = None if None in spans else (float("nan"),) * 2 if nan else (min(ends), max(ends))
        dtype = np.result_type(*(part.dtype(kind) for part, kind in zip(self.parts, kinds, strict=True)))
        shape = (sum(part.width for part in self.parts),) if self.stacked or self.parts[0].one_hot else ()
        quantity = all(part.classes is None or part.one_hot for part in self.parts)
        return Column(dtype, shape, quantity=quantity).with_range(value_range)

    def array(self, table: pa.Table, dtype: np.dtype[Any], row_of: Callable[[int], str]) -> Array:
        """The samples of some rows; `row_of` names a row of them in errors."""
        arrays = [_numbers(part, table.column(part.column), row_of) for part in self.parts]
        if not self.stacked:
            return arrays[0].astype(dtype, copy=False)
        wide = [array.reshape(len(array), -1).astype(dtype, copy=False) for array in arrays]
        return np.concatenate(wide, axis=1)


def _numbers(part: Part, column: pa.ChunkedArray, row_of: Callable[[int], str]) -> Array:
    if part.classes is not None:
        return _codes(part, column, row_of)
    if part.unit is not None:
        # pyarrow 26 casts date64 to int64, but not date32.
        ticks = column.cast(pa.timestamp("us", getattr(column.type, "tz", None))).cast(pa.int64())
        column = pc.divide(ticks, _TICKS[part.unit])
    if column.null_count:
        column = _filled(part, column, column.is_null(), row_of)
    if part.plain and not pa.types.is_floating(column.type):
        integers: Array = column.cast(pa.uint8() if pa.types.is_boolean(column.type) else pa.int64()).to_numpy()
        return integers
    numbers: Array = column.cast(pa.float64(), safe=False).to_numpy()
    if part.mean is not None:
        numbers = numbers - part.mean
    return numbers if part.std is None else numbers / part.std


def _codes(part: Part, column: pa.ChunkedArray, row_of: Callable[[int], str]) -> Array:
    texts = column.cast(pa.string())
    missing = empty(texts)
    if pc.any(missing).as_py():
        texts = _filled(part, texts, missing, row_of)
    codes = pc.index_in(texts, value_set=pa.array(part.classes, pa.string()))
    if codes.null_count:
        row = pc.index(codes.is_null(), True).as_py()
        raise UserError(
            f"has {texts[row].as_py()!r} as {part.column!r}, which is none of the {len(part.classes or ())} classes of "
            "the training set",
            where=row_of(row),
            fix="correct it, or list all classes in data.train.fields",
        )
    numbers: Array = codes.to_numpy().astype(np.int64)
    return np.eye(part.width, dtype=np.uint8)[numbers] if part.one_hot else numbers


def _filled(
    part: Part, column: pa.ChunkedArray, missing: pa.ChunkedArray, row_of: Callable[[int], str]
) -> pa.ChunkedArray:
    if part.fill is None:
        raise missing_value(part.column, row_of(pc.index(missing, True).as_py()))
    if pa.types.is_string(column.type):
        return pc.if_else(missing, str(part.fill), column)
    if not float(part.fill).is_integer():
        column = column.cast(pa.float64(), safe=False)
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int64())
    return pc.fill_null(column, pa.scalar(part.fill).cast(column.type))


def missing_value(name: str, location: str) -> UserError:
    """The error of a row without a value."""
    return UserError(
        f"has no value for {name!r}",
        where=location,
        fix="complete it, or state `missing` for the column in data.train.fields",
    )


def fit(
    columns: Mapping[str, str | Sequence[str]],
    fields: Sequence[Field],
    summaries: Mapping[str, Summary],
    key_path: str = "data.train",
) -> dict[str, Source]:
    """How each column and each stacked input is made, by name; without columns that cannot become numbers.

    Parameters
    ----------
    columns
        Input -> column, or columns that are stacked; those of the set to read.
    fields
        What the run file states about columns.
    summaries
        The training set's columns.
    key_path
        The key path of the set to read.

    Raises
    ------
    UserError
        For a pattern that matches no column, and options that a column's kind does not have.
    """
    names = list(summaries)
    rules: dict[str, tuple[Field, str]] = {}
    for number, rule in enumerate(fields):
        place = f"data.train.fields[{number}]"
        for name in _matching(rule.columns, names, f"{place}.columns"):
            rules.setdefault(name, (rule, place))
    sources = {}
    for name, summary in summaries.items():
        part = _part(name, summary, *rules.get(name, (Field.model_construct(columns=[name]), "")))
        if part is not None:
            sources[name] = Source((part,))
    for name, patterns in columns.items():
        if not isinstance(patterns, str):
            place = f"{key_path}.columns.{name}"
            parts = [
                _stackable(column_name, sources, summaries[column_name], place)
                for column_name in _matching(patterns, names, place)
            ]
            sources[name] = Source(tuple(parts), stacked=True)
    return sources


def _matching(patterns: Sequence[str], names: Sequence[str], key_path: str) -> list[str]:
    """The columns that patterns name, each once: in the order of the patterns, and of the table."""
    result: list[str] = []
    for pattern in patterns:
        hits = [pattern] if pattern in names else [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not hits:
            raise UserError(
                f"the table has no column {pattern!r}", where=key_path, fix=f"choose of: {', '.join(names)}"
            )
        result += [name for name in hits if name not in result]
    if not result:
        raise UserError("names no column", where=key_path, fix="list some")
    return result


def _part(name: str, summary: Summary, rule: Field, place: str) -> Part | None:
    """How a column becomes numbers; None if it does not. Raises UserError for a rule that does not fit its kind."""
    categorical = rule.classes is not None or rule.one_hot or summary.kind == "text"
    scaled = rule.standardize or rule.mean is not None or rule.std is not None
    if rule.one_hot and rule.classes is None and summary.kind == "number":
        raise UserError(
            f"column {name!r} holds fractions, which are no classes", where=f"{place}.one_hot", fix="remove it"
        )
    if (scaled or rule.missing == "mean") and (categorical or summary.kind not in NUMERIC):
        key = "missing" if not scaled else "standardize" if rule.standardize else "mean"
        raise UserError(
            f"column {name!r} holds {summary.kind}, which has no mean",
            where=f"{place}.{key}",
            fix="remove it, or set `type: number` to skip what is not a number",
        )
    if (
        rule.type is not None
        and summary.kind not in {"number": (*NUMERIC, "missing"), "text": ("text", "missing")}[rule.type]
    ):
        raise UserError(
            f"column {name!r} holds {summary.kind} by the file, which states the types of its values",
            where=f"{place}.type",
            fix="remove it, or write other values into the file: `type` is for CSV. `classes: sorted` makes classes",
        )
    wanted = [summary.mean] * (rule.standardize or rule.missing == "mean") + [summary.squares] * rule.standardize
    if not all(map(math.isfinite, wanted)):
        raise UserError(
            f"column {name!r} has no mean: some of its values are NaN or infinite",
            where=f"{place}.{'standardize' if rule.standardize else 'missing'}",
            fix="write them as missing values, or state `mean` and `std`",
        )
    if rule.unit is not None and summary.kind not in DATED:
        raise UserError(f"column {name!r} holds {summary.kind}, no dates", where=f"{place}.unit", fix="remove it")
    fill: float | str | None
    if rule.missing == "refuse":
        fill = None
    elif rule.missing == "mean":
        fill = summary.mean
    elif isinstance(rule.missing, str) and not categorical:
        raise UserError(f"is {rule.missing!r}", where=f"{place}.missing", fix="give refuse, mean or a number")
    else:
        fill = str(rule.missing) if categorical else rule.missing
    if categorical:
        classes = _classes(summary, rule, fill)
        return None if classes is None else Part(name, classes, rule.one_hot, fill)
    if summary.kind in DATED:
        return None if rule.unit is None else Part(name, fill=fill, unit=rule.unit)
    if summary.kind in ("integers", "numbers"):
        return Part(name)
    if summary.kind not in NUMERIC:
        return None
    mean = summary.mean if rule.standardize else rule.mean
    std = (summary.deviation or 1.0) if rule.standardize else rule.std
    return Part(name, fill=fill, mean=mean, std=std)


def _classes(summary: Summary, rule: Field, fill: float | str | None) -> tuple[str, ...] | None:
    if isinstance(rule.classes, list):
        return tuple(rule.classes)
    if summary.classes is None or not summary.classes:
        return None
    values = {*summary.classes, *([str(fill)] if fill is not None and summary.missing else [])}
    if summary.kind == "integer" and all(value.lstrip("-").isdigit() for value in values):
        return tuple(sorted(values, key=int))
    return tuple(sorted(values))


def _stackable(name: str, sources: Mapping[str, Source], summary: Summary, key_path: str) -> Part:
    source = sources.get(name)
    if source is not None and summary.kind not in ("integers", "numbers"):
        part = source.parts[0]
        if part.classes is None or part.one_hot or summary.kind != "text":
            return part
        raise UserError(
            f"column {name!r} holds text, such as {next(iter(summary.classes or ['']))!r}",
            where=key_path,
            fix="give it an entry in data.train.fields with `one_hot: true`, or `type: number` to skip such rows",
        )
    raise UserError(f"column {name!r} {unusable(summary)}", where=key_path, fix="leave it out")


def unusable(summary: Summary) -> str:
    """Why a column does not become numbers."""
    if summary.kind == "text":
        return "holds text with too many different values for classes" if summary.classes is None else "has no value"
    if summary.kind in DATED:
        return "holds dates, which become numbers with `unit` in data.train.fields"
    if summary.kind in ("integers", "numbers"):
        return "holds lists, which are an input of their own"
    if summary.kind == "missing":
        return "has no value"
    return "holds structures, or text that is not UTF-8"


def recorded(sources: Mapping[str, Source]) -> dict[str, Any]:
    """The sources as plain data, which identify what they make."""
    return {name: asdict(source) for name, source in sorted(sources.items())}
