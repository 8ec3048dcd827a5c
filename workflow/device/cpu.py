"""Flat buffers in host memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ortflow.workflow.device import Buffer
from ortflow.workflow.device.copying import Copying
from ortflow.workflow.errors import OrtflowError

ALIGNMENT = 256
"""Bytes; offsets in the flat layout keep this alignment, so that every tensor starts on a cache line."""


@dataclass(frozen=True)
class HostBuffer:
    """A one-dimensional array; slices are views of it."""

    array: npt.NDArray[Any]

    @property
    def pointer(self) -> int:
        """Address of the first element."""
        return int(self.array.ctypes.data)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type."""
        return self.array.dtype

    @property
    def count(self) -> int:
        """Number of elements."""
        return int(self.array.size)

    def slice(self, start: int, stop: int) -> HostBuffer:
        """Elements [start, stop), the same memory."""
        return HostBuffer(self.array[start:stop])

    def read(self, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """A copy, in `out` if given."""
        if out is None:
            return np.array(self.array)
        np.copyto(out, self.array)
        return out

    def write(self, values: npt.NDArray[Any]) -> None:
        """Copy from `values`."""
        np.copyto(self.array, values.reshape(-1))

    def copy_from(self, other: HostBuffer) -> None:
        """Copy another buffer."""
        np.copyto(self.array, other.array)

    def fill(self, value: float) -> None:
        """Set every element."""
        self.array.fill(value)

    def add(self, other: HostBuffer) -> None:
        """Add another buffer, element by element."""
        # The gradient's norm shows what is not finite, and the step is then skipped.
        with np.errstate(invalid="ignore", over="ignore"):
            np.add(self.array, other.array, out=self.array)

    def scale(self, factor: float) -> None:
        """Multiply every element."""
        with np.errstate(invalid="ignore", over="ignore"):
            np.multiply(self.array, np.float32(factor), out=self.array)


class CpuDevice:
    """Host memory and ONNX Runtime's CPU provider."""

    kind = "cpu"
    precision = "fp32"
    capturing = False
    index = 0
    name = "cpu"
    arenas = "cpu:0"

    def allocate(self, count: int, dtype: npt.DTypeLike) -> HostBuffer:
        """A zeroed buffer whose first element is aligned to 256 bytes."""
        itemsize = np.dtype(dtype).itemsize
        raw = np.zeros(count * itemsize + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return HostBuffer(raw[start : start + count * itemsize].view(dtype))

    def view(self, pointer: int, count: int, dtype: npt.DTypeLike) -> HostBuffer:
        """See the protocol."""
        kind = np.dtype(dtype)
        memory = (ctypes.c_byte * (count * kind.itemsize)).from_address(pointer)
        return HostBuffer(np.ctypeslib.as_array(memory).view(kind))

    def lend(self, array: npt.NDArray[Any], before: Buffer | None = None, *, prefetched: bool = False) -> HostBuffer:
        """The array itself."""
        return HostBuffer(np.ascontiguousarray(array).reshape(-1))

    def prefetch(self, array: npt.NDArray[Any], buffer: Buffer) -> None:
        """Nothing to do."""

    def providers(self) -> list[str | tuple[str, dict[str, str]]]:
        """The CPU provider alone."""
        return ["CPUExecutionProvider"]

    def memory(self) -> dict[str, int]:
        """Nothing: the memory is the process's."""
        return {}

    def copying(self, room: int) -> Copying:
        """See the protocol."""
        return Copying()

    def memory_moves(self) -> None:
        """Nothing to do."""

    def free_memory(self) -> None:
        """Nothing is put off."""

    def exact(self) -> CpuDevice:
        """The device itself."""
        return self

    def failure(self, message: str) -> OrtflowError:
        """See the protocol."""
        return OrtflowError(f"out of memory in a step: {message}")

    def synchronize(self) -> None:
        """The CPU provider returns when it is done."""
