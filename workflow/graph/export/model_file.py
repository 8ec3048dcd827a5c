"""Writes a model file tensor by tensor, so that memory never holds a second copy of its weights.

Called by `inference`. protobuf's own serialisation needs the whole message, and its bytes, in memory.
Wire format: https://protobuf.dev/programming-guides/encoding; field numbers: onnx.proto.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import onnx
import xxhash
from onnx import TensorProto

Shapes = Mapping[str, tuple[int, ...]]
Tensors = Mapping[str, np.ndarray]
# ModelProto.graph, GraphProto.initializer, TensorProto.raw_data.
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9
_PAGE = 4096
ITEM = 4
"""Bytes per element: weights are fp32."""


@dataclass(frozen=True)
class Written:
    """A model file, and where its weights lie."""

    path: Path
    data: Path
    """The file with the weights: the model file itself, or the one beside it."""
    offsets: Mapping[str, int]
    """Weight -> its first byte in `data`."""


def write_model(path: Path, model: onnx.ModelProto, shapes: Shapes, tensors: Tensors) -> dict[str, int]:
    """Write `model` with further initializers: the fp32 tensors that `shapes` names, each read once.

    Returns the place of each tensor's elements in the file. Raises OSError.
    """
    graph = model.graph.SerializeToString(deterministic=True)
    heads = {name: _head(name, shape) for name, shape in shapes.items()}
    sizes = {name: len(heads[name]) + ITEM * math.prod(shape) for name, shape in shapes.items()}
    length = len(graph) + sum(len(_field(_INITIALIZER, size)) + size for size in sizes.values())
    rest = onnx.ModelProto()
    rest.CopyFrom(model)
    rest.ClearField("graph")
    offsets: dict[str, int] = {}
    with path.open("wb") as file:
        file.write(rest.SerializeToString(deterministic=True))
        file.write(_field(_GRAPH, length))
        file.write(graph)
        for name in shapes:
            file.write(_field(_INITIALIZER, sizes[name]))
            file.write(heads[name])
            offsets[name] = file.tell()
            write_array(file, tensors[name])
        _finish(file)
    return offsets


def write_data(folder: Path, stem: str, shapes: Shapes, tensors: Tensors) -> tuple[str, dict[str, int]]:
    """Write tensors to one data file.

    Returns the file's name, `<stem>-<hash>.data`, and the place of each tensor's elements in it. Raises OSError.
    """
    digest, offset = xxhash.xxh3_64(), 0
    offsets: dict[str, int] = {}
    partial = folder / f"{stem}.data"
    with partial.open("wb") as file:
        for name in shapes:
            # Aligned to pages, so that a reader can map each tensor.
            offset = -(-offset // _PAGE) * _PAGE
            file.seek(offset)
            digest.update(write_array(file, tensors[name]))
            offsets[name] = offset
            offset += ITEM * math.prod(shapes[name])
        _finish(file)
    final = f"{stem}-{digest.hexdigest()}.data"
    os.replace(partial, folder / final)
    return final, offsets


def refer(graph: onnx.GraphProto, shapes: Shapes, location: str, offsets: Mapping[str, int]) -> None:
    """Add initializers to a graph whose elements lie in the file `location` of the model's folder."""
    for name, shape in shapes.items():
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
        tensor.data_location = TensorProto.EXTERNAL
        described = {"location": location, "offset": offsets[name], "length": ITEM * math.prod(shape)}
        for key, value in described.items():
            tensor.external_data.add(key=key, value=str(value))
        graph.initializer.append(tensor)


def _head(name: str, shape: tuple[int, ...]) -> bytes:
    """The serialised tensor up to its elements."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
    return bytes(tensor.SerializeToString(deterministic=True)) + _field(_RAW_DATA, ITEM * math.prod(shape))


def _field(number: int, length: int) -> bytes:
    """Tag and length of a field that holds bytes or a message."""
    return _varint(number << 3 | 2) + _varint(length)


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def write_array(file: IO[bytes], array: np.ndarray) -> memoryview:
    """Write the elements in little-endian order; returns a view of them."""
    # onnx.proto prescribes this order for raw_data, whatever the machine's is.
    data = np.ascontiguousarray(array, dtype="<f4").reshape(-1).data.cast("B") if array.size else memoryview(b"")
    file.write(data)
    return data


def _finish(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
