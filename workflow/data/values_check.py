"""Checks that the values of a set are ones that the model and its loss can take. Called by `check`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ortflow.workflow.data.feed import Feed
from ortflow.workflow.data.inputs import BatchInput, Limits
from ortflow.workflow.data.samples import Samples
from ortflow.workflow.data.scan import first_outside, has_finite
from ortflow.workflow.data.schema import Range
from ortflow.workflow.data.sequences import first_wrong_label
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.mapping import parse_reference

ROUNDING = 1e-6
"""By how much a probability may lie outside 0 to 1: averages in single precision do."""


def check_values(
    dataset: Samples, batch_input: BatchInput, feed: Feed, columns: Mapping[str, str], limits: Limits
) -> None:
    """Raise UserError for the first value of an input that is beyond the model's vocabulary, classes or loss."""
    name = batch_input.name
    _check_bound(dataset, batch_input, feed, limits)
    if not has_finite(dataset, feed.source):
        raise UserError(
            f"column {feed.source.column!r} holds nothing but NaN and infinity, and no loss of it is a number",
            where=str(dataset.path),
            fix="correct the data, or map another column",
        )
    # Outside of these ranges, a binary cross-entropy and the Poisson loss have no minimum.
    if name in limits.truths and dataset.columns[feed.source.column].dtype.kind == "f":
        _check_targets(dataset, name, feed, (-ROUNDING, 1 + ROUNDING), "probabilities, 0 to 1")
    if name in limits.counts:
        _check_targets(dataset, name, feed, (0, math.inf), "counts or rates, at least 0")
    if name in limits.signs:
        _check_targets(dataset, name, feed, (0, 1), "0 or 1", whole=True)
    _check_sequences(dataset, batch_input, feed, columns, limits)


def _subject(feed: Feed, outlier: tuple[int, float]) -> str:
    return f"sample {outlier[0]} of column {feed.source.column!r} holds {outlier[1]}"


def _check_bound(dataset: Samples, batch_input: BatchInput, feed: Feed, limits: Limits) -> None:
    bound, are_classes = limits.bounds.get(batch_input.name), batch_input.name in limits.classes
    if (bound is None and not are_classes) or batch_input.name in limits.sequences:
        return
    ignored = limits.ignore_index if batch_input.role == "label" else None
    outlier = first_outside(dataset, feed.source, (0, math.inf if bound is None else bound - 1), ignored)
    if outlier is None:
        return
    subject, location = _subject(feed, outlier), str(dataset.path)
    if not are_classes:
        raise UserError(
            f"{subject}, but input {batch_input.name!r} takes 0 to {bound - 1 if bound else 0}",
            where=location,
            fix="convert the data with the model's vocabulary",
        )
    labels = "numbers of classes from 0 on" if bound is None else f"numbers of {bound} classes, 0 to {bound - 1}"
    exempt = f", or {ignored} where there is none" if ignored is not None else ""
    raise UserError(
        f"{subject}, but {batch_input.name!r} are {labels}{exempt}",
        where=location,
        fix="number the classes of the data from 0 on, or train a model with more classes",
    )


def _check_targets(dataset: Samples, name: str, feed: Feed, span: Range, targets: str, *, whole: bool = False) -> None:
    outlier = first_outside(dataset, feed.source, span, whole=whole)
    if outlier is not None:
        raise UserError(
            f"{_subject(feed, outlier)}, but {name!r} are {targets}",
            where=str(dataset.path),
            fix="convert the data so that they are, or use another model.loss.kind: mse takes any number",
        )


def _check_sequences(
    dataset: Samples, batch_input: BatchInput, feed: Feed, columns: Mapping[str, str], limits: Limits
) -> None:
    """Sequences of classes: a blank among them has no place of its own."""
    sequences = limits.sequences.get(batch_input.name)
    if sequences is None:
        return
    source = sequences.lengths and columns.get(sequences.lengths, sequences.lengths)
    lengths = parse_reference(source, f"columns.{sequences.lengths}") if source else None
    counts = dataset.columns.get(lengths.column) if lengths is not None else None
    if lengths is not None and (counts is None or counts.shape or counts.variable):
        return  # reported for that input
    classes = limits.bounds.get(batch_input.name)
    outlier = first_wrong_label(dataset, feed.source, lengths, sequences, classes)
    if outlier is None:
        return
    labels = "classes from 0 on" if classes is None else f"classes 0 to {classes - 1}"
    raise UserError(
        f"{_subject(feed, outlier)}, but {batch_input.name!r} are {labels} without the blank, {sequences.blank}",
        where=str(dataset.path),
        fix="number the classes so that none is the blank, or set model.loss.blank"
        + ("" if lengths else "; pad shorter sequences with a number below 0, or give model.loss.target_lengths"),
    )
