"""Folders of files of a kind: `root/class/*.png`, or one folder, perhaps with a table `labels.csv` of classes.

The classes are the sorted names, and the files are in the order of class and name, so that a sample keeps its number on
every machine.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from ortflow.workflow.data.remote import version_of
from ortflow.workflow.data.schema import Array
from ortflow.workflow.data.sources.images import LABEL, Blobs, JoinedBlobs
from ortflow.workflow.errors import UserError
from ortflow.workflow.system.files import open_regular

TABLE = "labels.csv"


@dataclass(frozen=True)
class Kind:
    """A kind of file."""

    name: str
    """With its article, in the singular."""
    plural: str
    ends: tuple[str, ...]
    """Ends of the files' names."""

    def has(self, name: str) -> bool:
        """Whether a file is of this kind, by its name."""
        return name.lower().endswith(self.ends)


class FileBlobs:
    """Files below a folder. Names are one string of bytes: a million of Python's strings take 100 MB in each rank."""

    def __init__(self, root: Path, names: Sequence[str], sizes: Sequence[int]) -> None:
        encoded = [os.fsencode(name) for name in names]
        self._root, self._names = root, b"".join(encoded)
        self._ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        hashing = xxhash.xxh3_128(self._names)
        hashing.update(self._ends.data)
        hashing.update(np.array(sizes, np.int64).data)
        hashing.update(version_of(root).encode())
        self.identity = hashing.hexdigest()

    def name(self, number: int) -> str:
        """Path of a file."""
        return os.path.join(self._root, os.fsdecode(self._names[self._ends[number] : self._ends[number + 1]]))

    def read(self, number: int) -> bytes:
        """Bytes of a file. Raises UserError."""
        path = self.name(number)
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                return file.read()
        except OSError as error:
            raise UserError(error.strerror or str(error), where=path, fix="restore it") from None


@dataclass(frozen=True)
class Files:
    """The files of one set."""

    blobs: Blobs
    counts: Sequence[int]
    """Files of each folder."""
    classes: tuple[str, ...]
    numbers: Mapping[str, Array]
    """The labels; without classes, there is no such column."""


@dataclass(frozen=True)
class _Listing:
    """The files of a folder; without labels, there are no classes."""

    blobs: FileBlobs
    count: int
    classes: Sequence[str]
    labels: Sequence[int]


def matches(path: Path, kind: Kind) -> bool:
    """Whether it is such a file, or a folder with them or with folders of them."""
    if path.is_file():
        return kind.has(path.name)
    if not path.is_dir() or any(path.glob("*.arrow")):
        return False
    if any(kind.has(entry.name) for entry in _entries(path)):
        return True
    return any(kind.has(name) for folder in _folders(path) for name, _ in _files(path, folder))


def files_of_kind(places: Sequence[Path], kind: Kind) -> Files:
    """The files of folders with their labels, if they have any, or single files without labels.

    Raises UserError, naming the file or folder.
    """
    folders = [place for place in places if place.is_dir()]
    if folders and len(folders) < len(places):
        odd = next(place for place in places if not place.is_dir())
        fix = f"give {kind.plural}, or folders of {kind.plural}"
        raise UserError(f"is {kind.name} among folders", where=str(odd), fix=fix)
    real = {Path(os.path.realpath(folder)): folder for folder in folders}
    for inner, folder in real.items():
        if outer := next((real[parent] for parent in inner.parents if parent in real), None):
            raise UserError(f"is in {outer}, which is named, too", where=str(folder), fix="name one of them")
    listings = [_listed(folder, kind) for folder in folders] or [_of_files(places)]
    for folder, listing in zip(folders, listings, strict=False):
        if bool(listing.labels) != bool(listings[0].labels):
            fault = "has classes" if listing.labels else "has no classes"
            raise UserError(f"{fault}, unlike {folders[0]}", where=str(folder), fix="give folders of one kind")
    classes = sorted({name for listing in listings for name in listing.classes})
    number = {name: label for label, name in enumerate(classes)}
    labels = [number[listing.classes[label]] for listing in listings for label in listing.labels]
    counts = [listing.count for listing in listings]
    blobs = listings[0].blobs if len(listings) == 1 else JoinedBlobs([part.blobs for part in listings], counts)
    return Files(blobs, counts, tuple(classes), {LABEL: np.array(labels, np.int64)} if labels else {})


