"""Arrays of .npz and .npy files, read in parts: memory holds a few record batches, not the file.

Called by the conversions. Files are untrusted: nothing is unpickled, and the header is compared with the size of the
file before data is read.
"""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from ortflow.workflow.data.schema import Array
from ortflow.workflow.data.source_formats import way_to_a_set
from ortflow.workflow.data.write import BATCH_BYTES, check_storable
from ortflow.workflow.errors import UserError
from ortflow.workflow.system.files import open_regular

_HEADERS = {
    # numpy writes 3.0 only where names of fields are not Latin-1: arrays of plain numbers have 1.0 or 2.0.
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class _StoredArray:
    """One .npy stream: its header, then its rows in order."""

    def __init__(self, stream: IO[bytes], size: int, name: str, location: str) -> None:
        self.name, self._location, self._stream = name, location, stream
        version = np.lib.format.read_magic(stream)
        if version not in _HEADERS:
            raise UserError(
                f"array {name!r} has named fields", where=location, fix="save each field as a separate array"
            )
        self.shape, by_columns, self.dtype = _HEADERS[version](stream)
        check_storable(name, self.dtype, self.shape, location)
        self.row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        if self.row_bytes * self.shape[0] > size - stream.tell():
            raise UserError(f"array {name!r} is truncated", where=location, fix="save it again")
        # In column-major order the first row is complete only with the last byte: read everything and copy.
        self._rows = iter(self._by_columns()) if by_columns and len(self.shape) > 1 else None

    def _by_columns(self) -> Array:
        flat = np.frombuffer(self._stream.read(self.row_bytes * self.shape[0]), self.dtype)
        return np.ascontiguousarray(flat.reshape(self.shape, order="F"))

    def read(self, count: int) -> Array:
        """The next `count` samples."""
        if self._rows is not None:
            return np.stack([next(self._rows) for _ in range(count)])
        data = self._stream.read(count * self.row_bytes)
        if len(data) < count * self.row_bytes:
            raise UserError(f"array {self.name!r} is truncated", where=self._location, fix="save it again")
        return np.frombuffer(data, self.dtype).reshape(count, *self.shape[1:])


class ArrayFiles:
    """Samples of several .npz files in sequence, or of .npy files in parallel.

    Each array of an .npz file and each .npy file is a column of that name; `column` renames that of a single .npy file.
    """

    def __init__(self, files: Sequence[Path], column: str | None = None) -> None:
        """Read all headers. Raises UserError, naming the file, for data that cannot become columns."""
        _check_kinds(files)
        archives = files[0].suffix == ".npz"
        if column is not None and (archives or len(files) > 1):
            raise UserError("--column names the column of one .npy file", fix="leave it out: arrays keep their names")
        self._groups = [[file] for file in files] if archives else [list(files)]
        self._column = column
        self.count = 0
        kinds: list[dict[str, tuple[Any, ...]]] = []
        for group in self._groups:
            with self._open(group) as arrays:
                location = ", ".join(map(str, group))
                lengths = {array.name: array.shape[0] for array in arrays}
                if len(lengths) < len(arrays) or not arrays:
                    raise UserError("contains no array, or two of the same name", where=location, fix="save it again")
                if len(set(lengths.values())) > 1:
                    counts = ", ".join(f"{name} has {length}" for name, length in lengths.items())
                    raise UserError(f"arrays differ in their number of samples: {counts}", where=location)
                kinds.append({array.name: (array.dtype, array.shape[1:]) for array in arrays})
                if kinds[-1] != kinds[0]:
                    raise UserError(f"its arrays differ from those of {files[0]}", where=location)
                self.count += arrays[0].shape[0]

    def chunks(self) -> Iterator[dict[str, Array]]:
        """All samples in order, as {column: array}, one record batch at a time."""
        for group in self._groups:
            with self._open(group) as arrays:
                count = arrays[0].shape[0]
                rows = max(1, BATCH_BYTES // max(1, sum(array.row_bytes for array in arrays)))
                for start in range(0, count, rows):
                    yield {array.name: array.read(min(rows, count - start)) for array in arrays}

    @contextmanager
    def _open(self, group: Sequence[Path]) -> Iterator[list[_StoredArray]]:
        with ExitStack() as stack, _readable(group):
            arrays = []
            for file in group:
                if file.suffix == ".npz":
                    packed = stack.enter_context(os.fdopen(open_regular(file), "rb"))
                    archive = stack.enter_context(zipfile.ZipFile(packed))
                    for member in archive.infolist():
                        stream = stack.enter_context(archive.open(member))
                        name = member.filename.removesuffix(".npy")
                        arrays.append(_StoredArray(stream, member.file_size, name, str(file)))
                else:
                    plain = stack.enter_context(os.fdopen(open_regular(file), "rb"))
                    name = self._column or file.stem
                    arrays.append(_StoredArray(plain, file.stat().st_size, name, str(file)))
            yield arrays


def _check_kinds(files: Sequence[Path]) -> None:
    for file in files:
        if file.suffix not in (".npz", ".npy"):
            raise UserError("is neither .npz nor .npy", where=str(file), fix=way_to_a_set(file))
    if len({file.suffix for file in files}) > 1:
        raise UserError("the sources are both .npz and .npy", fix="convert them separately")


@contextmanager
def _readable(files: Sequence[Path]) -> Iterator[None]:
    """Convert exceptions of zip and numpy readers to one sentence."""
    try:
        yield
    # zipfile raises RuntimeError for encrypted members, NotImplementedError for compression that it does not know.
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        location = ", ".join(map(str, files))
        reason = str(error).partition("\n")[0]
        raise UserError(f"cannot be read ({reason})", where=location, fix="save it again with numpy") from None
