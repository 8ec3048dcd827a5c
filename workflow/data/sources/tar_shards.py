"""Tar files in the layout of WebDataset: `key.jpg` with `key.cls` or `key.json` beside it, read by their offsets.

Finding the members means reading every header once. The index is kept in the user's cache, by the content of the
shard's ends, so that the ranks and later runs read it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ortflow.workflow.data.remote import version_of
from ortflow.workflow.data.sources.folders import files_of, holds
from ortflow.workflow.data.sources.images import LABEL, Images
from ortflow.workflow.data.sources.pictures import ENDS
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import write_atomically
from ortflow.workflow.spec.data import DataSet
from ortflow.workflow.system.cache_folders import cache_folders
from ortflow.workflow.system.files import open_regular

VERSION = 2
_ENDS_BYTES = 1 << 16
"""Bytes at each end of a shard that its index is found by, beside its size and time."""


@dataclass(frozen=True)
class Index:
    """The samples of a shard."""

    keys: list[str]
    places: np.ndarray[Any, np.dtype[np.int64]]
    """Offset and size of each image, [samples, 2]."""
    numbers: dict[str, np.ndarray[Any, Any]]

    def encoded(self) -> bytes:
        """The index as the bytes of a file."""
        buffer = io.BytesIO()
        keys = np.frombuffer(json.dumps(self.keys).encode(), np.uint8)
        arrays: dict[str, Any] = {f"number {name}": array for name, array in self.numbers.items()}
        np.savez(buffer, keys=keys, places=self.places, **arrays)
        data = buffer.getvalue()
        return xxhash.xxh3_128_digest(data) + data

    @classmethod
    def decoded(cls, data: bytes) -> Index:
        """The inverse of `encoded`. Raises ValueError if the bytes are damaged."""
        if xxhash.xxh3_128_digest(data[16:]) != data[:16]:
            raise ValueError("does not match its hash")
        with np.load(io.BytesIO(data[16:]), allow_pickle=False) as arrays:
            numbers = {
                name.removeprefix("number "): arrays[name] for name in arrays.files if name.startswith("number ")
            }
            return cls(json.loads(arrays["keys"].tobytes()), arrays["places"], numbers)


class TarBlobs:
    """Images in shards, each read at its offset."""

    def __init__(self, files: list[Path], indices: list[Index]) -> None:
        self._files, self._keys = files, [index.keys for index in indices]
        self._places = np.concatenate([index.places for index in indices])
        self._starts = np.cumsum([0, *(len(index.keys) for index in indices)], dtype=np.int64)
        self._open: dict[int, int] = {}
        hashing = xxhash.xxh3_128(json.dumps(self._keys).encode())
        hashing.update(self._places.data)
        for file in files:
            hashing.update(version_of(file).encode())
        self.identity = hashing.hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        # A descriptor is a number of this process: a worker opens its own.
        return {**self.__dict__, "_open": {}}

    def __del__(self) -> None:
        for descriptor in self.__dict__.get("_open", {}).values():
            os.close(descriptor)

    def name(self, number: int) -> str:
        """Shard and key of an image."""
        shard, row = self._located(number)
        return f"{self._files[shard]}:{self._keys[shard][row]}"

    def read(self, number: int) -> bytes:
        """Bytes of an image. Raises UserError."""
        shard, _ = self._located(number)
        offset, size = self._places[number].tolist()
        try:
            if shard not in self._open:
                self._open[shard] = open_regular(self._files[shard])
            data = _bytes_at(self._open[shard], offset, size)
        except OSError as error:
            raise UserError(error.strerror or str(error), where=self.name(number), fix="restore it") from None
        if len(data) < size:
            raise UserError("is truncated", where=self.name(number), fix="copy the shard again")
        return data

    def _located(self, number: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._starts, number, side="right")) - 1
        return shard, number - int(self._starts[shard])


def matches(path: Path) -> bool:
    """Whether it is a tar file, or a folder of them."""
    return path.suffix.lower() == ".tar" or holds(path, ".tar")


def open_shards(section: DataSet, places: Sequence[Path]) -> Images:
    """The images of shards, and of those of folders in the order of their names. Raises UserError."""
    path = Path(section.title)
    files = files_of(places, ".tar")
    indices = [index_of(file) for file in files]
    kinds = {name: array.dtype for name, array in indices[0].numbers.items()}
    for file, index in zip(files, indices, strict=True):
        if {name: array.dtype for name, array in index.numbers.items()} != kinds:
            message = (
                f"its samples have {_listed(index.numbers)}, those of {files[0].name} {_listed(indices[0].numbers)}"
            )
            raise UserError(message, where=str(file), fix="give shards of one set")
    numbers = {name: np.concatenate([index.numbers[name] for index in indices]) for name in kinds}
    return Images(path, TarBlobs(files, indices), numbers, section.images, [len(index.keys) for index in indices])


def index_of(file: Path) -> Index:
    """The index of a shard, from the cache or by reading it. Raises UserError, naming the shard."""
    try:
        with os.fdopen(open_regular(file), "rb") as stream:
            cached = _cached(file, stream)
            if cached is not None and cached.exists():
                try:
                    return Index.decoded(cached.read_bytes())
                except (ValueError, OSError, KeyError):
                    pass  # it is built again
            index = _read(file, stream)
    except tarfile.TarError as error:
        raise UserError(
            f"is not a tar file, or is damaged ({error})", where=str(file), fix="write it without compression"
        ) from None
    except OSError as error:
        raise UserError(error.strerror or str(error), where=str(file), fix="give a tar file") from None
    if cached is not None:
        with contextlib.suppress(OSError):  # without a cache, every rank reads the headers
            write_atomically(cached, index.encoded())
    return index


def _cached(file: Path, stream: io.BufferedReader) -> Path | None:
    status = os.fstat(stream.fileno())
    hashing = xxhash.xxh3_128(f"{VERSION} {status.st_size} {status.st_mtime_ns}".encode())
    for place in (0, max(0, status.st_size - _ENDS_BYTES)):
        hashing.update(_bytes_at(stream.fileno(), place, _ENDS_BYTES))
    folder = next(cache_folders("shards"), None)
    return None if folder is None else folder / f"{hashing.hexdigest()}.index"


def _read(file: Path, stream: io.BufferedReader) -> Index:
    keys: list[str] = []
    places: list[tuple[int, int]] = []
    rows: list[dict[str, int | float]] = []
    for key, members in _samples(file, stream):
        images = [end for end in members if end in ENDS]
        if len(images) != 1:
            raise UserError(f"sample {key!r} has {len(images)} images", where=str(file), fix="give each sample one")
        keys.append(key)
        places.append(members[images[0]])
        rows.append(_numbers(file, key, stream, members))
        if rows[-1].keys() != rows[0].keys():
            message = f"sample {key!r} has {_listed(rows[-1])}, sample {keys[0]!r} {_listed(rows[0])}"
            raise UserError(message, where=str(file), fix="give all samples the same fields")
    if not keys:
        raise UserError("holds no sample", where=str(file))
    numbers = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    numbers = {
        name: array.astype(np.float32) if array.dtype.kind == "f" else array.astype(np.int64)
        for name, array in numbers.items()
    }
    return Index(keys, np.array(places, np.int64), numbers)


def _samples(file: Path, stream: io.BufferedReader) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """Key, and {end of the name: (offset, size)}, of each sample: of neighbours with one name up to its first dot."""
    present: dict[str, tuple[int, int]] = {}
    current, earlier_keys = "", set()
    # Not `r`, which also reads compressed files, and gives offsets in what they contain.
    with tarfile.open(fileobj=stream, mode="r:") as archive:
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # it would keep them all
            if member.isdir():
                continue
            folder, _, base = member.name.rpartition("/")
            stem, dot, end = base.partition(".")
            key = f"{folder}/{stem}" if folder else stem
            if not stem or not dot:
                continue
            if not member.isfile() or member.issparse():
                # The bytes at its place are not those of the file.
                kind = "a sparse file" if member.issparse() else "a link" if member.linkname else "no file"
                raise UserError(
                    f"{member.name} is {kind}",
                    where=str(file),
                    fix="write the files themselves: tar -h --hard-dereference",
                )
            if key != current:
                if present:
                    yield current, present
                if key in earlier_keys:
                    raise UserError(f"sample {key!r} is not in one piece", where=str(file), fix="sort its members")
                earlier_keys.add(key)
                current, present = key, {}
            if f".{end.lower()}" in present:
                raise UserError(f"{member.name} is in it twice", where=str(file), fix="remove one")
            present[f".{end.lower()}"] = (member.offset_data, member.size)
        # tarfile takes a shard for whole that was cut between two members.
        if _bytes_at(stream.fileno(), archive.offset, tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise UserError("is truncated: its end is missing", where=str(file), fix="copy the shard again")
    if present:
        yield current, present


def _numbers(
    file: Path, key: str, stream: io.BufferedReader, members: Mapping[str, tuple[int, int]]
) -> dict[str, int | float]:
    numbers: dict[str, int | float] = {}
    if ".cls" in members:
        text = _text(stream, members[".cls"])
        if not text.strip().isdecimal():
            raise UserError(
                f"{key}.cls is {text[:20]!r}, not the number of a class",
                where=str(file),
                fix="number the classes from 0",
            )
        numbers[LABEL] = int(text)
    if ".json" in members:
        try:
            fields = json.loads(_text(stream, members[".json"]))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{key}.json cannot be read ({error})", where=str(file), fix="correct it") from None
        for name, value in fields.items() if isinstance(fields, dict) else ():
            if isinstance(value, (int, float)):
                numbers[name] = int(value) if isinstance(value, bool) else value
    for name, value in numbers.items():
        if isinstance(value, int) and value.bit_length() > 63:
            message = f"sample {key!r} has {name} {value}, which exceeds 64 bits"
            raise UserError(message, where=str(file), fix="write it as a string")
    return numbers


def _text(stream: io.BufferedReader, place: tuple[int, int]) -> str:
    return _bytes_at(stream.fileno(), *place).decode(errors="replace")


def _bytes_at(descriptor: int, offset: int, size: int) -> bytes:
    """Fewer than `size` bytes only if the file ends there."""
    data = os.pread(descriptor, size, offset)
    # One call returns at most 2 GiB (read(2)).
    while len(data) < size and (rest := os.pread(descriptor, size - len(data), offset + len(data))):
        data += rest
    return data


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names)) or "no numbers"
