"""Audio files as a set: column `audio`, decoded when it is read, and the number of the class, if there are classes.

Lengths are those of the headers, so that batches can be planned without decoding.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from ortflow.workflow.data.samples import Indices, Reading, part_of
from ortflow.workflow.data.schema import Array, Column, Ragged
from ortflow.workflow.data.sources import class_folders
from ortflow.workflow.data.sources.class_folders import Kind, files_of_kind
from ortflow.workflow.data.sources.images import Blobs, SelectedBlobs, renumbered
from ortflow.workflow.data.sources.sound_files import ENDS, decode, header_of
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import write_atomically
from ortflow.workflow.spec.data import DataSet
from ortflow.workflow.spec.media import AudioSection
from ortflow.workflow.system.cache_folders import cache_folders

AUDIO = "audio"
KIND = Kind("an audio file", "audio files", ENDS)
_SCANNED = 64


def matches(path: Path) -> bool:
    """Whether it is an audio file, or a folder with audio files or with folders of them."""
    return class_folders.matches(path, KIND)


def guessed(places: Sequence[Path]) -> AudioSection:
    """How files are read of which nothing is stated: at the rate of the first, as one channel."""
    return AudioSection(rate=header_of(files_of_kind(places, KIND).blobs.name(0)).rate, mono=True)


def open_audio(section: DataSet, places: Sequence[Path]) -> Audio:
    """The files with their labels, if they have any.

    Raises UserError for the first that is damaged or has another rate, unless the section skips some.
    """
    samples = unchecked(section, places)
    odd = np.flatnonzero(samples.headers.table[:, 0] != samples.section.rate)
    if len(odd) and not section.bad_rows:
        raise _misfit(samples.headers, int(odd[0]), samples.section, samples.blobs)
    return samples


def unchecked(section: DataSet, places: Sequence[Path]) -> Audio:
    """The files, with those that are damaged or have another rate. Raises UserError for other faults."""
    files = files_of_kind(places, KIND)
    if section.audio is None:
        rate = header_of(files.blobs.name(0)).rate
        message = f"has audio files, and their rate is not given; the first has {rate} samples a second"
        raise UserError(message, where=section.title, fix=f"add audio: {{rate: {rate}}} to the set")
    headers = _headers(files.blobs, sum(files.counts))
    return Audio(Path(section.title), files.blobs, headers, files.numbers, section.audio, files.counts, files.classes)


@dataclass(frozen=True)
class Headers:
    """What the files say of themselves."""

    table: npt.NDArray[np.int64]
    """Rate, channels and length of each file, [files, 3]; zeros if it is damaged."""
    faults: Mapping[int, UserError]
    """What is wrong with those that are damaged."""

    def selected(self, indices: Indices) -> Headers:
        """Those of some files."""
        places = {number: place for place, number in enumerate(indices.tolist())}
        faults = {places[number]: fault for number, fault in self.faults.items() if number in places}
        return Headers(self.table[indices], faults)


class Audio:
    """The samples. A file that is damaged has the length 0 until it is left out."""

    has_ranges = False
    decoded = (AUDIO,)
    """Columns whose samples take milliseconds to make."""

    def __init__(
        self,
        path: Path,
        blobs: Blobs,
        headers: Headers,
        numbers: Mapping[str, Array],
        section: AudioSection,
        shard_counts: Sequence[int],
        classes: tuple[str, ...] = (),
        reading: Reading | None = None,
    ) -> None:
        self.path, self.blobs, self.headers, self.numbers, self.section = path, blobs, headers, dict(numbers), section
        self.shard_counts, self.classes, self.reading = shard_counts, classes, reading or Reading()
        self._lengths = headers.table[:, 2]
        good = np.flatnonzero(headers.table[:, 0] == section.rate)
        shape: tuple[int, ...] = ()
        if not section.mono and (headers.table[good, 1] > 1).any():
            shapes = headers.table[good, 1:]
            other = np.flatnonzero((shapes != shapes[0]).any(axis=1))
            if len(other):
                described = [f"{channels} channels of {length} samples" for channels, length in shapes[[0, other[0]]]]
                fix = "set audio.mono, or give files of one length and number of channels"
                message = f"has {described[1]}, and the first file {described[0]}"
                raise UserError(message, where=blobs.name(int(good[other[0]])), fix=fix)
            shape = (int(shapes[0, 0]), int(shapes[0, 1]))
        self.columns = {AUDIO: Column(np.dtype(np.float32), shape, not shape)}
        for name, array in self.numbers.items():
            self.columns[name] = Column(array.dtype, ()).with_range((int(array.min()), int(array.max())))

    def __len__(self) -> int:
        return len(self.headers.table)

    @property
    def digest(self) -> str:
        """Hash that identifies the samples without decoding them."""
        section = self.section.model_dump(exclude_defaults=True)
        hashing = xxhash.xxh3_128(self.blobs.identity.encode())
        hashing.update(json.dumps([self.classes, section], sort_keys=True).encode())
        hashing.update(np.ascontiguousarray(self._lengths).data)
        for name, array in sorted(self.numbers.items()):
            hashing.update(name.encode() + np.ascontiguousarray(array).tobytes())
        return hashing.hexdigest()

    def check(self, number: int, data: bytes) -> None:
        """Decode a file whose bytes are given. Raises UserError if that is not possible."""
        if self.headers.table[number, 0] != self.section.rate:
            raise _misfit(self.headers, number, self.section, self.blobs)
        self._decode(number, data)

    def _decode(self, number: int, data: bytes) -> Array:
        name = self.blobs.name(number)
        header, samples = decode(data, name)
        # The header may be one that was kept before the file changed.
        if [header.rate, *samples.shape] != self.headers.table[number].tolist():
            message = f"has {len(samples)} channels of {samples.shape[1]} samples, and its header had other numbers"
            raise UserError(message, where=name, fix="restore or replace it")
        # In double precision, then rounded once: the order of a sum does not matter.
        mixed: Array = samples.mean(axis=0, dtype=np.float64).astype(np.float32) if len(samples) > 1 else samples[0]
        return samples if self.columns[AUDIO].shape else mixed

    def read(self, name: str, indices: Indices) -> Array:
        """Samples of a fixed-size column, [len(indices), *shape]."""
        if name != AUDIO:
            numbers: Array = self.numbers[name][indices]
            return numbers
        samples = np.empty((len(indices), *self.columns[AUDIO].shape), np.float32)
        for place, number in enumerate(indices.tolist()):
            samples[place] = self._decode(number, self.blobs.read(number))
        return samples

    def read_ragged(self, name: str, indices: Indices) -> list[Array]:
        """The sound of files with one channel, one array each."""
        return [self._decode(number, self.blobs.read(number)) for number in indices.tolist()]

    def lengths(self, name: str) -> Indices:
        """Number of samples of every file."""
        return self._lengths

    def scan(self, name: str) -> Iterator[tuple[int, Array | Ragged]]:
        """A column in order, in parts."""
        at_once = _SCANNED if name == AUDIO else max(1, len(self))
        for first in range(0, len(self), at_once):
            yield first, part_of(self, name, np.arange(first, min(first + at_once, len(self))))

    def selected(self, indices: Indices) -> Audio:
        """The samples with these numbers, in this order, with the same classes."""
        numbers = {name: array[indices] for name, array in self.numbers.items()}
        blobs, headers = SelectedBlobs(self.blobs, indices), self.headers.selected(indices)
        return Audio(self.path, blobs, headers, numbers, self.section, [len(indices)], self.classes, self.reading)

    def with_classes(self, classes: tuple[str, ...], location: str) -> Audio:
        """The set with its labels numbered as in another set. Raises UserError for a class that has no number there."""
        labels = renumbered(self.path, self.classes, classes, self.numbers, location)
        parts = self.path, self.blobs, self.headers
        return Audio(*parts, labels, self.section, self.shard_counts, classes or self.classes, self.reading)


def _misfit(headers: Headers, number: int, section: AudioSection, blobs: Blobs) -> UserError:
    if number in headers.faults:
        return headers.faults[number]
    message = f"has {headers.table[number, 0]} samples a second, not {section.rate}"
    fix = f"convert it, as `ffmpeg -i FILE -ar {section.rate} FILE2` does"
    return UserError(message, where=blobs.name(number), fix=fix)


def _headers(blobs: Blobs, count: int) -> Headers:
    """The headers of all files, from the cache by their names and sizes."""
    folder = next(cache_folders("audio"), None)
    record = folder / f"{blobs.identity}.npy" if folder is not None else None
    if record is not None:
        with contextlib.suppress(OSError, ValueError):
            cached_table = np.load(record, allow_pickle=False)
            if cached_table.shape == (count, 3) and cached_table.dtype == np.int64:
                return Headers(cached_table, {})
    headers, faults = np.zeros((count, 3), np.int64), {}
    for number in range(count):
        try:
            header = header_of(blobs.name(number))
            headers[number] = header.rate, header.channels, header.length
        except UserError as error:
            if isinstance(error.__context__, OSError):  # no damage: another attempt may read it
                raise
            faults[number] = error
    if record is not None and not faults:
        with contextlib.suppress(OSError):  # without a record, each process reads the headers
            write_atomically(record, _encoded(headers))
    return Headers(headers, faults)


def _encoded(array: Array) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()
