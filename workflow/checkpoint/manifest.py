"""The description of a checkpoint: layout, progress, and size and hash of every file.

Written by `commit`, read by `verify`. Pure: bytes in, bytes out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from ortflow.workflow.checkpoint.tensors import ITEM_SIZES, BufferSpec
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.layout import GROUPS, FlatIndex

FORMAT = "ortflow-checkpoint"
VERSION = 1

_Fits = Callable[[Any], bool]


class Damaged(OrtflowError):
    """A checkpoint is incomplete or corrupt: `path` is the damaged file or folder."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path}: {reason}")


@dataclass(frozen=True)
class FileRecord:
    """A rank's file: its name in the folder, bytes, and the hash of them all."""

    name: str
    size: int
    hash: str


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's description; `progress` is what `ortflow.workflow.run.progress` makes of it."""

    step: int
    world_size: int
    buffers: Mapping[str, BufferSpec]
    index: FlatIndex
    progress: Mapping[str, Any]
    files: tuple[FileRecord, ...]
    time: float
    environment: Mapping[str, str] = field(default_factory=dict)
    """The environment, see `ortflow.workflow.run.recorded_environment`. Empty for checkpoints of earlier versions."""
    run: Mapping[str, str] = field(default_factory=dict)
    """The run that saved it, see `identity`. Empty for checkpoints of earlier versions."""

    @property
    def size(self) -> int:
        """Bytes of all rank files."""
        return sum(file.size for file in self.files)

    def encode(self) -> bytes:
        """JSON with a hash of itself (the text without that field) at its end."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "time": self.time,
            "world_size": self.world_size,
            "buffers": {name: vars(spec) for name, spec in self.buffers.items()},
            "files": [vars(file) for file in self.files],
            "progress": dict(self.progress),
            "environment": dict(self.environment),
            **({"run": dict(self.run)} if self.run else {}),
            "index": self.index.to_json(),
        }
        return seal(body)


def seal(body: dict[str, Any]) -> bytes:
    """A manifest's JSON, with a hash of itself (the text without that field) at its end."""
    text = _dump(body)
    return f'{text[:-1]},"hash":"{digest(text.encode())}"}}'.encode()


def format_of(data: bytes) -> str | None:
    """The format that a manifest names; None if it is none."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return str(body.get("format")) if isinstance(body, dict) else None


def unseal(data: bytes, name: str, version: int) -> dict[str, Any]:
    """The content of a manifest of a format; ValueError with the reason if it is not exactly what `seal` wrote."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    if not isinstance(body, dict) or body.get("format") != name:
        raise ValueError("is not a checkpoint's manifest")
    stated = body.pop("hash", None)
    text = _dump(body)
    if data != f'{text[:-1]},"hash":"{stated}"}}'.encode() or stated != digest(text.encode()):
        raise ValueError("does not match its hash")
    if body.get("version") != version:
        raise ValueError(f"has format version {body.get('version')}, this ortflow reads {version}")
    return body


def decode(data: bytes) -> Manifest:
    """The manifest in `data`; ValueError with the reason if it is not exactly what `encode` wrote."""
    body = unseal(data, FORMAT, VERSION)
    _check_types(body)
    return Manifest(
        step=body["step"],
        world_size=body["world_size"],
        buffers={name: BufferSpec(**spec) for name, spec in body["buffers"].items()},
        index=FlatIndex.from_json(body["index"]),
        progress=body["progress"],
        files=tuple(FileRecord(**file) for file in body["files"]),
        time=body["time"],
        environment=body.get("environment", {}),
        run=body.get("run", {}),
    )


def _check_types(body: dict[str, Any]) -> None:
    """Every key that `encode` writes is there and of its type: a right hash proves only that nothing changed since.

    `verify` checks that the values are consistent. Raises ValueError with the key.
    """
    for key, fits in _BODY.items():
        _check(key, body, fits)
    check_record(body)
    for name, spec in body["buffers"].items():
        _check_fields(f"buffers.{name}", spec, _BUFFER)
    for key, shape in (("files", _FILE), ("index", _ENTRY)):
        for place, row in enumerate(body[key]):
            _check_fields(f"{key}.{place}", row, shape)


def check_record(body: dict[str, Any]) -> None:
    """The environment and the run of a manifest are texts. Raises ValueError with the key."""
    for key in ("environment", "run"):
        if key in body:
            _check(key, body, _is_record)


def _check_fields(prefix: str, record: object, shape: Mapping[str, _Fits]) -> None:
    if not isinstance(record, dict) or record.keys() != shape.keys():
        raise ValueError(f"lacks keys: expected {', '.join(shape)} in {prefix}")
    for key, fits in shape.items():
        _check(key, record, fits, f"{prefix}.")


def _check(key: str, record: dict[str, Any], fits: _Fits, prefix: str = "") -> None:
    if key not in record:
        raise ValueError(f"lacks {prefix}{key}")
    if not fits(record[key]):
        raise ValueError(f"has {_short(record[key])} for {prefix}{key}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def is_count(value: object) -> bool:
    """Whether a value is a number of bytes or items."""
    # For isinstance, True is an int.
    return type(value) is int and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_record(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(map(is_count, value))


_BODY: Mapping[str, _Fits] = {
    "step": is_count,
    "world_size": is_count,
    "time": lambda value: type(value) in (int, float),
    "buffers": lambda value: isinstance(value, dict),
    "files": lambda value: isinstance(value, list),
    "index": lambda value: isinstance(value, list),
    "progress": lambda value: isinstance(value, dict),
}
_BUFFER: Mapping[str, _Fits] = {"dtype": lambda value: _is_text(value) and value in ITEM_SIZES, "count": is_count}
_FILE: Mapping[str, _Fits] = {"name": _is_text, "size": is_count, "hash": _is_text}
_ENTRY: Mapping[str, _Fits] = {
    "name": _is_text,
    "shape": _is_shape,
    "group": lambda value: value in GROUPS,
    "offset": is_count,
}


def digest(data: bytes) -> str:
    """Hash of some bytes, as it stands in manifests and markers."""
    return finished(xxhash.xxh3_128(data))


def finished(state: xxhash.xxh3_128) -> str:
    """A running hash as text."""
    return f"xxh3_128:{state.hexdigest()}"


def mark(manifest: bytes) -> bytes:
    """Contents of the COMMITTED marker."""
    return f"{digest(manifest)}\n".encode()


def _dump(body: dict[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"))
