"""A sum over all GPUs of this machine by NCCL, from one process: correctness and speed. For `ortflow doctor`."""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ortflow.workflow.comm.nccl_library import SUM, TYPES, NcclError
from ortflow.workflow.comm.nccl_messages import sentence
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cuda_buffer import CudaBuffer
from ortflow.workflow.errors import OrtflowError

COUNT = 1 << 26
"""Number of elements: 256 MiB of fp32 on each GPU."""
ROUNDS = 5
_CHECKED_ELEMENTS = 1 << 16


def add_up(library: Any, devices: Sequence[CudaDevice], count: int = COUNT) -> dict[str, float]:
    """Bus bandwidth in GB/s as NCCL defines it, and NCCL's version. Raises OrtflowError if the sum is wrong.

    Each GPU contributes its number, counted from 1, in `count` elements, so all results must be equal.
    """
    size = len(devices)
    worlds = (ctypes.c_void_p * size)()
    indices = (ctypes.c_int * size)(*(device.index for device in devices))
    _call(library, "ncclCommInitAll", worlds, size, indices)
    try:
        buffers = [_allocated(device, count) for device in devices]
        seconds = []
        for turn in range(1 + ROUNDS):
            for number, buffer in enumerate(buffers, 1):
                _set(buffer, number)
            for device in devices:
                device.synchronize()
            begun = time.perf_counter()
            _sum(library, worlds, devices, buffers)
            for device in devices:
                device.synchronize()
            if turn:
                seconds.append(time.perf_counter() - begun)
        _check(buffers, size * (size + 1) / 2)
    finally:
        for world in worlds:
            with contextlib.suppress(NcclError):
                _call(library, "ncclCommDestroy", ctypes.c_void_p(world))
    version = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(version))
    moved = 4 * count * 2 * (size - 1) / size
    return {"gbps": moved / statistics.median(seconds) / 1e9, "nccl": version.value}


def _allocated(device: CudaDevice, count: int) -> CudaBuffer:
    # CUDA's current device is per thread; queued work goes to the stream's device.
    device.here().use(device.index)
    return device.allocate(count, np.float32)


def _set(buffer: CudaBuffer, number: float) -> None:
    """Set both ends and the middle; the rest stays from the round before and is not compared."""
    for part in _parts(buffer):
        part.write(np.full(part.count, number, np.float32))


def _check(buffers: Sequence[CudaBuffer], expected: float) -> None:
    for number, buffer in enumerate(buffers):
        for part in _parts(buffer):
            values = part.read()
            if not bool((values == expected).all()):
                raise OrtflowError(
                    f"a sum over {len(buffers)} GPUs is wrong on number {number}: {values[0]}, not {expected}"
                )


def _parts(buffer: CudaBuffer) -> list[CudaBuffer]:
    part, count = min(_CHECKED_ELEMENTS, buffer.count), buffer.count
    return [buffer.slice(start, start + part) for start in (0, (count - part) // 2, count - part)]


def _sum(library: Any, worlds: Any, devices: Sequence[CudaDevice], buffers: Sequence[CudaBuffer]) -> None:
    _call(library, "ncclGroupStart")
    for place, (device, buffer) in enumerate(zip(devices, buffers, strict=True)):
        memory, stream = ctypes.c_void_p(buffer.pointer), ctypes.c_void_p(device.stream)
        count, world = ctypes.c_size_t(buffer.count), ctypes.c_void_p(worlds[place])
        _call(library, "ncclAllReduce", memory, memory, count, TYPES["float32"], SUM, world, stream)
    _call(library, "ncclGroupEnd")


def _call(library: Any, name: str, *arguments: Any) -> None:
    code = int(getattr(library, name)(*arguments))
    if code:
        last = library.ncclGetLastError(None) if hasattr(library, "ncclGetLastError") else b""
        message = library.ncclGetErrorString(code).decode()
        raise NcclError(sentence(name, message, _text(last)))


def _text(message: Any) -> str:
    return message.decode(errors="replace") if isinstance(message, bytes) else ""
