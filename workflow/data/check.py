"""Checks that a set matches the trainer's inputs, so that no step fails because of its data.

Called by the shard step and by `ortflow validate`. Finds all errors before raising. Reads values only if the shards'
own minimum and maximum do not decide.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ortflow.workflow.data.feed import Feed
from ortflow.workflow.data.inputs import BatchInput, Limits
from ortflow.workflow.data.samples import Samples, fault_of
from ortflow.workflow.data.scan import first_outside
from ortflow.workflow.data.schema import Column, Range
from ortflow.workflow.data.values_check import check_values
from ortflow.workflow.errors import Faults, UserError
from ortflow.workflow.spec.mapping import ColumnReference, parse_reference


def check_inputs(
    dataset: Samples,
    inputs: Sequence[BatchInput],
    columns: Mapping[str, str],
    limits: Limits,
    *,
    micro_batch: int,
    smaller_batch: bool,
    key_path: str,
    samples: int | None = None,
) -> tuple[Feed, ...]:
    """Determine how each input is filled from the set.

    Parameters
    ----------
    dataset
        The set.
    inputs
        The trainer's inputs.
    columns
        Input -> column or slice of one, where names differ.
    limits
        Bounds of the inputs' values.
    micro_batch
        Samples per micro-batch.
    smaller_batch
        Whether a smaller micro-batch may occur at the end.
    key_path
        The set's key path in the run file.
    samples
        Number of samples that are used, from the first; all if None.

    Raises
    ------
    Faults
        For every input without a column of its shape and type, and for every value out of bounds, by sample.
    """
    count = len(dataset) if samples is None else min(samples, len(dataset))
    smaller_batch = smaller_batch and count % micro_batch > 0
    faults: list[UserError] = []
    names = [batch_input.name for batch_input in inputs]
    faults += _unknown_inputs(columns, names, f"{key_path}.columns")
    faults += _unknown_inputs(limits.pad_value or {}, names, "data.pad_value")
    feeds = []
    for batch_input in inputs:
        try:
            feed = _feed(dataset, batch_input, columns, limits, key_path)
            _check_batch_axis(batch_input, micro_batch, smaller_batch)
            check_values(dataset, batch_input, feed, columns, limits)
            feeds.append(feed)
        except UserError as fault:
            faults.append(fault)
    if faults:
        raise Faults(faults)
    return tuple(feeds)


def _unknown_inputs(values: Mapping[str, Any], names: Sequence[str], key_path: str) -> list[UserError]:
    return [
        UserError(f"there is no input {name!r}", where=key_path, fix=_choose(name, names))
        for name in values
        if name not in names
    ]


def _choose(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"choose of: {', '.join(names)}"


def _feed(dataset: Samples, batch_input: BatchInput, columns: Mapping[str, str], limits: Limits, key_path: str) -> Feed:
    name = batch_input.name
    place = f"{key_path}.columns.{name}"
    reference = parse_reference(columns[name], place) if name in columns else ColumnReference(name)
    column = dataset.columns.get(reference.column)
    if (misfit := fault_of(dataset, reference.column)) is not None:
        raise misfit
    if column is None:
        column_names = list(dataset.columns)
        several = len(batch_input.shape) == 2 and np.dtype(batch_input.dtype).kind == "f"
        raise UserError(
            f"{dataset.path} has no column {reference.column!r} for input {name!r}",
            where=place,
            fix=_choose(reference.column, column_names)
            if name in columns
            else f"name one of: {', '.join(column_names)}" + (", or of a table several, [A, B]" if several else ""),
        )
    if not batch_input.shape:
        raise UserError(f"input {name!r} has no batch axis", fix="export it with one")
    fault = (
        _shape_fault(dataset, batch_input, reference, column)
        or _length_fault(dataset, batch_input, reference, limits)
        or _dtype_fault(dataset, batch_input, reference, limits)
    )
    if fault:
        listed = not column.shape and not column.variable and len(batch_input.shape) == 2
        raise UserError(
            fault,
            where=str(dataset.path),
            fix="convert the data so that it fits, or map another column"
            + (f", or several of a table: {{{name}: [A, B]}}" if listed else ""),
        )
    length = batch_input.shape[1] if column.variable else None
    pad = _pad(batch_input, limits)
    return Feed(name, np.dtype(batch_input.dtype), reference, pad, length)


def _shape_fault(dataset: Samples, batch_input: BatchInput, reference: ColumnReference, column: Column) -> str | None:
    subject = f"column {str(reference)!r} holds samples of {column}"
    input_shape = batch_input.shape[1:]
    expectation = f"input {batch_input.name!r} takes {_axes(input_shape)}"
    if column.variable:
        lengths = _sliced_lengths(dataset.lengths(reference.column), reference.slice)
        if len(input_shape) != 1:
            return f"{subject}, but {expectation}"
        if not lengths.all():
            return f"sample {int(np.argmin(lengths))} of column {str(reference)!r} has no element"
        if input_shape[0] is not None and int(np.max(lengths)) > input_shape[0]:
            longest = int(np.argmax(lengths))
            return f"sample {longest} of column {str(reference)!r} has {lengths[longest]} elements, but {expectation}"
        return None
    if not column.shape and not reference.whole:
        return f"{subject}, which cannot be sliced"
    shape = column.shape
    if not reference.whole:
        shape = (len(range(shape[0])[reference.slice]), *shape[1:])
    if len(shape) != len(input_shape) or any(w is not None and w != s for s, w in zip(shape, input_shape, strict=True)):
        return f"column {str(reference)!r} holds samples of {_axes(shape)}, but {expectation}"
    return f"column {str(reference)!r} holds samples without elements" if 0 in shape else None


def _length_fault(dataset: Samples, batch_input: BatchInput, reference: ColumnReference, limits: Limits) -> str | None:
    """Why a list of measurements is too short: zeros in place of those that are missing would be wrong numbers."""
    size = batch_input.shape[1] if len(batch_input.shape) == 2 else None
    measured = np.dtype(batch_input.dtype).kind == "f" and batch_input.role != "label"
    if not measured or size is None or not dataset.columns[reference.column].variable:
        return None
    if batch_input.name in (limits.pad_value or {}):
        return None
    lengths = _sliced_lengths(dataset.lengths(reference.column), reference.slice)
    shortest = int(np.argmin(lengths))
    if lengths[shortest] == size:
        return None
    return (
        f"sample {shortest} of column {str(reference)!r} has {lengths[shortest]} elements, but input "
        f"{batch_input.name!r} takes {size}, and data.pad_value.{batch_input.name} does not say what the others are"
    )


def _axes(shape: Sequence[int | None]) -> str:
    return f"shape [{', '.join('any' if axis is None else str(axis) for axis in shape)}]" if shape else "scalars"


def _sliced_lengths(lengths: npt.NDArray[np.int64], part: slice) -> npt.NDArray[np.int64]:
    """Lengths of `sample[part]`."""

    def end(at: int | None, default: npt.NDArray[np.int64] | int) -> npt.NDArray[np.int64]:
        if at is None:
            return np.asarray(default)
        return np.clip(at if at >= 0 else lengths + at, 0, lengths)

    counts: npt.NDArray[np.int64] = np.maximum(end(part.stop, lengths) - end(part.start, 0), 0)
    return counts


def _dtype_fault(dataset: Samples, batch_input: BatchInput, reference: ColumnReference, limits: Limits) -> str | None:
    column, input_dtype = dataset.columns[reference.column], np.dtype(batch_input.dtype)
    if column.dtype.kind == "f" and input_dtype.kind != "f":
        return (
            f"column {reference.column!r} is {column.dtype.name}, which cannot be converted to the {input_dtype.name} "
            f"of input {batch_input.name!r}"
        )
    only_truths = (batch_input.role != "label" and not column.quantity) or batch_input.name in limits.truths
    if column.dtype.kind in "iu" and input_dtype.kind == "f":
        span = (0, 1) if only_truths else _whole_numbers(input_dtype)
    elif np.can_cast(column.dtype, input_dtype, "safe"):
        return None
    else:
        span = _span(input_dtype)
    outlier = first_outside(dataset, reference, span)
    if outlier is None:
        return None
    subject = f"sample {outlier[0]} of column {reference.column!r}, {column.dtype.name}, holds {outlier[1]}"
    domain = "only 0 and 1" if span == (0, 1) else " to ".join(map(_number, span))
    advice = " as integers: do scaling in the data conversion" if span == (0, 1) and input_dtype.kind == "f" else ""
    return f"{subject}, but the {input_dtype.name} of input {batch_input.name!r} takes {domain}{advice}"


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _span(dtype: np.dtype[Any]) -> Range:
    """The smallest and the largest number of a type."""
    if dtype.kind == "b":
        return 0, 1
    if dtype.kind == "f":
        return float(np.finfo(dtype).min), float(np.finfo(dtype).max)
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


def _whole_numbers(dtype: np.dtype[Any]) -> Range:
    """The range in which a floating-point type represents every integer."""
    largest = 2 ** (np.finfo(dtype).nmant + 1)
    return -largest, largest


def _pad(batch_input: BatchInput, limits: Limits) -> float:
    dtype, name = np.dtype(batch_input.dtype), batch_input.name
    ignored = limits.ignore_index if batch_input.role == "label" and dtype.kind in "iu" else None
    sequences = limits.sequences.get(name)
    default = -1 if sequences is not None else 0 if ignored is None else ignored
    pad = (limits.pad_value or {}).get(name, default)
    bound = limits.bounds.get(name) if sequences is None else None
    if sequences is not None and sequences.lengths is None and pad >= 0:
        raise UserError(
            f"{pad} counts as a label of input {name!r}", where=f"data.pad_value.{name}", fix="give a number below 0"
        )
    if name in limits.truths and not 0 <= pad <= 1:
        raise UserError(f"{pad} is not a value of input {name!r}", where=f"data.pad_value.{name}", fix="give 0 to 1")
    if name in limits.counts and pad < 0:
        raise UserError(f"{pad} is not a value of input {name!r}", where=f"data.pad_value.{name}", fix="give 0 or more")
    if dtype.kind in "iu":
        kind = np.iinfo(dtype)
        fits = float(pad).is_integer() and kind.min <= pad <= kind.max
        fits = fits and (bound is None or 0 <= pad < bound or pad == ignored)
        if not fits:
            limit = f"below {bound}" if bound is not None else dtype.name
            raise UserError(
                f"{pad} is not a value of input {name!r}",
                where=f"data.pad_value.{name}",
                fix=f"give an integer, {limit}",
            )
    return pad


def _check_batch_axis(batch_input: BatchInput, micro_batch: int, smaller_batch: bool) -> None:
    fixed = batch_input.shape[0]
    if fixed is None:
        return
    subject = f"input {batch_input.name!r} takes batches of {fixed} samples"
    if fixed != micro_batch:
        raise UserError(
            f"{subject}, not {micro_batch}", fix=f"set the micro-batch to {fixed}, or export a free batch axis"
        )
    if smaller_batch:
        raise UserError(f"{subject}, but the last one is smaller", where="data.last_batch", fix="set it to pad")
