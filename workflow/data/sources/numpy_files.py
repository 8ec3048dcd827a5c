"""`.npz` and `.npy` files as sets of samples, mapped where they are.

Members of an `.npz` that `numpy.savez` wrote are stored as they are, and mapped. Those of `numpy.savez_compressed` are
decoded into memory, up to `LARGEST_DECODED` bytes. Files are untrusted: nothing is unpickled.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

import numpy as np

from ortflow.workflow.data.mapped_arrays import MappedArrays
from ortflow.workflow.data.schema import Array
from ortflow.workflow.data.sources.folders import files_of, holds
from ortflow.workflow.data.sources.token_files import TokenArray, token_windows
from ortflow.workflow.data.write import check_storable
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.data import DataSet
from ortflow.workflow.system.files import open_regular

LARGEST_DECODED = 1 << 30
"""Bytes of compressed arrays that a rank holds in memory."""

_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Of a member of a zip file: signature, then the lengths of its name and of its extra field."""
_HEADERS = {
    # numpy writes 3.0 only where names of fields are not Latin-1: arrays of plain numbers have 1.0 or 2.0.
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def matches(path: Path) -> bool:
    """Whether it is such a file, or a folder of them."""
    return path.suffix.lower() in (".npy", ".npz") or holds(path, ".npy", ".npz")


def open_numpy(section: DataSet, places: Sequence[Path]) -> MappedArrays | TokenArray:
    """The samples of `.npz` files in sequence, or of `.npy` files, a column each, whose name is the file's.

    Several folders of `.npy` files are in sequence.

    Raises UserError, naming the file.
    """
    path = Path(section.title)
    files = files_of(places, ".npy", ".npz")
    if len({file.suffix.lower() for file in files}) > 1:
        raise UserError("holds .npz and .npy files", where=str(path), fix="give one kind")
    if files[0].suffix.lower() == ".npz":
        parts = [_checked(_archive(file), str(file)) for file in files]
        for file, part in zip(files, parts, strict=True):
            if _kinds(part) != _kinds(parts[0]):
                raise UserError(f"its arrays differ from those of {files[0].name}", where=str(file))
        return MappedArrays(path, parts)
    if section.tokens is not None:
        return token_windows(path, [_mapped(file) for file in files], section.tokens)
    return MappedArrays(path, _in_sequence(places))


def _in_sequence(places: Sequence[Path]) -> list[dict[str, Array]]:
    """The columns of the files together, and of each folder."""
    folders = [place for place in places if place.is_dir()]
    if folders and len(folders) < len(places):
        odd = next(place for place in places if not place.is_dir())
        raise UserError("is a file among folders", where=str(odd), fix="give files, or folders")
    groups = [files_of([folder], ".npy") for folder in folders] or [list(places)]
    parts: list[dict[str, Array]] = []
    for number, group in enumerate(groups):
        location = str(folders[number] if folders else group[0])
        stems = [file.stem for file in group]
        twice = next((file for file in group if stems.count(file.stem) > 1), None)
        if twice is not None:
            fix = "rename one, or put the files of each part into a folder of its own"
            raise UserError(f"is a second array {twice.stem!r}", where=str(twice), fix=fix)
        parts.append(_checked({file.stem: _mapped(file) for file in group}, location))
        if _kinds(parts[-1]) != _kinds(parts[0]):
            raise UserError(f"its arrays differ from those of {folders[0].name}", where=location)
    return parts


def _kinds(part: dict[str, Array]) -> dict[str, object]:
    return {name: (array.dtype, array.shape[1:]) for name, array in part.items()}


def _checked(part: dict[str, Array], location: str) -> dict[str, Array]:
    """The arrays as columns: of one length, of numbers in the machine's byte order, and booleans as uint8."""
    if not part:
        raise UserError("contains no array", where=location, fix="save it again")
    for name, array in part.items():
        check_storable(name, array.dtype, array.shape, location)
    if len({len(array) for array in part.values()}) > 1:
        counts = ", ".join(f"{name} has {len(array)}" for name, array in part.items())
        raise UserError(f"arrays differ in their number of samples: {counts}", where=location)
    return {name: _native(array, name, location) for name, array in part.items()}


def _native(array: Array, name: str, location: str) -> Array:
    if array.dtype.kind == "b":
        return array.view(np.uint8)
    if not array.dtype.isnative:
        raise UserError(
            f"array {name!r} is {array.dtype.str}, of the other byte order", where=location,
            fix=f"save it as {array.dtype.newbyteorder('=').name}",
        )  # fmt: skip
    return array


def _mapped(file: Path) -> Array:
    with _readable(file), os.fdopen(open_regular(file), "rb") as stream:
        return _map_at(stream, file, file.stem, os.fstat(stream.fileno()).st_size)


def _archive(file: Path) -> dict[str, Array]:
    part: dict[str, Array] = {}
    decoded = 0
    with _readable(file), os.fdopen(open_regular(file), "rb") as stream, zipfile.ZipFile(stream) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name in part:
                raise UserError(f"holds two arrays {name!r}", where=str(file), fix="save it again")
            # Bit 0 marks an encrypted member, which may be stored as well.
            if member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1:
                # savez writes a ZIP64 field into the local header, and none into the archive's directory: the
                # extra fields of the two differ in length.
                stream.seek(member.header_offset)
                signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
                if signature != b"PK\x03\x04":
                    raise ValueError("a member's header is damaged")
                stream.seek(name_bytes + extra_bytes, os.SEEK_CUR)
                part[name] = _map_at(stream, file, name, stream.tell() + member.file_size)
                continue
            decoded += member.file_size
            if decoded > LARGEST_DECODED:
                raise UserError(
                    f"its compressed arrays take more than {LARGEST_DECODED >> 30} GiB of memory in each rank",
                    where=str(file),
                    fix=f"save it with numpy.savez, or `ortflow data convert {file.name} --output {file.stem}.arrow`",
                )
            with archive.open(member) as unpacked:
                part[name] = np.lib.format.read_array(unpacked, allow_pickle=False)
    return part


def _map_at(stream: IO[bytes], file: Path, name: str, end: int) -> Array:
    """The array whose `.npy` header begins at the stream's position, and which ends at byte `end` or before."""
    version = np.lib.format.read_magic(stream)
    if version not in _HEADERS:
        raise UserError(f"array {name!r} has named fields", where=str(file), fix="save each field as a separate array")
    shape, by_columns, dtype = _HEADERS[version](stream)
    check_storable(name, dtype, shape, str(file))
    if math.prod(shape) * dtype.itemsize > min(end, os.fstat(stream.fileno()).st_size) - stream.tell():
        raise UserError(f"array {name!r} is truncated", where=str(file), fix="save it again")
    # mmap refuses a length of 0.
    if not math.prod(shape):
        return np.empty(shape, dtype)
    order: Literal["C", "F"] = "F" if by_columns else "C"
    # As a plain array: a slice of a memmap takes ten times as long (numpy 2.4: 7 us).
    mapped: Array = np.memmap(file, dtype, "r", stream.tell(), shape, order).view(np.ndarray)
    return mapped


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Convert exceptions of zip and numpy readers to one sentence."""
    try:
        yield
    except FileNotFoundError:
        raise UserError("no such file", where=str(file), fix="correct the path") from None
    except (
        OSError,
        ValueError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
        NotImplementedError,
        RuntimeError,
        struct.error,
    ) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"cannot be read ({reason})", where=str(file), fix="save it again with numpy") from None
