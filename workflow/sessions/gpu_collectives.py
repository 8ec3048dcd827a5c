"""Collectives of graphs on a GPU: queued with NCCL on the stream of the session, or through host memory without NCCL.

`collectives` has those of graphs on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.nccl import NcclCommunicator
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.graph.ir.collective import Kind
from ortflow.workflow.sessions.collectives import TYPES, compute, errors_kept

if TYPE_CHECKING:
    from ortflow.workflow.cuda.operators import Operators, Tensor


def serve(operators: Operators, device: CudaDevice, channels: Mapping[int, Communicator]) -> None:
    """Let the collectives of all sessions with these operators use these communicators, by channel."""

    def collect(kind: int, channel: int, parts: int, given: Tensor, made: int) -> None:
        with errors_kept():
            perform(kind, channel, parts, given, made)

    def perform(kind: int, channel: int, parts: int, given: Tensor, made: int) -> None:
        communicator = channels.get(channel)
        if communicator is None:
            raise OrtflowError(f"channel {channel} of a collective is not connected")
        if communicator.world_size != parts:
            raise OrtflowError(f"channel {channel} has {communicator.world_size} ranks, and the graph {parts} parts")
        count, dtype = prod(given.shape), np.dtype(TYPES[given.type])
        rows = {Kind.ALL_GATHER: count * parts, Kind.REDUCE_SCATTER: count // parts}.get(Kind(kind), count)
        source, target = device.view(given.pointer, count, dtype), device.view(made, rows, dtype)
        if isinstance(communicator, NcclCommunicator):
            communicator.collect(kind, source, target)
            return
        if device.capturing:
            raise OrtflowError("a collective without NCCL passes through host memory")
        values = source.read()
        result = values.copy() if kind <= Kind.ALL_REDUCE_MAX else np.empty(rows, dtype)
        compute(Kind(kind), values, result, communicator)
        target.write(result)

    operators.on_collective = collect
