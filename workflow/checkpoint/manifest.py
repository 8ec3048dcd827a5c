"""What a checkpoint says about itself: layout, progress, and size and hash of every file.

Written by `commit`, read by `verify`. Pure: bytes in, bytes out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ortflow.workflow.checkpoint.tensors import BufferSpec
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.layout import FlatIndex

FORMAT = "ortflow-checkpoint"
VERSION = 1


class Damaged(OrtflowError):
    """A checkpoint is torn or corrupt: `path` is the file or folder at fault, `reason` says how."""

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
    """A checkpoint's description; `progress` is the trainer's own and opaque here."""

    step: int
    world_size: int
    buffers: Mapping[str, BufferSpec]
    index: FlatIndex
    progress: Mapping[str, Any]
    files: tuple[FileRecord, ...]
    time: float

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
            "index": self.index.to_json(),
        }
        text = _dump(body)
        return f'{text[:-1]},"hash":"{digest(text.encode())}"}}'.encode()


def decode(data: bytes) -> Manifest:
    """The manifest in `data`; ValueError with the reason if it is not exactly what `encode` wrote."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise ValueError("is not a checkpoint's manifest")
    stated = body.pop("hash", None)
    text = _dump(body)
    if data != f'{text[:-1]},"hash":"{stated}"}}'.encode() or stated != digest(text.encode()):
        raise ValueError("does not agree with its own hash")
    if body.get("version") != VERSION:
        raise ValueError(f"has format version {body.get('version')}, this ortflow reads {VERSION}")
    try:
        return Manifest(
            step=body["step"],
            world_size=body["world_size"],
            buffers={name: BufferSpec(**spec) for name, spec in body["buffers"].items()},
            index=FlatIndex.from_json(body["index"]),
            progress=body["progress"],
            files=tuple(FileRecord(**file) for file in body["files"]),
            time=body["time"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"lacks something: {error}") from None


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
