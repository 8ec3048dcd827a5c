"""Opens a set of samples by what it is stored as: one entry of `FORMATS` each, the first that matches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ortflow.workflow.data.dataset import Dataset
from ortflow.workflow.data.samples import Samples
from ortflow.workflow.data.schema import Ragged
from ortflow.workflow.data.selected import selected
from ortflow.workflow.data.split import Values, column_of, held_out
from ortflow.workflow.data.tables.files import is_table
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.data import DataSection, DataSet
from ortflow.workflow.spec.split import HeldOut


@dataclass(frozen=True)
class Format:
    """A way in which samples are stored."""

    name: str
    """The name that people know it by."""
    matches: Callable[[Path], bool]
    """Whether a file or folder is stored so, by its name and its content's names."""
    open: Callable[[DataSet], Samples]
    """The samples of a section. Raises UserError, naming the file."""


def _arrow(section: DataSet) -> Samples:
    return Dataset.open(Path(section.path))


def _table(section: DataSet) -> Samples:
    from ortflow.workflow.data.tables.open import open_samples_of_table

    return open_samples_of_table(section)


FORMATS: tuple[Format, ...] = (
    Format("table", is_table, _table),
    Format("Arrow IPC", lambda path: True, _arrow),
)
"""The last one takes what no other does."""


def open_samples(section: DataSet) -> Samples:
    """The samples of a `data.train` or `data.eval` section.

    Raises UserError, naming the file, if they cannot be read.
    """
    return next(form for form in FORMATS if form.matches(Path(section.path))).open(section)


def open_training(data: DataSection, seed: int) -> Samples:
    """The training set, without the samples that are held out from it. Raises UserError, naming the file."""
    return _part(data, seed, evaluating=False)


def open_evaluation(data: DataSection, seed: int) -> Samples | None:
    """The evaluation set; None if there is none. Raises UserError, naming the file."""
    return None if data.eval is None else _part(data, seed, evaluating=True)


def _part(data: DataSection, seed: int, *, evaluating: bool) -> Samples:
    section = data.eval if evaluating and data.eval is not None else data.train
    if is_table(Path(data.train.path)) and is_table(Path(section.path)):
        from ortflow.workflow.data.tables.open import open_part_of_table

        return open_part_of_table(data, seed, evaluating=evaluating)
    samples = open_samples(section)
    if data.eval is None or data.eval.fraction is None:
        return samples
    mask = held_out(len(samples), data.eval, seed, _values(samples, data.eval))
    return selected(samples, np.flatnonzero(mask == evaluating))


def _values(samples: Samples, section: HeldOut) -> Values | None:
    """The values of the column that decides what is held out."""
    by = column_of(section)
    if by is None:
        return None
    key, name = by
    column = samples.columns.get(name)
    if column is None or column.variable or column.shape:
        reported = "has no column" if column is None else "has more than one number in each sample of"
        raise UserError(f"{samples.path} {reported} {name!r}", where=f"data.eval.{key}", fix="name another column")
    numbers = np.concatenate([part for _, part in samples.scan(name) if not isinstance(part, Ragged)])
    names, codes = np.unique(numbers, return_inverse=True)
    return Values(codes.astype(np.int64), [str(each) for each in names.tolist()])
