"""Opens a set of samples by what it is stored as: one entry of `FORMATS` each, the first that matches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ortflow.workflow.data.dataset import Dataset
from ortflow.workflow.data.locations import places_of
from ortflow.workflow.data.samples import Samples
from ortflow.workflow.data.schema import Ragged
from ortflow.workflow.data.selected import selected
from ortflow.workflow.data.sources import audio, image_folder, numpy_files, tar_shards, text_files, token_files
from ortflow.workflow.data.sources.audio import Audio
from ortflow.workflow.data.sources.damaged import readable
from ortflow.workflow.data.sources.images import Images
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
    open: Callable[[DataSet, Sequence[Path]], Samples]
    """The samples of a section whose files and folders are given. Raises UserError, naming the file."""
    takes: tuple[str, ...] = ()
    """Keys of `PREPARATIONS` that such a set can have."""


def _arrow(section: DataSet, places: Sequence[Path]) -> Samples:
    return Dataset.open(section.title, places)


def _table(section: DataSet, places: Sequence[Path]) -> Samples:
    from ortflow.workflow.data.tables.open import open_samples_of_table

    return open_samples_of_table(section)


TABLE = "a table"
FOLDER = "a folder of images"
SOUNDS = "audio files"
FORMATS: tuple[Format, ...] = (
    Format("NumPy", numpy_files.matches, numpy_files.open_numpy, ("tokens",)),
    Format("tokens", token_files.matches, token_files.open_tokens, ("tokens",)),
    Format("tar shards", tar_shards.matches, tar_shards.open_shards, ("images",)),
    Format(FOLDER, image_folder.matches, image_folder.open_folder, ("images",)),
    Format(SOUNDS, audio.matches, audio.open_audio, ("audio",)),
    Format(TABLE, is_table, _table, ("text",)),
    Format("text", text_files.matches, text_files.open_text, ("text",)),
    Format("Arrow IPC", lambda path: True, _arrow),
)
"""The last one takes what no other does."""


PREPARATIONS = ("tokens", "images", "audio", "text")
"""Keys of a set that say how files of certain formats become samples."""


def section_of(path: Path, **keys: Any) -> DataSet:
    """The section of a path that no run file has. Raises UserError for a name that is not UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError("has a name that is not UTF-8", where=str(path), fix="rename it") from None
    return DataSet(path=str(path), **keys)


def open_samples(section: DataSet) -> Samples:
    """The samples of a `data.train` or `data.eval` section.

    Raises UserError, naming the file, if they cannot be read.
    """
    places = places_of(section)
    form = _format_at(places)
    for key in PREPARATIONS:
        if getattr(section, key) is not None and key not in form.takes:
            raise UserError(
                f"is read as {form.name}, which has no {key}",
                where=section.title,
                fix=f"correct the path, or remove {key}",
            )
    samples = form.open(section, places)
    return readable(samples, section.bad_rows) if section.bad_rows and isinstance(samples, (Images, Audio)) else samples


def is_images(path: Path) -> bool:
    """Whether a path holds images."""
    return "images" in _format_of(section_of(path)).takes


def preparation_of(path: Path) -> dict[str, Any]:
    """The key that a set cannot be opened without, from the set itself: the rate of audio files."""
    places = places_of(section_of(path))
    return {"audio": audio.guessed(places)} if _format_at(places).name == SOUNDS else {}


def is_fitted(section: DataSet) -> bool:
    """Whether other sets are read with classes or means of this one."""
    return _format_of(section).name in (FOLDER, SOUNDS) or _is_rows(section)


def is_of_table(section: DataSet) -> bool:
    """Whether a set is a table."""
    return _format_of(section).name == TABLE


def _format_of(section: DataSet) -> Format:
    return _format_at(places_of(section))


def _format_at(places: Sequence[Path]) -> Format:
    """The format of files and folders. Raises UserError if they have several."""
    first = _format(places[0])
    for place in places[1:]:
        if (other := _format(place)) != first:
            message = f"is read as {other.name}, but {places[0]} as {first.name}"
            raise UserError(message, where=str(place), fix="give files of one format")
    return first


def _format(place: Path) -> Format:
    return next(form for form in FORMATS if form.matches(place))


def _is_rows(section: DataSet) -> bool:
    """Whether samples are rows of a table, not windows over their text."""
    windows = section.text is not None and section.text.length is not None
    return not windows and _format_of(section).name == TABLE


def open_training(data: DataSection, seed: int) -> Samples:
    """The training set, without the samples that are held out from it. Raises UserError, naming the file."""
    return _part(data, seed, evaluating=False)


def open_evaluation(data: DataSection, seed: int) -> Samples | None:
    """The evaluation set; None if there is none. Raises UserError, naming the file."""
    return None if data.eval is None else _part(data, seed, evaluating=True)


def open_other(section: DataSet, data: DataSection, seed: int, key_path: str) -> Samples:
    """Another set, read as the training set is: a table has its classes, means and deviations.

    Raises UserError, naming the file.
    """
    if _is_rows(data.train) and _is_rows(section):
        from ortflow.workflow.data.tables.open import open_other_table

        return open_other_table(section, data, seed, key_path)
    return open_samples(section)


def _part(data: DataSection, seed: int, *, evaluating: bool) -> Samples:
    section = data.eval if evaluating and data.eval is not None else data.train
    if _is_rows(data.train) and _is_rows(section):
        from ortflow.workflow.data.tables.open import open_part_of_table

        return open_part_of_table(data, seed, evaluating=evaluating)
    samples = open_samples(section)
    if data.eval is None or data.eval.fraction is None:
        return samples
    mask = held_out(len(samples), data.eval, seed, _values(samples, data.eval))
    rows = np.flatnonzero(mask == evaluating)
    return samples.selected(rows) if isinstance(samples, (Images, Audio)) else selected(samples, rows)


def _values(samples: Samples, section: HeldOut) -> Values | None:
    """The values of the column that decides what is held out."""
    by = column_of(section)
    if by is None:
        return None
    key, name = by
    column = samples.columns.get(name)
    if column is None or column.variable or column.shape:
        fault = "has no column" if column is None else "has more than one number in each sample of"
        raise UserError(f"{samples.path} {fault} {name!r}", where=f"data.eval.{key}", fix="name another column")
    numbers = np.concatenate([part for _, part in samples.scan(name) if not isinstance(part, Ragged)])
    names, codes = np.unique(numbers, return_inverse=True)
    return Values(codes.astype(np.int64), [str(value) for value in names.tolist()])
