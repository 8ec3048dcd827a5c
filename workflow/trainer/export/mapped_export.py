"""Writes and compares the inference model of parameters that are read one tensor at a time.

The memory that this needs does not depend on the size of the model, apart from its largest tensor. The comparison reads
the weights from the new file through mapped pages, which the system takes back when memory is short. That they are
those of the ranks is checked first, by a hash of each tensor. ONNX Runtime maps the file, too, and may neither pack
weights nor compute with them in advance, which would make copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.graph.export.inference import SCRATCH, as_function, export_inference
from ortflow.workflow.graph.export.model_file import ITEM, Shapes, Tensors, Written, refer
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.export.inference import PIECE, Watch, compared, moved_values, open_plain

REFERRING, MOVED = SCRATCH
WITHOUT_COPIES: Mapping[str, str] = {"session.disable_prepacking": "1"}
FOLDING = ("ConstantFolding",)
Array = npt.NDArray[Any]


def export_mapped(
    graphs: GraphSet,
    tensors: Tensors,
    sessions: Sessions,
    path: Path,
    samples: Sequence[MicroBatch],
    tolerance: float | None,
    *,
    trial: bool = False,
    watch: Watch | None = None,
) -> float | None:
    """As `inference.export_checked`, with tensors that are read one at a time; compares on the CPU."""
    shapes = {entry.name: entry.tensor.shape for entry in graphs.index}
    hashed, difference = _Hashed(tensors), None

    def check(model_file: Written) -> None:
        nonlocal difference
        mapped = MappedTensors(graphs.index, model_file.data, model_file.offsets)
        hashed.compare(mapped, model_file.path.name)
        file = model_file.path if model_file.data != model_file.path else _referring(graphs, shapes, model_file)
        session = open_plain(file, WITHOUT_COPIES, FOLDING)
        moved = model_file.path.with_name(MOVED)
        difference = compared(
            graphs, session, mapped, lambda: mapped.moved(moved), sessions.on_host(), samples, tolerance, watch
        )

    export_inference(graphs.infer, hashed, path, check, shapes=shapes, trial=trial)
    return difference


class MappedTensors:
    """The tensors of a file that are mapped to memory; addressed as in a flat buffer.

    `file`: contains them, fp32, in little-endian order. `offsets`: the first byte of each tensor that is in the file.
    """

    def __init__(self, index: FlatIndex, file: Path, offsets: Mapping[str, int]) -> None:
        self._index, self._offsets = index, offsets
        self._names = {index[name].offset: name for name in offsets if index[name].tensor.count}
        self._bytes = np.memmap(file, np.uint8, "r") if file.stat().st_size else np.empty(0, np.uint8)

    def slice(self, start: int, stop: int) -> HostBuffer:
        """Elements [start, stop) of the flat buffer: those of one tensor."""
        return HostBuffer(self.tensor(self._names[start]) if start < stop else np.empty(0, np.float32))

    def tensor(self, name: str) -> Array:
        """A tensor of the file, flat; read-only."""
        start, count = self._offsets[name], self._index[name].tensor.count
        return self._bytes[start : start + count * ITEM].view("<f4")

    def moved(self, file: Path) -> MappedTensors:
        """A copy in another file, with elements that `moved_values` moves. Raises OSError."""
        random, offsets = np.random.default_rng(0), dict[str, int]()
        with file.open("wb") as stream:
            for name in self._offsets:
                offsets[name], values = stream.tell(), self.tensor(name)
                for start in range(0, values.size, PIECE):
                    stream.write(moved_values(values[start : start + PIECE], random).tobytes())
        return MappedTensors(self._index, file, offsets)


class _Hashed(Mapping[str, Array]):
    """Tensors, and a hash of each that was read."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors, self._hashes = tensors, dict[str, str]()

    def __getitem__(self, name: str) -> Array:
        array: Array = self._tensors[name]
        self._hashes[name] = _hash(array)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def compare(self, mapped: MappedTensors, file: str) -> None:
        """Raise OrtflowError if a tensor in a file differs from the one that was read for it."""
        for name, expected in self._hashes.items():
            if _hash(mapped.tensor(name)) != expected:
                raise OrtflowError(f"{file} does not contain {name!r} as it was written: the disk may be faulty")


def _hash(array: Array) -> str:
    data = np.ascontiguousarray(array, "<f4").reshape(-1)
    return xxhash.xxh3_128(data.data).hexdigest() if data.size else ""


def _referring(graphs: GraphSet, shapes: Shapes, model_file: Written) -> Path:
    """A model beside a single file, with the same graph, whose weights are those in that file."""
    model, weight_inputs = as_function(graphs.infer, shapes)
    del model.graph.input[len(model.graph.input) - len(weight_inputs) :]
    refer(model.graph, {name: shapes[name] for name in model_file.offsets}, model_file.data.name, model_file.offsets)
    file = model_file.path.with_name(REFERRING)
    file.write_bytes(model.SerializeToString())
    return file
