"""Folders of images: `root/class/*.png`, one folder with a table `labels.csv` of file names and classes, or without.

The classes are the sorted names, and the files are in the order of class and name, so that a sample keeps its number on
every machine.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from ortflow.workflow.data.sources.images import LABEL, Images, JoinedBlobs
from ortflow.workflow.data.sources.pictures import ENDS
from ortflow.workflow.errors import UserError
from ortflow.workflow.files import open_regular
from ortflow.workflow.spec.data import DataSet

TABLE = "labels.csv"


class FileBlobs:
    """Files below a folder. Names are one string of bytes: a million of Python's strings take 100 MB in each rank."""

    def __init__(self, root: Path, names: Sequence[str], sizes: Sequence[int]) -> None:
        encoded = [os.fsencode(name) for name in names]
        self._root, self._names = root, b"".join(encoded)
        self._ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        hashing = xxhash.xxh3_128(self._names)
        hashing.update(self._ends.data)
        hashing.update(np.array(sizes, np.int64).data)
        self.identity = hashing.hexdigest()

    def name(self, number: int) -> str:
        """Path of an image."""
        return os.path.join(self._root, os.fsdecode(self._names[self._ends[number] : self._ends[number + 1]]))

    def read(self, number: int) -> bytes:
        """Bytes of an image. Raises UserError."""
        path = self.name(number)
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                return file.read()
        except OSError as error:
            raise UserError(error.strerror or str(error), where=path, fix="restore it") from None


@dataclass(frozen=True)
class _Listing:
    """The images of a folder; without labels, there are no classes."""

    blobs: FileBlobs
    count: int
    classes: Sequence[str]
    labels: Sequence[int]


def matches(path: Path) -> bool:
    """Whether it is an image, or a folder with images or with folders of images."""
    if path.is_file():
        return _is_image(path.name)
    if not path.is_dir() or any(path.glob("*.arrow")):
        return False
    if any(_is_image(entry.name) for entry in _entries(path)):
        return True
    return any(_is_image(name) for folder in _folders(path) for name, _ in _files(path, folder))


def open_folder(section: DataSet, places: Sequence[Path]) -> Images:
    """The images of folders with their labels, if they have any, or files of images without labels.

    Raises UserError, naming the file or folder.
    """
    folders = [place for place in places if place.is_dir()]
    if folders and len(folders) < len(places):
        odd = next(place for place in places if not place.is_dir())
        raise UserError("is an image among folders", where=str(odd), fix="give images, or folders of images")
    listings = [_listed(folder) for folder in folders] or [_of_files(places)]
    for folder, listing in zip(folders, listings, strict=False):
        if bool(listing.labels) != bool(listings[0].labels):
            reported = "has classes" if listing.labels else "has no classes"
            raise UserError(f"{reported}, unlike {folders[0]}", where=str(folder), fix="give folders of one kind")
    classes = sorted({name for listing in listings for name in listing.classes})
    number = {name: label for label, name in enumerate(classes)}
    labels = [number[listing.classes[label]] for listing in listings for label in listing.labels]
    counts = [listing.count for listing in listings]
    blobs = listings[0].blobs if len(listings) == 1 else JoinedBlobs([each.blobs for each in listings], counts)
    numbers = {LABEL: np.array(labels, np.int64)} if labels else {}
    return Images(Path(section.title), blobs, numbers, section.images, counts, tuple(classes))


def _of_files(files: Sequence[Path]) -> _Listing:
    root = Path(os.path.commonpath([file.parent for file in files]))
    try:
        sizes = [file.stat().st_size for file in files]
    except OSError as error:
        raise UserError(error.strerror or str(error), where=str(error.filename)) from None
    return _Listing(FileBlobs(root, [os.path.relpath(file, root) for file in files], sizes), len(files), (), ())


def _listed(root: Path) -> _Listing:
    try:
        if (root / TABLE).is_file():
            classes, names, sizes, labels = _from_table(root)
        elif _folders(root):
            classes, names, sizes, labels = _from_folders(root)
        else:
            classes, labels = [], []
            names, sizes = _unlabelled(root)
    except OSError as error:
        raise UserError(error.strerror or str(error), where=error.filename or str(root)) from None
    return _Listing(FileBlobs(root, names, sizes), len(names), classes, labels)


def _from_folders(root: Path) -> tuple[list[str], list[str], list[int], list[int]]:
    stray = next((entry.name for entry in _entries(root) if entry.is_file() and _is_image(entry.name)), None)
    if stray is not None:
        fix = f"move it into the folder of its class, or add {TABLE}"
        raise UserError("is an image without a class", where=str(root / stray), fix=fix)
    classes = _folders(root)
    names: list[str] = []
    sizes: list[int] = []
    labels: list[int] = []
    for label, folder in enumerate(classes):
        files = sorted(_files(root, folder))
        if not files:
            raise UserError("is a class without images", where=str(root / folder), fix="remove it or add images")
        for name, size in files:
            if not _is_image(name):
                raise UserError("is not an image", where=str(root / name), fix=f"remove it: {', '.join(ENDS)} are read")
            names.append(name)
            sizes.append(size)
        labels += [label] * len(files)
    return classes, names, sizes, labels


def _unlabelled(root: Path) -> tuple[list[str], list[int]]:
    """Names and sizes of the images of a folder without classes."""
    files = sorted((entry.name, entry.stat().st_size) for entry in _entries(root) if not entry.name.startswith("."))
    for name, _ in files:
        if not _is_image(name):
            raise UserError("is not an image", where=str(root / name), fix=f"remove it: {', '.join(ENDS)} are read")
    return [name for name, _ in files], [size for _, size in files]


def _from_table(root: Path) -> tuple[list[str], list[str], list[int], list[int]]:
    table = root / TABLE
    with open(table, newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        if next(rows, None) != ["file", "label"]:
            raise UserError("does not begin with the line file,label", where=str(table), fix="add it")
        given: dict[str, str] = {}
        for row in rows:
            where = f"{table}:{rows.line_num}"
            if len(row) != 2 or not all(row):
                raise UserError("is not a file and its label", where=where, fix="write file,label")
            if row[0] in given:
                raise UserError(f"{row[0]} is named twice", where=where, fix="remove one of the lines")
            given[row[0]] = row[1]
    present = {entry.name for entry in _entries(root) if entry.is_file() and _is_image(entry.name)}
    for lacking, what in (
        (given.keys() - present, "names {}, which does not exist"),
        (present - given.keys(), "lacks {}"),
    ):
        if lacking:
            raise UserError(what.format(min(lacking)), where=str(table), fix="correct the table or the folder")
    if not given:
        raise UserError("names no image", where=str(table))
    classes, names = sorted(set(given.values())), sorted(given)
    return (
        classes,
        names,
        [os.stat(root / name).st_size for name in names],
        [classes.index(given[name]) for name in names],
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


def _is_image(name: str) -> bool:
    return name.lower().endswith(ENDS)
