"""Identifies the producer of an ONNX file from its metadata, without reading the graph and without onnx.

Called before a model file is replaced, to distinguish files that ortflow has written from others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from ortflow.workflow.errors import UserError

PRODUCER = "ortflow"
"""Producer of an exported model."""
PARAMETERS = "ortflow.parameters"
"""Metadata key of a model that was exported for training."""

# Fields of onnx.proto: ModelProto, and its OperatorSetIdProto and StringStringEntryProto.
_IR_VERSION, _PRODUCER, _OPSET, _METADATA = 1, 2, 8, 14
_NUMBER, _BYTES = 0, 2
_LONGEST = 1 << 24
"""Longest field that is kept, in bytes; the graph is skipped."""


@dataclass
class Head:
    """The metadata of a file."""

    ir_version: int = 0
    producer: str = ""
    opsets: dict[str, int] = field(default_factory=dict)
    metadata: set[str] = field(default_factory=set)
    """The metadata's keys."""


def check_export(path: Path) -> None:
    """Raise UserError if a run's export would replace anything but an earlier export."""
    if os.path.lexists(path) and not is_exported(path):
        raise _refusal(path, "a model that ortflow has exported from a run", "export.path")


def check_model_to_train(path: Path) -> None:
    """Raise UserError if `export_for_training` would replace anything but an earlier model of its own."""
    data = path.with_name(f"{path.name}.data")
    if os.path.lexists(path) and not is_model_to_train(path):
        raise _refusal(path, "a model that export_for_training has written")
    if os.path.lexists(data) and not (path.exists() and data.is_file() and not data.is_symlink()):
        raise _refusal(data, "the weights of a model that export_for_training has written")


def _refusal(path: Path, noun: str, key_path: str | None = None) -> UserError:
    return UserError(
        f"{path} exists and is not {noun}, so it is not replaced",
        where=key_path,
        fix="choose another path, or remove it",
    )


def is_exported(path: Path) -> bool:
    """Whether ortflow has exported this model from a run. The first versions wrote no producer."""
    head = read_head(path)
    if head is None:
        return False
    unnamed = not head.producer and head.ir_version == 10 and head.opsets == {"": 18, "com.microsoft": 1}
    return head.producer == PRODUCER or unnamed


def is_model_to_train(path: Path) -> bool:
    """Whether `export_for_training` has written this model."""
    head = read_head(path)
    return head is not None and PARAMETERS in head.metadata and not is_exported(path)


def read_head(path: Path) -> Head | None:
    """Return the metadata of an ONNX file; None if the file is not ONNX, a link, or unreadable."""
    head = Head()
    if path.is_symlink() or not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            for number, value in _fields(file):
                if number == _IR_VERSION and isinstance(value, int):
                    head.ir_version = value
                elif number == _PRODUCER and isinstance(value, bytes):
                    head.producer = value.decode()
                elif number == _OPSET and isinstance(value, bytes):
                    entry = dict(_inner(value))
                    head.opsets[_text(entry.get(1, b""))] = _integer(entry.get(2, 0))
                elif number == _METADATA and isinstance(value, bytes):
                    head.metadata.add(_text(dict(_inner(value)).get(1, b"")))
    except (OSError, TypeError, ValueError, EOFError):
        return None
    return head


def _fields(file: BinaryIO) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a message's fields. Raises EOFError or ValueError if it is truncated or invalid."""
    size = file.seek(0, 2)
    file.seek(0)
    while file.tell() < size:
        tag = _varint(file)
        if not tag >> 3:
            raise ValueError(tag)
        if tag & 7 == _NUMBER:
            yield tag >> 3, _varint(file)
        elif tag & 7 == _BYTES:
            length = _varint(file)
            if length > size - file.tell():
                raise EOFError
            if length > _LONGEST or tag >> 3 not in (1, 2, _OPSET, _METADATA):
                file.seek(length, 1)
            else:
                yield tag >> 3, file.read(length)
        else:
            raise ValueError(tag)


def _inner(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    return _fields(BytesIO(data))


def _varint(file: BinaryIO) -> int:
    value = 0
    # 64 bits are ten groups of seven at most.
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            raise EOFError
        value |= (byte[0] & 0x7F) << shift
        if not byte[0] & 0x80:
            return value
    raise TypeError(value)


def _text(value: int | bytes) -> str:
    if not isinstance(value, bytes):
        raise TypeError(value)
    return value.decode()


def _integer(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise TypeError(value)
    return value