def _of_files(files: Sequence[Path]) -> _Listing:
    root = Path(os.path.commonpath([file.parent for file in files]))
    try:
        sizes = [file.stat().st_size for file in files]
    except OSError as error:
        raise UserError(error.strerror or str(error), where=str(error.filename)) from None
    return _Listing(FileBlobs(root, [os.path.relpath(file, root) for file in files], sizes), len(files), (), ())


def _listed(root: Path, kind: Kind) -> _Listing:
    try:
        if (root / TABLE).is_file():
            classes, names, sizes, labels = _from_table(root, kind)
        elif _folders(root):
            classes, names, sizes, labels = _from_folders(root, kind)
        else:
            classes, labels = [], []
            names, sizes = _unlabelled(root, kind)
    except OSError as error:
        raise UserError(error.strerror or str(error), where=error.filename or str(root)) from None
    except (UnicodeDecodeError, csv.Error) as error:
        location = str(root / TABLE)
        raise UserError(
            f"cannot be read as text in UTF-8 ({error})", where=location, fix="save it as CSV in UTF-8"
        ) from None
    return _Listing(FileBlobs(root, names, sizes), len(names), classes, labels)


def _from_folders(root: Path, kind: Kind) -> tuple[list[str], list[str], list[int], list[int]]:
    stray = next((entry.name for entry in _entries(root) if entry.is_file() and kind.has(entry.name)), None)
    if stray is not None:
        fix = f"move it into the folder of its class, or add {TABLE}"
        raise UserError(f"is {kind.name} without a class", where=str(root / stray), fix=fix)
    classes = _folders(root)
    names: list[str] = []
    sizes: list[int] = []
    labels: list[int] = []
    for label, folder in enumerate(classes):
        files = sorted(_files(root, folder))
        if not files:
            fix = f"remove it or add {kind.plural}"
            raise UserError(f"is a class without {kind.plural}", where=str(root / folder), fix=fix)
        for name, size in files:
            if not kind.has(name):
                raise _other_kind(root / name, kind)
            names.append(name)
            sizes.append(size)
        labels += [label] * len(files)
    return classes, names, sizes, labels


def _other_kind(path: Path, kind: Kind) -> UserError:
    return UserError(f"is not {kind.name}", where=str(path), fix=f"remove it: {', '.join(kind.ends)} are read")


def _unlabelled(root: Path, kind: Kind) -> tuple[list[str], list[int]]:
    """Names and sizes of the files of a folder without classes."""
    files = sorted((entry.name, entry.stat().st_size) for entry in _entries(root) if not entry.name.startswith("."))
    for name, _ in files:
        if not kind.has(name):
            raise _other_kind(root / name, kind)
    return [name for name, _ in files], [size for _, size in files]


def _from_table(root: Path, kind: Kind) -> tuple[list[str], list[str], list[int], list[int]]:
    table = root / TABLE
    # Spreadsheets begin UTF-8 with a byte order mark.
    with open(table, newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file)
        if next(rows, None) != ["file", "label"]:
            raise UserError("does not begin with the line file,label", where=str(table), fix="add it")
        labels: dict[str, str] = {}
        for row in rows:
            location = f"{table}:{rows.line_num}"
            if len(row) != 2 or not all(row):
                raise UserError("is not a file and its label", where=location, fix="write file,label")
            if row[0] in labels:
                raise UserError(f"{row[0]} is named twice", where=location, fix="remove one of the lines")
            labels[row[0]] = row[1]
    present = {entry.name for entry in _entries(root) if entry.is_file() and kind.has(entry.name)}
    for lacking, template in (
        (labels.keys() - present, "names {}, which does not exist"),
        (present - labels.keys(), "lacks {}"),
    ):
        if lacking:
            raise UserError(template.format(min(lacking)), where=str(table), fix="correct the table or the folder")
    if not labels:
        raise UserError(f"names no {kind.name.partition(' ')[2]}", where=str(table))
    classes, names = sorted(set(labels.values())), sorted(labels)
    return (
        classes,
        names,
        [os.stat(root / name).st_size for name in names],
        [classes.index(labels[name]) for name in names],
    )


def _folders(root: Path) -> list[str]:
    return sorted(entry.name for entry in _entries(root) if entry.is_dir() and not entry.name.startswith("."))


def _files(root: Path, folder: str) -> Iterator[tuple[str, int]]:
    """Paths below `root` and sizes of all files in a folder of it and in folders of that; hidden ones are left out."""
    for entry in _entries(root / folder):
        path = f"{folder}/{entry.name}"
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _files(root, path)
        else:
            yield path, entry.stat().st_size


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)
