"""Lengths of the samples of a training set, which some graphs depend on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ortflow.workflow.spec.mapping import ColumnReference, parse_reference

if TYPE_CHECKING:
    from ortflow.workflow.data.samples import Samples


def longest_sequence(dataset: Samples) -> int:
    """Length of the longest column with a single axis; 0 if there is none of fixed length."""
    return max((column.shape[0] for column in dataset.columns.values() if len(column.shape) == 1), default=0)


def lengths_of(dataset: Samples, columns: Mapping[str, str]) -> dict[str, int]:
    """Input -> length of its samples, where all have one axis of that length; `columns` as in the run file."""
    references = {name: ColumnReference(name) for name in dataset.columns}
    references |= {name: parse_reference(text, f"data.train.columns.{name}") for name, text in columns.items()}
    lengths = {}
    for name, reference in references.items():
        column = dataset.columns.get(reference.column)
        if column is not None and len(column.shape) == 1 and not column.variable:
            lengths[name] = len(range(column.shape[0])[reference.slice])
    return lengths
