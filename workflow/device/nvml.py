"""Queries NVIDIA's management library: processes that use a GPU, throttling, memory errors.

The library is part of the driver. If it is missing or does not support a query, nothing is reported and nothing fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

_UNCORRECTED, _VOLATILE = 1, 0
_UUID = 96
"""NVML_DEVICE_UUID_V2_BUFFER_SIZE."""
_UNKNOWN_SIZE = 2**64 - 1
"""NVML_VALUE_NOT_AVAILABLE."""
_MANY = 64
"""Largest number of processes queried per GPU."""


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t."""

    _fields_ = (
        ("pid", ctypes.c_uint), ("memory", ctypes.c_ulonglong), ("instance", ctypes.c_uint), ("compute", ctypes.c_uint),
    )  # fmt: skip


class Nvml:
    """The initialised library; every method returns None if the value is unknown."""

    def __init__(self, library: Any) -> None:
        self._nvml = library

    def health(self, uuid: str) -> dict[str, Any]:
        """`temperature`, `uncorrected` and `broken_rows` of a GPU, by its UUID in hexadecimal digits."""
        handle = self._handle(uuid)
        if handle is None:
            return {}
        values = {
            "temperature": self._number("nvmlDeviceGetTemperature", ctypes.c_uint, handle, 0),
            "uncorrected": self._number(
                "nvmlDeviceGetTotalEccErrors", ctypes.c_ulonglong, handle, _UNCORRECTED, _VOLATILE
            ),
            "broken_rows": self._broken_rows(handle),
        }
        return {name: value for name, value in values.items() if value is not None}

    def users(self) -> dict[str, int]:
        """Number of processes on each of the machine's GPUs, by UUID; query before this process uses one."""
        process_counts = {}
        count, handle, uuid = ctypes.c_uint(), ctypes.c_void_p(), ctypes.create_string_buffer(_UUID)
        if not self._works("nvmlDeviceGetCount_v2", ctypes.byref(count)):
            return {}
        for index in range(count.value):
            # A container may see only some of them.
            if not self._works("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle)):
                continue
            processes = self._processes(handle)
            if processes is not None and self._works("nvmlDeviceGetUUID", handle, uuid, _UUID):
                process_counts[uuid.value.decode().removeprefix("GPU-").replace("-", "")] = processes
        return process_counts

    def memory_by_process(self) -> dict[int, int]:
        """Bytes that each process uses on all GPUs that are visible here, by its number on the host.

        Without those of which the driver knows no size (Windows, some containers).
        """
        sizes: dict[int, int] = {}
        count, handle = ctypes.c_uint(), ctypes.c_void_p()
        if not self._works("nvmlDeviceGetCount_v2", ctypes.byref(count)):
            return {}
        for index in range(count.value):
            if self._works("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle)):
                for process in self._running(handle) or ():
                    if process.memory != _UNKNOWN_SIZE:
                        sizes[process.pid] = sizes.get(process.pid, 0) + int(process.memory)
        return sizes

    def slowed(self, uuid: str) -> int | None:
        """Bits of the reasons why clocks are reduced at present."""
        handle = self._handle(uuid)
        if handle is None:
            return None
        # Newer drivers call it nvmlDeviceGetCurrentClocksEventReasons, and keep this name.
        return self._number("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong, handle)

    @contextlib.contextmanager
    def watched(self, uuid: str, period: float = 0.02) -> Iterator[list[int]]:
        """Collect in a list with one number all bits of `slowed` observed during the block."""
        reasons, done = [0], threading.Event()

        def watch() -> None:
            while not done.wait(period):
                reasons[0] |= self.slowed(uuid) or 0

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield reasons
        finally:
            done.set()
            thread.join()

    def _handle(self, uuid: str) -> ctypes.c_void_p | None:
        dashed = "-".join((uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:]))
        handle = ctypes.c_void_p()
        return (
            handle if self._works("nvmlDeviceGetHandleByUUID", f"GPU-{dashed}".encode(), ctypes.byref(handle)) else None
        )

    def _works(self, name: str, *arguments: Any) -> bool:
        function = getattr(self._nvml, name, None)
        return function is not None and int(function(*arguments)) == 0

    def _number(self, name: str, kind: type[Any], *arguments: Any) -> int | None:
        place = kind()
        return int(place.value) if self._works(name, *arguments, ctypes.byref(place)) else None

    def _processes(self, handle: ctypes.c_void_p) -> int | None:
        running = self._running(handle)
        return None if running is None else len(running)

    def _running(self, handle: ctypes.c_void_p) -> list[_Process] | None:
        count, entries = ctypes.c_uint(_MANY), (_Process * _MANY)()
        works = self._works("nvmlDeviceGetComputeRunningProcesses_v3", handle, ctypes.byref(count), entries)
        return list(entries[: count.value]) if works else None

    def _broken_rows(self, handle: ctypes.c_void_p) -> int | None:
        """Whether memory rows could not be remapped, or wait for a reset to be remapped."""
        corrected, uncorrected, pending, failed = (ctypes.c_uint() for _ in range(4))
        places = map(ctypes.byref, (corrected, uncorrected, pending, failed))
        works = self._works("nvmlDeviceGetRemappedRows", handle, *places)
        return int(pending.value or failed.value) if works else None


def open_nvml() -> Nvml | None:
    """The library; None if it is missing."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return Nvml(library) if int(library.nvmlInit_v2()) == 0 else None
