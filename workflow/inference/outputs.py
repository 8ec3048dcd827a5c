"""Files of a model's outputs, written batch by batch: one row a sample, in the samples' order.

A file appears when it is complete, and replaces nothing.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt

from ortflow.workflow.errors import UserError
from ortflow.workflow.system.own_files import name_start

Array = npt.NDArray[Any]
Rows = Mapping[str, Array]
"""Column -> [samples, ...]."""
MOST_COLUMNS = 4096
"""Columns of a CSV file that the elements of one output may take."""


class Writer(Protocol):
    """A file that is being written."""

    def write(self, rows: Rows) -> None:
        """Append the rows of a batch."""

    def close(self) -> None:
        """Complete the file."""

    def abandon(self) -> None:
        """Close what is open; the file stays incomplete."""


@contextmanager
def writing(path: Path, samples: int) -> Iterator[Writer]:
    """Write a file for so many samples, by the suffix of its name; it is there only if the block succeeds.

    Raises UserError if the suffix is unknown or the file exists.
    """
    kinds: Mapping[str, Callable[[Path, int], Writer]] = {
        ".parquet": _Parquet,
        ".arrow": _Arrow,
        ".csv": _Csv,
        ".npz": _Npz,
    }
    if path.suffix not in kinds:
        suffixes = ", ".join(kinds)
        raise UserError(f"{path.name} has an unknown suffix", where="--output", fix=f"use one of {suffixes}")
    if os.path.lexists(path):
        raise UserError(f"{path} exists, so it is not replaced", where="--output", fix="choose another path")
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{name_start(path.name)}.", dir=path.parent) as folder:
        part = Path(folder) / path.name
        writer = kinds[path.suffix](part, samples)
        try:
            yield writer
            writer.close()
        except BaseException:
            writer.abandon()
            raise
        os.replace(part, path)


class _Tables:
    """Writes Arrow tables with a writer that is opened with the first one's schema."""

    def __init__(self, path: Path, samples: int) -> None:
        self._path = path
        self._writer: Any = None
        self._schema: Any = None

    def open(self, schema: Any) -> Any:
        """The format's writer."""
        raise NotImplementedError

    def write(self, rows: Rows) -> None:
        """See the protocol."""
        import pyarrow as pa

        table = pa.table({name: self.column(array) for name, array in self.prepared(rows).items()})
        if self._writer is None:
            self._writer = self.open(table.schema)
        elif table.schema != self._schema:
            raise _other_shapes(self._path)
        self._schema = table.schema
        self._writer.write_table(table)

    def prepared(self, rows: Rows) -> Rows:
        """The columns of the file."""
        return rows

    def column(self, array: Array) -> Any:
        """An Arrow array of [samples, ...]: lists of fixed size."""
        import pyarrow as pa

        flat = pa.array(np.ascontiguousarray(array).reshape(-1))
        for size in reversed(array.shape[1:]):
            flat = pa.FixedSizeListArray.from_arrays(flat, size)
        return flat

    def close(self) -> None:
        """See the protocol."""
        if self._writer is not None:
            self._writer.close()

    def abandon(self) -> None:
        """See the protocol: Arrow closes its file with the writer."""
        self._writer = None


class _Parquet(_Tables):
    def open(self, schema: Any) -> Any:
        import pyarrow.parquet as pq

        return pq.ParquetWriter(self._path, schema)


class _Arrow(_Tables):
    def open(self, schema: Any) -> Any:
        import pyarrow as pa

        return pa.ipc.new_file(str(self._path), schema)


class _Csv(_Tables):
    def open(self, schema: Any) -> Any:
        import pyarrow.csv

        return pyarrow.csv.CSVWriter(self._path, schema)

    def prepared(self, rows: Rows) -> Rows:
        """One column an element: `logits_0`, `logits_1`, …"""
        columns: dict[str, Array] = {}
        for name, array in rows.items():
            if array.ndim == 1:
                columns[name] = array
                continue
            flat = array.reshape(len(array), -1)
            if flat.shape[1] > MOST_COLUMNS:
                raise UserError(
                    f"{name} has {flat.shape[1]:,} elements a sample, too many for columns of a CSV file",
                    where="--output",
                    fix="write .parquet, .arrow or .npz",
                )
            places = np.ndindex(*array.shape[1:])
            columns |= {f"{name}_{'_'.join(map(str, place))}": flat[:, i] for i, place in enumerate(places)}
        return columns


class _Npz:
    """One `.npy` file an output, joined to an archive at the end: a zip file is written one member after the other."""

    def __init__(self, path: Path, samples: int) -> None:
        self._path, self._samples = path, samples
        self._files: dict[str, IO[bytes]] = {}
        self._kinds: dict[str, tuple[Any, tuple[int, ...]]] = {}

    def write(self, rows: Rows) -> None:
        """See the protocol."""
        for name, array in rows.items():
            kind = (array.dtype, array.shape[1:])
            if name not in self._files:
                self._kinds[name] = kind
                self._files[name] = (self._path.parent / f"{len(self._files)}.npy").open("w+b")
                header = {"descr": array.dtype.str, "fortran_order": False, "shape": (self._samples, *array.shape[1:])}
                np.lib.format.write_array_header_2_0(self._files[name], header)
            elif kind != self._kinds[name]:
                raise _other_shapes(self._path)
            self._files[name].write(np.ascontiguousarray(array).tobytes())

    def close(self) -> None:
        """See the protocol."""
        with zipfile.ZipFile(self._path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, file in self._files.items():
                file.seek(0)
                # The size is not known to zipfile, which otherwise refuses more than 2 GiB.
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    shutil.copyfileobj(file, member, 1 << 20)
                file.close()

    def abandon(self) -> None:
        """See the protocol."""
        for file in self._files.values():
            file.close()


def _other_shapes(path: Path) -> UserError:
    return UserError(
        "the outputs of two batches have other shapes, and a file has one",
        where=str(path.name),
        fix="give samples of one length, or a model whose outputs have it",
    )
