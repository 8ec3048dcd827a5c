"""Fills numbers and element types into this folder's CUDA sources, and computes thread layouts."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from onnx import TensorProto

from ortflow.workflow.cuda.call import Tensor
from ortflow.workflow.errors import OrtflowError

_FOLDER = Path(__file__).parent
_NAMES = {TensorProto.FLOAT: "float", TensorProto.FLOAT16: "f16", TensorProto.BFLOAT16: "bf16"}
BYTES = {int(TensorProto.FLOAT): 4, int(TensorProto.FLOAT16): 2, int(TensorProto.BFLOAT16): 2}
"""Bytes per element."""
# CUDA's limit for the first axis of a grid.
LARGEST_GRID = 2**31 - 1
_INCLUDED = {
    **dict.fromkeys(("cross_entropy", "cross_entropy_gradient", "cross_entropy_both"), ("softmax_sum.cuh",)),
    **dict.fromkeys(("batch_norm", "batch_norm_gradient"), ("batch_sums.cuh",)),
    **dict.fromkeys(("rotary", "softmax", "spread_sum"), ("spread.cuh",)),
}
"""Source -> files that it shares with others."""


@functools.cache
def _text(name: str) -> str:
    return (_FOLDER / name).read_text()


@functools.cache
def source(name: str, types: tuple[tuple[str, int], ...], numbers: tuple[tuple[str, int], ...] = ()) -> str:
    """The file `name`.cu with element types (of onnx.TensorProto) and numbers filled in."""
    lines = [_text("types.cuh"), _text("common.cuh")]
    for letter, kind in types:
        if kind not in _NAMES:
            raise OrtflowError(f"{TensorProto.DataType.Name(kind)} is not an element type that {name} supports")
        lines.append(f"typedef {_NAMES[kind]} {letter};")
    lines += [f"#define {macro} {value}" for macro, value in numbers]
    return "\n".join([*lines, *map(_text, _INCLUDED.get(name, ())), _text(f"{name}.cu")])


def vector(width: int, tensors: Iterable[tuple[int, int]]) -> int:
    """Elements to read at a time: 8, 4, 2 or 1, limited by rows of `width` and the (pointer, element type) of each
    tensor.
    """
    pointers = list(tensors)
    for lanes in (8, 4, 2):
        # A thread reads at most 16 bytes in one instruction, from an address that is a multiple of their number.
        if width % lanes == 0 and all(
            pointer % min(lanes * BYTES.get(kind, 16), 16) == 0 for pointer, kind in pointers
        ):
            return lanes
    return 1


_READS = {8: 4, 4: 8, 2: 8, 1: 16}
"""Elements read at a time -> largest number of reads per thread, for a row that is kept in registers."""
_BLOCK = 256
_WIDEST = 1024


@dataclass(frozen=True)
class Rows:
    """Layout of matrix rows over threads: GROUP neighbouring threads share a row and keep it in registers."""

    vector: int
    group: int
    """Threads per row: a power of two."""
    reads: int
    """Number of reads of `vector` elements per thread; 0 if the row does not fit into registers and has a block."""

    @property
    def block(self) -> int:
        """Threads per block."""
        return max(_BLOCK, self.group) if self.reads else self.group

    @property
    def at_a_time(self) -> int:
        """Rows per block."""
        return self.block // self.group

    def numbers(self, width: int) -> tuple[tuple[str, int], ...]:
        """The numbers by their names in the sources."""
        return (
            ("WIDTH", width), ("VECTOR", self.vector), ("GROUP", self.group), ("READS", self.reads),
            ("BLOCK", self.block),
        )  # fmt: skip


def rows_of(width: int, lanes: int, most: int = 32, widest: int = _WIDEST) -> Rows:
    """The layout for rows of `width` elements that are read `lanes` at a time.

    A thread keeps at most `most` elements of a row, and at most `widest` threads share a row.
    """
    vectors, limit = max(width // lanes, 1), min(_READS[lanes], max(most // lanes, 1))
    group = min(32, 1 << (vectors - 1).bit_length())
    while vectors > group * limit and group < widest:
        group *= 2
    reads = -(-vectors // group)
    return Rows(lanes, group, reads) if reads <= limit else Rows(lanes, _WIDEST, 0)


@dataclass(frozen=True)
class Columns:
    """Layout of matrix columns over blocks of 256 threads.

    LANES threads cover TILE columns of a row; the groups of a block read different rows at the same time.
    """

    vector: int
    lanes: int
    reads: int
    tiles: int
    """Number of blocks that cover all columns."""

    @property
    def groups(self) -> int:
        """Rows read at a time."""
        return _BLOCK // self.lanes

    @property
    def tile(self) -> int:
        """Columns of a block."""
        return self.lanes * self.reads * self.vector

    def numbers(self) -> tuple[tuple[str, int], ...]:
        """The numbers by their names in the sources."""
        return ("VECTOR", self.vector), ("LANES", self.lanes), ("READS", self.reads)


def columns_of(width: int, lanes: int, most: int, widest: int = 32) -> Columns:
    """The layout for `width` columns that are read `lanes` at a time, at most `most` by a thread.

    At most `widest` threads share a row: a power of two.
    """
    vectors = width // lanes
    threads = min(widest, 1 << (vectors - 1).bit_length())
    reads = max(1, min(most // lanes, 8, -(-vectors // threads)))
    return Columns(lanes, threads, reads, -(-width // (threads * reads * lanes)))


def blocks(rows: int, at_a_time: int) -> int:
    """Number of blocks for `rows` rows."""
    count = -(-rows // at_a_time)
    if count > LARGEST_GRID:
        raise OrtflowError(f"{rows:,} rows are more than a kernel takes")
    return count


def size_of(tensor: Tensor) -> int:
    """Number of elements of a tensor."""
    return math.prod(tensor.shape)


def rows_and_width(tensor: Tensor) -> tuple[int, int]:
    """Shape of a tensor as a matrix with the same last axis."""
    return math.prod(tensor.shape[:-1]), tensor.shape[-1]
