"""Reads a file of `torch.save` without PyTorch, and without running any code that it names.

Such a file is a zip archive: `data.pkl` describes the objects, and `data/KEY` has the bytes of a storage. The unpickler
here knows the few functions that rebuild tensors, and refuses every other name, so that a file cannot run code.
"""

from __future__ import annotations

import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from ortflow.workflow.errors import UserError
from ortflow.workflow.weights.file import Stored
from ortflow.workflow.weights.table import STORED, Array

STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL", "ComplexFloatStorage": "C64",
}  # fmt: skip
"""PyTorch's classes of storages, and safetensors' names of their elements."""
INSIDE = ("state_dict", "model_state_dict", "model")
"""Keys under which training programs save a module's state_dict beside other things."""
LONGEST_PICKLE = 1 << 28


@dataclass(frozen=True)
class _Storage:
    dtype: str
    key: str
    count: int


class _Refused(Exception):
    """The file names something that is not part of a tensor."""


def read_pickled(path: Path) -> Mapping[str, Stored]:
    """The tensors of a state_dict. Raises UserError if the file has none or names other code, OSError."""
    try:
        with zipfile.ZipFile(path) as archive:
            folder = next((n for n in archive.namelist() if n.endswith("/data.pkl")), "").removesuffix("data.pkl")
            if not folder:
                raise _not_readable(path, "it has no data.pkl", "save a state_dict with torch.save")
            if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
                raise _not_readable(path, "it was saved on a big-endian machine", "save it again on another machine")
            if archive.getinfo(f"{folder}data.pkl").file_size > LONGEST_PICKLE:
                raise _not_readable(path, "its data.pkl is too large", "save the state_dict alone")
            with archive.open(f"{folder}data.pkl") as file:
                value = _Unpickler(file, path, folder).load()
    except _Refused as error:
        raise _not_readable(
            path, f"it names {error}, which is not part of a tensor and is not run", "save module.state_dict() alone"
        ) from None
    except zipfile.BadZipFile:
        raise _not_readable(
            path, "it is not a zip archive, as torch.save writes since 1.6", "load it with PyTorch and save it again"
        ) from None
    except (pickle.UnpicklingError, EOFError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise _not_readable(path, f"{type(error).__name__}: {error}", "save it again") from None
    return _state_dict(value, path)


def _state_dict(value: Any, path: Path) -> Mapping[str, Stored]:
    holders = [value] if isinstance(value, Mapping) else []
    holders += [value[key] for key in INSIDE if holders and isinstance(value.get(key), Mapping)]
    for holder in holders:
        tensors = {name: entry for name, entry in holder.items() if isinstance(name, str) and isinstance(entry, Stored)}
        if tensors:
            return tensors
    raise _not_readable(path, "it has no state_dict", "save module.state_dict() with torch.save")


def _not_readable(path: Path, reason: str, fix: str) -> UserError:
    return UserError(f"the weights cannot be read: {reason}", where=str(path), fix=fix)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], path: Path, folder: str) -> None:
        super().__init__(file)
        self._path, self._folder = path, folder

    def find_class(self, module: str, name: str) -> Any:
        """Only what rebuilds tensors; every other name is refused."""
        rebuilders: Mapping[tuple[str, str], Callable[..., Any]] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch", "Size"): tuple,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_parameter"): _first,
            ("torch._tensor", "_rebuild_from_type_v2"): _rebuilt,
        }
        if (module, name) in rebuilders:
            return rebuilders[module, name]
        if module in ("torch", "torch.storage") and name in STORAGES:
            return _kind(name)
        raise _Refused(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        """The storage that a tensor refers to."""
        kind, storage, key, _, count = pid
        if kind != "storage" or not isinstance(storage, _Kind):
            raise _Refused(str(kind))
        return _Storage(STORAGES[storage.name], str(key), int(count))

    def _tensor(self, storage: _Storage, offset: int, shape: Any, strides: Any, *_: Any) -> Stored:
        sizes, steps = tuple(int(n) for n in shape), tuple(int(n) for n in strides)
        last = offset + sum((n - 1) * step for n, step in zip(sizes, steps, strict=True))
        if math.prod(sizes) and (min((offset, *steps)) < 0 or last >= storage.count):
            raise ValueError("a tensor lies outside its storage")
        return Stored(storage.dtype, sizes, lambda: self._read(storage, offset, sizes, steps))

    def _read(self, storage: _Storage, offset: int, sizes: tuple[int, ...], steps: tuple[int, ...]) -> Array:
        item = np.dtype(STORED[storage.dtype])
        if not math.prod(sizes):
            return np.empty(sizes, item)
        try:
            with zipfile.ZipFile(self._path) as archive:
                entry = archive.getinfo(f"{self._folder}data/{storage.key}")
                if entry.file_size != storage.count * item.itemsize:
                    raise ValueError("a storage has another size than its tensors")
                data = archive.read(entry)
        except (KeyError, ValueError, zipfile.BadZipFile) as error:
            raise _not_readable(self._path, str(error), "save it again") from None
        flat = np.frombuffer(data, item)[offset:]
        return np.lib.stride_tricks.as_strided(flat, sizes, [step * item.itemsize for step in steps], writeable=False)


@dataclass(frozen=True)
class _Kind:
    name: str


def _kind(name: str) -> Any:
    return _Kind(name)


def _first(tensor: Any, *_: Any) -> Any:
    """A parameter is its tensor."""
    return tensor


def _rebuilt(function: Callable[..., Any], _: Any, arguments: tuple[Any, ...], *__: Any) -> Any:
    """A tensor with attributes, which are dropped."""
    return function(*arguments)
