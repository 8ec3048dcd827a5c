"""A set of encoded images with numbers for each: what folders of images and tar shards have in common."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from ortflow.workflow.data.samples import FixedColumns, Indices, Reading
from ortflow.workflow.data.schema import Array, Column
from ortflow.workflow.data.sources.pictures import ChooseBox, Preparation
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.media import ImagesSection

IMAGE = "image"
LABEL = "label"
_SCANNED = 64
"""Images decoded at a time by a scan."""


class Blobs(Protocol):
    """Encoded images by number."""

    def read(self, number: int) -> bytes:
        """The bytes. Raises UserError."""
        ...

    def name(self, number: int) -> str:
        """Its file, for messages."""
        ...

    @property
    def identity(self) -> str:
        """Hash of the names and sizes of all, without their folder."""
        ...


class SelectedBlobs:
    """Some of a set's images."""

    def __init__(self, blobs: Blobs, indices: Indices) -> None:
        self._blobs, self._indices = blobs, indices
        hashing = xxhash.xxh3_128(blobs.identity.encode())
        hashing.update(np.ascontiguousarray(indices).data)
        self.identity = hashing.hexdigest()

    def read(self, number: int) -> bytes:
        """The bytes of an image. Raises UserError."""
        return self._blobs.read(int(self._indices[number]))

    def name(self, number: int) -> str:
        """Its file."""
        return self._blobs.name(int(self._indices[number]))


class JoinedBlobs:
    """The images of several folders, one after the other."""

    def __init__(self, parts: Sequence[Blobs], counts: Sequence[int]) -> None:
        self._parts, self._starts = parts, np.cumsum([0, *counts], dtype=np.int64)
        self.identity = xxhash.xxh3_128_hexdigest("".join(part.identity for part in parts).encode())

    def read(self, number: int) -> bytes:
        """The bytes of an image. Raises UserError."""
        part, place = self._located(number)
        return part.read(place)

    def name(self, number: int) -> str:
        """Its file."""
        part, place = self._located(number)
        return part.name(place)

    def _located(self, number: int) -> tuple[Blobs, int]:
        part = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._parts[part], number - int(self._starts[part])


class Images(FixedColumns):
    """Columns `image`, decoded when it is read, and one integer or number each of `numbers`."""

    has_ranges = True
    decoded = (IMAGE,)
    """Columns whose samples take milliseconds to make."""

    def __init__(
        self,
        path: Path,
        blobs: Blobs,
        numbers: Mapping[str, Array],
        section: ImagesSection | None,
        shard_counts: Sequence[int],
        classes: tuple[str, ...] = (),
        reading: Reading | None = None,
    ) -> None:
        self.reading = reading or Reading()
        self.path, self.blobs, self.numbers, self.classes = path, blobs, dict(numbers), classes
        self.shard_counts = shard_counts
        self.preparation = Preparation.of(section, blobs.read(0), blobs.name(0))
        self._count = sum(shard_counts)
        self.columns = {IMAGE: self.preparation.column}
        for name, array in self.numbers.items():
            span = (
                (float(array.min()), float(array.max()))
                if array.dtype.kind == "f"
                else (int(array.min()), int(array.max()))
            )
            self.columns[name] = Column(array.dtype, ()).with_range(span)

    def __len__(self) -> int:
        return self._count

    @property
    def digest(self) -> str:
        """Hash that identifies the samples without decoding them."""
        hashing = xxhash.xxh3_128(self.blobs.identity.encode())
        # Without defaults: a later version may have more keys.
        section = self.preparation.section.model_dump(exclude_defaults=True)
        hashing.update(json.dumps([self.classes, section, self.preparation.size], sort_keys=True).encode())
        for name, array in sorted(self.numbers.items()):
            hashing.update(f"{name} {array.dtype}\n".encode())
            hashing.update(np.ascontiguousarray(array).data)
        return hashing.hexdigest()

    def decode(self, number: int, choose: ChooseBox | None = None) -> Array:
        """One image; see `Preparation.sample`."""
        return self.preparation.sample(self.blobs.read(number), self.blobs.name(number), choose)

    def check(self, number: int, data: bytes) -> None:
        """Decode an image whose bytes are given. Raises UserError if that is not possible."""
        self.preparation.sample(data, self.blobs.name(number))

    def read(self, name: str, indices: Indices) -> Array:
        """Samples, [len(indices), *shape]."""
        if name != IMAGE:
            numbers: Array = self.numbers[name][indices]
            return numbers
        column = self.columns[IMAGE]
        samples = np.empty((len(indices), *column.shape), column.dtype)
        for place, number in enumerate(indices.tolist()):
            samples[place] = self.decode(number)
        return samples

    def scan(self, name: str) -> Iterator[tuple[int, Array]]:
        """A column in order, in parts."""
        step = _SCANNED if name == IMAGE else max(1, len(self))
        for first in range(0, len(self), step):
            yield first, self.read(name, np.arange(first, min(first + step, len(self))))

    def selected(self, indices: Indices) -> Images:
        """The samples with these numbers, in this order, with the same classes."""
        numbers = {name: array[indices] for name, array in self.numbers.items()}
        blobs = SelectedBlobs(self.blobs, indices)
        section = self.preparation.section
        return Images(self.path, blobs, numbers, section, [len(indices)], self.classes, self.reading)

    def with_classes(self, classes: tuple[str, ...], location: str) -> Images:
        """The set with its labels numbered as in another set. Raises UserError for a class that has no number there."""
        relabelled = renumbered(self.path, self.classes, classes, self.numbers, location)
        if not self.classes or self.classes == classes:
            return self
        section = self.preparation.section
        return Images(self.path, self.blobs, relabelled, section, self.shard_counts, classes, self.reading)


def renumbered(
    path: Path, own_classes: Sequence[str], classes: Sequence[str], numbers: Mapping[str, Array], location: str
) -> dict[str, Array]:
    """The labels of a set with the classes `own_classes`, numbered as in another set with `classes`.

    Raises UserError at `location` for a class that the other set lacks.
    """
    unknown = sorted(set(own_classes) - set(classes))
    if unknown:
        raise UserError(
            f"{path} has the class {unknown[0]!r}, which the training set does not have", where=location,
            fix=f"remove it, or add it to the training set, whose classes are: {', '.join(classes)}",
        )  # fmt: skip
    if not own_classes:
        return dict(numbers)
    table = np.array([classes.index(name) for name in own_classes], np.int64)
    return {**numbers, LABEL: table[numbers[LABEL]]}
