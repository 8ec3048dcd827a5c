"""The layout of a rank's file: safetensors, with the data aligned to a page boundary.

Rank r of W holds elements `share(count, r, W)` of every named flat buffer, each as one tensor with the buffer's name.
The padding of the header allows direct I/O. Pure arithmetic and JSON. Format:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ortflow.workflow.layout import share

PAGE = 4096
"""The data's offset and the length of a direct write are multiples of this many bytes."""

ITEM_SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "U8": 1}
"""Bytes per element, by the format's type names."""


@dataclass(frozen=True)
class BufferSpec:
    """A whole flat buffer: element type by its safetensors name, and number of elements."""

    dtype: str
    count: int


@dataclass(frozen=True)
class Span:
    """A tensor of a file: elements [start, stop) of a buffer at bytes [offset, end) of the file."""

    buffer: str
    start: int
    stop: int
    offset: int
    end: int


@dataclass(frozen=True)
class FileLayout:
    """A rank's file: its header, and its tensors in the order of their offsets."""

    header: bytes
    spans: tuple[Span, ...]
    size: int


def file_name(rank: int) -> str:
    """Name of a rank's file."""
    return f"rank-{rank:04d}.safetensors"


def file_layout(buffers: Mapping[str, BufferSpec], rank: int, world_size: int) -> FileLayout:
    """Layout of this rank's shards in its file. Wide types come first, so that every tensor is aligned."""
    order = sorted(buffers, key=lambda name: (-ITEM_SIZES[buffers[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": {"rank": str(rank), "world_size": str(world_size)}}
    places, offset = [], 0
    for name in order:
        start, stop = share(buffers[name].count, rank, world_size)
        end = offset + (stop - start) * ITEM_SIZES[buffers[name].dtype]
        header[name] = {"dtype": buffers[name].dtype, "shape": [stop - start], "data_offsets": [offset, end]}
        places.append((name, start, stop, offset, end))
        offset = end
    head = header_of(header)
    spans = tuple(
        Span(name, start, stop, len(head) + begin, len(head) + end) for name, start, stop, begin, end in places
    )
    return FileLayout(head, spans, len(head) + offset)


def header_of(tensors: Mapping[str, Any]) -> bytes:
    """The header of a safetensors file, padded so that the data starts on a page boundary."""
    text = json.dumps(tensors, separators=(",", ":")).encode()
    base = -(-(8 + len(text)) // PAGE) * PAGE
    # The format allows spaces behind the JSON.
    return (base - 8).to_bytes(8, "little") + text.ljust(base - 8)
