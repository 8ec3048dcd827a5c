"""Adds up the gradients of a table's looked-up rows over the ranks' GPUs: see `ortflow.workflow.fusion.table_rows`.

Every rank gets the indices and rows of all, in the order of ranks, and adds them in that order, so that all have the
same bits. A micro-batch with fewer samples, or none, fills the rest with zeros for row 0. May be captured.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from onnx import TensorProto

from ortflow.workflow.comm.nccl import NcclCommunicator
from ortflow.workflow.cuda.embedding import TableGrad
from ortflow.workflow.cuda.operators import Operators, PlacedCall, Tensor
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cuda_buffer import CudaBuffer
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.fusion.table_rows import TableRows
from ortflow.workflow.sessions.gpu_collectives import stored_type


def given_by(rows: TableRows, width: int) -> list[tuple[int, np.dtype[Any]]]:
    """Elements, and their type, of the indices and of the rows that a rank gives, each of `width` elements."""
    return [(rows.entries, stored_type(TensorProto.INT64)), (rows.entries * width, stored_type(rows.kind))]


def gathered_size(rows: TableRows, width: int, ranks: int) -> int:
    """Bytes of what all ranks give, which each of them has in buffers of its own."""
    return ranks * sum(count * kind.itemsize for count, kind in given_by(rows, width))


class TableExchange:
    """The gradient of one look-up.

    `communicator`, `device`, `operators`: all ranks, and this rank's GPU. `gradient`: the table's part of the flat
    gradient. `shape`: the table's rows, and elements of a row.
    """

    def __init__(
        self,
        rows: TableRows,
        communicator: NcclCommunicator,
        device: CudaDevice,
        operators: Operators,
        gradient: CudaBuffer,
        shape: tuple[int, int],
    ) -> None:
        self._rows, self._device, self._operators = rows, device, operators
        self._operator, self._width = TableGrad({"rows": shape[0]}), shape[1]
        self._table = Tensor(gradient.pointer, shape, TensorProto.FLOAT)
        ranks, rank = communicator.world_size, communicator.rank
        extents = given_by(rows, self._width)
        self._all = [device.allocate(ranks * count, kind) for count, kind in extents]
        self._own = [
            buffer.slice(rank * count, (rank + 1) * count)
            for buffer, (count, _) in zip(self._all, extents, strict=True)
        ]

    def put(self, indices: Tensor, gradient: Tensor) -> None:
        """Queue copies of what this rank gives. Raises OrtflowError if it is more than `rows.entries`."""
        count = prod(indices.shape)
        if count > self._rows.entries:
            raise OrtflowError(f"{count:,} indices of {self._rows.table!r} and not {self._rows.entries:,} at most")
        for buffer, tensor in zip(self._own, (indices, gradient), strict=True):
            size = count * buffer.size // self._rows.entries
            if size:
                self._operators.copy(buffer.pointer, tensor.pointer, size)
            if size < buffer.size:
                self._device.zero(buffer.pointer + size, buffer.size - size)

    def put_nothing(self) -> None:
        """The same without samples."""
        for buffer in self._own:
            buffer.fill(0)

    @property
    def parts(self) -> list[tuple[CudaBuffer, CudaBuffer]]:
        """What is to be gathered from all ranks between `put` and `add`: this rank's part, and the whole."""
        return list(zip(self._own, self._all, strict=True))

    def add(self) -> None:
        """Queue the sum of what was gathered, behind everything that computes the rest of the table's gradient."""
        indices, gradient = self._all
        count = indices.count
        self.add_these(
            Tensor(indices.pointer, (count,), TensorProto.INT64),
            Tensor(gradient.pointer, (count, self._width), self._rows.kind),
        )

    def add_these(self, indices: Tensor, gradient: Tensor) -> None:
        """The same for one rank's tensors."""
        inputs = [indices, gradient, *([self._table] if self._rows.adds else [])]
        self._operator.run(PlacedCall(self._operators, inputs, self._table))
