"""Collectives of graphs on a GPU: queued with NCCL on the stream of the session, or through host memory without NCCL.

`collectives` has those of graphs on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import TensorProto

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.nccl import NcclCommunicator
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.graph.ir.collective import Kind
from ortflow.workflow.sessions.collectives import TYPES, Array, compute, errors_kept

if TYPE_CHECKING:
    from ortflow.workflow.cuda.operators import Operators, Tensor


_HALVES = {TensorProto.FLOAT16: np.float16, TensorProto.BFLOAT16: np.uint16}
"""How numpy stores halves."""


def stored_type(kind: int) -> np.dtype[Any]:
    """How numpy stores elements of a type of onnx.TensorProto."""
    return np.dtype(_HALVES.get(kind) or TYPES[kind])


def serve(operators: Operators, device: CudaDevice, channels: Mapping[int, Communicator]) -> None:
    """Let the collectives of all sessions with these operators use these communicators, by channel."""

    def collect(kind: int, channel: int, parts: int, source: Tensor, target: int) -> None:
        with errors_kept():
            perform(kind, channel, parts, source, target)

    def perform(kind: int, channel: int, parts: int, given: Tensor, made: int) -> None:
        communicator = channels.get(channel)
        if communicator is None:
            raise OrtflowError(f"channel {channel} of a collective is not connected")
        if communicator.world_size != parts:
            raise OrtflowError(f"channel {channel} has {communicator.world_size} ranks, and the graph {parts} parts")
        count, dtype = prod(given.shape), stored_type(given.type)
        rows = {Kind.ALL_GATHER: count * parts, Kind.REDUCE_SCATTER: count // parts}.get(Kind(kind), count)
        source, target = device.view(given.pointer, count, dtype), device.view(made, rows, dtype)
        if isinstance(communicator, NcclCommunicator):
            communicator.collect(kind, source, target, bfloat16=given.type == TensorProto.BFLOAT16)
            return
        if device.capturing:
            raise OrtflowError("a collective without NCCL passes through host memory")
        values = _wide(source.read(), given.type)
        result = values.copy() if kind <= Kind.ALL_REDUCE_MAX else np.empty(rows, values.dtype)
        compute(Kind(kind), values, result, communicator)
        target.write(_narrow(result, given.type))

    operators.on_collective = collect


def _wide(values: Array, kind: int) -> Array:
    """Halves as fp32, which is what sums on the host are computed in; other values as they are."""
    if kind == TensorProto.BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32) if kind == TensorProto.FLOAT16 else values


def _narrow(values: Array, kind: int) -> Array:
    """The same back, rounded to the nearest."""
    if kind == TensorProto.BFLOAT16:
        words = values.view(np.uint32)
        rounded = ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
    return values.astype(np.float16) if kind == TensorProto.FLOAT16 else values
