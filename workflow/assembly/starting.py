"""Replaces the initial tensors of a model by those of `model.start_from`. Called by `build`.

Only rank 0 reads them, once: all ranks, stages and shards take their part of the run's own copy, and a restart too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from onnx import numpy_helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.intake.source import Source
from ortflow.workflow.spec.model import StartFrom
from ortflow.workflow.weights.file import Stored, read_file
from ortflow.workflow.weights.kept import RECORD, Record, read_kept, read_record, stamp
from ortflow.workflow.weights.matching import WHERE, Match, Targets, match, some
from ortflow.workflow.weights.sources import STEP, Weights, open_weights
from ortflow.workflow.weights.table import Array, Entry, as_dtype, as_float32

INITIAL = "initial.safetensors"
FLOATS = ("F32", "F64", "F16", "BF16")


@dataclass(frozen=True)
class Started:
    """A model with other initial tensors."""

    source: Source
    table: list[Entry] | None
    files: Mapping[str, bytes]
    notes: Sequence[str] = ()


def started_from(
    section: StartFrom | None, source: Source, table: list[Entry] | None, out: Path, *, resumed: bool
) -> Started:
    """The model with the tensors of `section`, or with the copy of them that an earlier attempt left in `out`.

    `resumed`: the run continues from a checkpoint, and the copy is used whatever has become of the files. Raises
    UserError if names, shapes or types do not fit.
    """
    if section is None:
        return Started(source, table, {})
    record = read_record(out)
    if record is not None and record.section == section.model_dump(mode="json") and (resumed or record.is_current):
        again = _own_copy(record, source, table, out)
        if again is not None:
            return again
    weights = _opened(section)
    stored = weights.tensors
    constants = {t.name: numpy_helper.to_array(t) for t in source.skeleton.graph.initializer}
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    targets = _targets(source, table or [], constants)
    matched = match(shapes, targets, section.names, section.missing, section.unexpected)
    tensors = {
        name: _value(name, matched.sources[name], stored) if name in matched.sources else array
        for name, array in source.tensors.items()
    }
    values = {name: stored[entry] for name, entry in matched.other_entries.items()}
    _refuse_other_constants(values, constants, table or [])
    new_record = Record(section.model_dump(mode="json"), weights.digest, tuple(filter(None, map(stamp, weights.files))))
    return Started(
        replace(source, tensors=tensors),
        None if table is None else [_with_value(entry, values) for entry in table],
        {RECORD: new_record.encode()},
        [_note(weights.description, matched, stored)],
    )


def _opened(section: StartFrom) -> Weights:
    try:
        return open_weights(Path(section.path), section.step)
    except UserError as error:
        if error.where == STEP:
            raise
        place = f"{error.where}: " if error.where else ""
        raise UserError(f"{place}{error.what}", where=f"{WHERE}.path", fix=error.fix) from error


def _targets(source: Source, table: Sequence[Entry], constants: Mapping[str, Array]) -> Targets:
    aliases = {e.name: e.tensor for e in table if e.tensor is not None and e.tensor in source.tensors}
    constant_shapes = {name: array.shape for name, array in constants.items()}
    constant_shapes |= {entry.name: entry.shape for entry in table if entry.name not in aliases}
    return Targets({name: array.shape for name, array in source.tensors.items()}, aliases, constant_shapes)


def _own_copy(record: Record, source: Source, table: list[Entry] | None, out: Path) -> Started | None:
    """The tensors that this run began with, when its graphs are made again; None if they are not there."""
    try:
        stored = read_file(out / INITIAL).tensors
        entries = {entry.name: entry for entry in read_kept(out) or ()}
    except (OSError, UserError):
        return None
    if any(name not in stored or stored[name].shape != array.shape for name, array in source.tensors.items()):
        return None
    # Copied: the file is replaced by the one that is written from them.
    tensors = {name: np.array(stored[name].read()) for name in source.tensors}
    rows = None if table is None else [replace(e, value=_or(entries.get(e.name), e)) for e in table]
    return Started(replace(source, tensors=tensors), rows, {RECORD: record.encode()})


def _or(copy: Entry | None, entry: Entry) -> Array | None:
    return copy.value if copy is not None and copy.value is not None else entry.value


def _value(name: str, entries: Sequence[str], stored: Mapping[str, Stored]) -> Array:
    values = [_float(entry, stored[entry]) for entry in entries]
    for entry, value in zip(entries[1:], values[1:], strict=True):
        if not np.array_equal(value, values[0], equal_nan=True):
            raise UserError(
                f"{entries[0]} and {entry} are one tensor of the model ({name}) and have different values in the file",
                where=WHERE,
                fix="use weights in which they are tied, or list one of them as unexpected",
            )
    return values[0]


def _float(name: str, stored: Stored) -> Array:
    if stored.dtype not in FLOATS and stored.dtype not in ("I64", "I32", "BOOL"):
        raise UserError(f"{name} has elements of type {stored.dtype}", where=WHERE, fix="save it in single precision")
    value = as_float32(stored.read(), stored.dtype)
    if stored.dtype == "F64" and not np.isfinite(value).all() and np.isfinite(stored.read()).all():
        raise UserError(f"{name} has values that single precision cannot represent", where=WHERE)
    return value


def _refuse_other_constants(
    stored: Mapping[str, Stored], constants: Mapping[str, Array], table: Sequence[Entry]
) -> None:
    """Raise UserError if the file has another value for a constant of the graph, which is not replaced."""
    reads = {entry.name: entry.value for entry in table if entry.is_constant and entry.value is not None}
    listed = {entry.name for entry in table if not entry.is_constant}
    expected = {name: array for name, array in {**constants, **reads}.items() if name not in listed}
    wrong = [
        name
        for name, tensor in stored.items()
        if name in expected and not np.array_equal(_plain(tensor), expected[name], equal_nan=_is_float(expected[name]))
    ]
    if wrong:
        raise UserError(
            f"the file has other values for {some(wrong)}, which are constants of the model's graph",
            where=WHERE,
            fix="export the module with the values of the file, or list them as unexpected",
        )


def _plain(stored: Stored) -> Array:
    return as_float32(stored.read(), stored.dtype) if stored.dtype == "BF16" else stored.read()


def _is_float(array: Array) -> bool:
    return bool(np.issubdtype(array.dtype, np.floating))


def _with_value(entry: Entry, stored: Mapping[str, Stored]) -> Entry:
    tensor = stored.get(entry.name)
    if tensor is None or entry.is_constant:
        return entry
    value = np.array(tensor.read())
    if tensor.dtype != entry.dtype:
        value = as_dtype(as_float32(value, tensor.dtype), entry.dtype, entry.name)
    return replace(entry, value=value)


def _note(description: str, matched: Match, stored: Mapping[str, Stored]) -> str:
    read = [name for entries in matched.sources.values() for name in entries]
    casts = sorted({stored[name].dtype for name in read} - {"F32"})
    text = f"started from {description}: {len(matched.sources)} tensors"
    if casts:
        text += f", cast to fp32 from {', '.join(casts)}"
    return text + (f"; with the model file's values: {some(matched.unchanged)}" if matched.unchanged else "")
