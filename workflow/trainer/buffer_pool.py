"""Values on a device, in memory that is used again: allocating and freeing memory would make a GPU wait.

Used by the stages of a pipeline for what they receive and for gradients that they send.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ortflow.workflow.device import Buffer, Device

Shape = tuple[int, ...]


@dataclass(frozen=True)
class DeviceValue:
    """A value in the memory of the device."""

    buffer: Buffer
    shape: Shape
    element: int | None = None
    """Its type as ONNX counts them, if numpy has none: `buffer` then only counts its bytes."""


class BufferPool:
    """Buffers for values of a few sizes.

    A buffer is used again after the last reference to its value. What was queued for the value before must come before
    what is queued for the next one.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: dict[tuple[int, np.dtype[np.generic]], list[Buffer]] = defaultdict(list)

    def take(self, shape: Sequence[int], dtype: npt.DTypeLike) -> DeviceValue:
        """A value of any content."""
        count, kind = math.prod(shape), np.dtype(dtype)
        unused = self._free[count, kind]
        buffer = unused.pop() if unused else self._device.allocate(count, kind)
        value = DeviceValue(buffer, tuple(shape))
        weakref.finalize(value, unused.append, buffer).atexit = False
        return value
