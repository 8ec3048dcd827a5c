"""Checks that a set matches the trainer's inputs, so that no step fails because of its data.

Called by the shard step and by `ortflow validate`. Finds all errors before raising. Reads values only if the shards'
own minimum and maximum do not decide.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ortflow.workflow.data.feed import Feed
from ortflow.workflow.data.inputs import BatchInput, Limits
from ortflow.workflow.data.samples import Samples, fault_of
from ortflow.workflow.data.scan import first_outside
from ortflow.workflow.data.schema import Column, Range
from ortflow.workflow.data.sequences import first_wrong_label
from ortflow.workflow.errors import Faults, UserError
from ortflow.workflow.spec.mapping import ColumnReference, parse_reference

ROUNDING = 1e-6
"""By how much a probability may lie outside 0 to 1: averages in single precision do."""
_OTHER_LOSS = "convert the data so that they are, or use another model.loss.kind: mse takes any number"


def check_inputs(
    dataset: Samples,
    inputs: Sequence[BatchInput],
    columns: Mapping[str, str],
    limits: Limits,
    *,
    micro_batch: int,
    smaller_batch: bool,
    where: str,
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
    where
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
    names = [given.name for given in inputs]
    faults += _unknown_inputs(columns, names, f"{where}.columns")
    faults += _unknown_inputs(limits.pad_value or {}, names, "data.pad_value")
    feeds = []
    for given in inputs:
        try:
            feed = _feed(dataset, given, columns, limits, where)
            _check_batch_axis(given, micro_batch, smaller_batch)
            _check_bound(dataset, given, feed, limits)
            _check_truths(dataset, given, feed, limits)
            _check_counts(dataset, given, feed, limits)
            _check_sequences(dataset, given, feed, columns, limits)
            feeds.append(feed)
        except UserError as fault:
            faults.append(fault)
    if faults:
        raise Faults(faults)
    return tuple(feeds)


def _unknown_inputs(given: Mapping[str, Any], names: Sequence[str], where: str) -> list[UserError]:
    return [
        UserError(f"there is no input {name!r}", where=where, fix=_choose(name, names))
        for name in given
        if name not in names
    ]


def _choose(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"choose of: {', '.join(names)}"


def _feed(dataset: Samples, given: BatchInput, columns: Mapping[str, str], limits: Limits, where: str) -> Feed:
    name = given.name
    place = f"{where}.columns.{name}"
    reference = parse_reference(columns[name], place) if name in columns else ColumnReference(name)
    column = dataset.columns.get(reference.column)
    if (misfit := fault_of(dataset, reference.column)) is not None:
        raise misfit
    if column is None:
        known = list(dataset.columns)
        raise UserError(
            f"{dataset.path} has no column {reference.column!r} for input {name!r}",
            where=place,
            fix=_choose(reference.column, known) if name in columns else f"name one of: {', '.join(known)}",
        )
    if not given.shape:
        raise UserError(f"input {name!r} has no batch axis", fix="export it with one")
    fault = (
        _shape_fault(dataset, given, reference, column)
        or _length_fault(dataset, given, reference, limits)
        or _dtype_fault(dataset, given, reference, limits)
    )
    if fault:
        raise UserError(fault, where=str(dataset.path), fix="convert the data so that it fits, or map another column")
    length = given.shape[1] if column.variable else None
    pad = _pad(given, limits)
    return Feed(name, np.dtype(given.dtype), reference, pad, length)


def _shape_fault(dataset: Samples, given: BatchInput, reference: ColumnReference, column: Column) -> str | None:
    reported = f"column {str(reference)!r} holds samples of {column}"
    wanted = given.shape[1:]
    asked = f"input {given.name!r} takes {_axes(wanted)}"
    if column.variable:
        lengths = _sliced_lengths(dataset.lengths(reference.column), reference.slice)
        if len(wanted) != 1:
            return f"{reported}, but {asked}"
        if not lengths.all():
            return f"sample {int(np.argmin(lengths))} of column {str(reference)!r} has no element"
        if wanted[0] is not None and int(np.max(lengths)) > wanted[0]:
            longest = int(np.argmax(lengths))
            return f"sample {longest} of column {str(reference)!r} has {lengths[longest]} elements, but {asked}"
        return None
    if not column.shape and not reference.whole:
        return f"{reported}, which cannot be sliced"
    shape = column.shape
    if not reference.whole:
        shape = (len(range(shape[0])[reference.slice]), *shape[1:])
    if len(shape) != len(wanted) or any(w is not None and w != s for s, w in zip(shape, wanted, strict=True)):
        return f"column {str(reference)!r} holds samples of {_axes(shape)}, but {asked}"
    return f"column {str(reference)!r} holds samples without elements" if 0 in shape else None


def _length_fault(dataset: Samples, given: BatchInput, reference: ColumnReference, limits: Limits) -> str | None:
    """Why a list of measurements is too short: zeros in place of those that are missing would be wrong numbers."""
    size = given.shape[1] if len(given.shape) == 2 else None
    measured = np.dtype(given.dtype).kind == "f" and given.role != "label"
    if not measured or size is None or not dataset.columns[reference.column].variable:
        return None
    if given.name in (limits.pad_value or {}):
        return None
    lengths = _sliced_lengths(dataset.lengths(reference.column), reference.slice)
    shortest = int(np.argmin(lengths))
    if lengths[shortest] == size:
        return None
    return (
        f"sample {shortest} of column {str(reference)!r} has {lengths[shortest]} elements, but input {given.name!r} "
        f"takes {size}, and data.pad_value.{given.name} does not say what the others are"
    )


def _axes(shape: Sequence[int | None]) -> str:
    return f"shape [{', '.join('any' if axis is None else str(axis) for axis in shape)}]" if shape else "scalars"


def _sliced_lengths(lengths: npt.NDArray[np.int64], part: slice) -> npt.NDArray[np.int64]:
    """Lengths of `sample[part]`."""

    def end(at: int | None, default: npt.NDArray[np.int64] | int) -> npt.NDArray[np.int64]:
        if at is None:
            return np.asarray(default)
        return np.clip(at if at >= 0 else lengths + at, 0, lengths)

    left: npt.NDArray[np.int64] = np.maximum(end(part.stop, lengths) - end(part.start, 0), 0)
    return left


def _dtype_fault(dataset: Samples, given: BatchInput, reference: ColumnReference, limits: Limits) -> str | None:
    column, wanted = dataset.columns[reference.column], np.dtype(given.dtype)
    if column.dtype.kind == "f" and wanted.kind != "f":
        return (
            f"column {reference.column!r} is {column.dtype.name}, which cannot be converted to the {wanted.name} "
            f"of input {given.name!r}"
        )
    only_truths = (given.role != "label" and not column.quantity) or given.name in limits.truths
    if column.dtype.kind in "iu" and wanted.kind == "f":
        span = (0, 1) if only_truths else _whole_numbers(wanted)
    elif np.can_cast(column.dtype, wanted, "safe"):
        return None
    else:
        span = _span(wanted)
    found = first_outside(dataset, reference, span)
    if found is None:
        return None
    reported = f"sample {found[0]} of column {reference.column!r}, {column.dtype.name}, holds {found[1]}"
    taken = "only 0 and 1" if span == (0, 1) else " to ".join(map(_number, span))
    more = " as integers: do scaling in the data conversion" if span == (0, 1) and wanted.kind == "f" else ""
    return f"{reported}, but the {wanted.name} of input {given.name!r} takes {taken}{more}"


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _span(wanted: np.dtype[Any]) -> Range:
    """The smallest and the largest number of a type."""
    if wanted.kind == "b":
        return 0, 1
    if wanted.kind == "f":
        return float(np.finfo(wanted).min), float(np.finfo(wanted).max)
    return int(np.iinfo(wanted).min), int(np.iinfo(wanted).max)


def _whole_numbers(wanted: np.dtype[Any]) -> Range:
    """The range in which a floating-point type represents every integer."""
    largest = 2 ** (np.finfo(wanted).nmant + 1)
    return -largest, largest


def _pad(given: BatchInput, limits: Limits) -> float:
    dtype, name = np.dtype(given.dtype), given.name
    ignored = limits.ignore_index if given.role == "label" and dtype.kind in "iu" else None
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


def _check_batch_axis(given: BatchInput, micro_batch: int, smaller_batch: bool) -> None:
    fixed = given.shape[0]
    if fixed is None:
        return
    reported = f"input {given.name!r} takes batches of {fixed} samples"
    if fixed != micro_batch:
        raise UserError(
            f"{reported}, not {micro_batch}", fix=f"set the micro-batch to {fixed}, or export a free batch axis"
        )
    if smaller_batch:
        raise UserError(f"{reported}, but the last one is smaller", where="data.last_batch", fix="set it to pad")


def _check_bound(dataset: Samples, given: BatchInput, feed: Feed, limits: Limits) -> None:
    bound, are_classes = limits.bounds.get(given.name), given.name in limits.classes
    if (bound is None and not are_classes) or given.name in limits.sequences:
        return
    ignored = limits.ignore_index if given.role == "label" else None
    found = first_outside(dataset, feed.source, (0, math.inf if bound is None else bound - 1), ignored)
    if found is None:
        return
    reported, where = f"sample {found[0]} of column {feed.source.column!r} holds {found[1]}", str(dataset.path)
    if not are_classes:
        raise UserError(
            f"{reported}, but input {given.name!r} takes 0 to {bound - 1 if bound else 0}",
            where=where,
            fix="convert the data with the model's vocabulary",
        )
    labels = "numbers of classes from 0 on" if bound is None else f"numbers of {bound} classes, 0 to {bound - 1}"
    exempt = f", or {ignored} where there is none" if ignored is not None else ""
    raise UserError(
        f"{reported}, but {given.name!r} are {labels}{exempt}",
        where=where,
        fix="number the classes of the data from 0 on, or train a model with more classes",
    )


def _check_truths(dataset: Samples, given: BatchInput, feed: Feed, limits: Limits) -> None:
    """Floating-point targets of a binary cross-entropy: outside 0 to 1, the loss has no minimum."""
    if given.name not in limits.truths or dataset.columns[feed.source.column].dtype.kind != "f":
        return
    found = first_outside(dataset, feed.source, (-ROUNDING, 1 + ROUNDING))
    if found is not None:
        raise UserError(
            f"sample {found[0]} of column {feed.source.column!r} holds {found[1]}, but {given.name!r} are "
            "probabilities, 0 to 1",
            where=str(dataset.path),
            fix=_OTHER_LOSS,
        )


def _check_sequences(
    dataset: Samples, given: BatchInput, feed: Feed, columns: Mapping[str, str], limits: Limits
) -> None:
    """Sequences of classes: a blank among them has no place of its own."""
    sequences = limits.sequences.get(given.name)
    if sequences is None:
        return
    source = sequences.lengths and columns.get(sequences.lengths, sequences.lengths)
    lengths = parse_reference(source, f"columns.{sequences.lengths}") if source else None
    counts = dataset.columns.get(lengths.column) if lengths is not None else None
    if lengths is not None and (counts is None or counts.shape or counts.variable):
        return  # reported for that input
    classes = limits.bounds.get(given.name)
    found = first_wrong_label(dataset, feed.source, lengths, sequences, classes)
    if found is None:
        return
    labels = "classes from 0 on" if classes is None else f"classes 0 to {classes - 1}"
    raise UserError(
        f"sample {found[0]} of column {feed.source.column!r} holds {found[1]}, but {given.name!r} are {labels} "
        f"without the blank, {sequences.blank}",
        where=str(dataset.path),
        fix="number the classes so that none is the blank, or set model.loss.blank"
        + ("" if lengths else "; pad shorter sequences with a number below 0, or give model.loss.target_lengths"),
    )


def _check_counts(dataset: Samples, given: BatchInput, feed: Feed, limits: Limits) -> None:
    """Targets of a Poisson loss: below 0, the loss has no minimum."""
    if given.name not in limits.counts:
        return
    found = first_outside(dataset, feed.source, (0, math.inf))
    if found is not None:
        raise UserError(
            f"sample {found[0]} of column {feed.source.column!r} holds {found[1]}, but {given.name!r} are "
            "counts or rates, at least 0",
            where=str(dataset.path),
            fix=_OTHER_LOSS,
        )
