"""The memory of a rank's program: of its process, of everything that it has started, and on GPUs by NVIDIA's library.

Measured beside the rank's loop, in a thread: NVIDIA's library takes up to a second to open.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

import psutil

from ortflow.workflow.device.nvml import Nvml, open_nvml

FIRST, PERIOD = 1.0, 10.0
"""Seconds from the program's start to the first measurement, and between two of them."""


class ProgramUsage:
    """Measures the memory of a process and its descendants; `nvml` None: opened with the first measurement."""

    def __init__(self, pid: int, nvml: Nvml | None = None) -> None:
        self._pid, self._nvml, self._opened = pid, nvml, nvml is not None
        self._most: dict[str, int] = {}

    def measure(self) -> dict[str, int]:
        """`resident` and `peak`, and on GPUs `gpu_used` and `gpu_peak`, in bytes; empty if the process is gone.

        Pages that processes share count for each of them. A peak is the most that was
        measured, or the kernel's of the process alone.
        """
        family = descendants(self._pid)
        # A process that has ended and that nobody has waited for has no memory.
        sizes = [size for size in map(resident_of, family) if size]
        if not sizes:
            return {}
        if not self._opened:
            self._nvml, self._opened = open_nvml(), True
        usage = {"resident": sum(sizes), "peak": self._peak("resident", max(sum(sizes), highest_of(self._pid)))}
        by_process = self._nvml.memory_by_process() if self._nvml is not None else {}
        used = sum(size for pid, size in by_process.items() if pid in family)
        if used:
            usage |= {"gpu_used": used, "gpu_peak": self._peak("gpu", used)}
        return usage

    def _peak(self, name: str, size: int) -> int:
        self._most[name] = max(size, self._most.get(name, 0))
        return self._most[name]


def descendants(pid: int) -> set[int]:
    """A process and all that it has started and that has not left it, by their numbers; without it if it is gone."""
    family: set[int] = set()
    waiting = [pid]
    while waiting:
        member = waiting.pop()
        if member in family or not os.path.exists(f"/proc/{member}"):
            continue
        family.add(member)
        try:
            for thread in os.listdir(f"/proc/{member}/task"):
                waiting += map(int, Path(f"/proc/{member}/task/{thread}/children").read_text().split())
        except OSError:
            # The process has just ended, or the kernel lacks CONFIG_PROC_CHILDREN: psutil reads all processes.
            with suppress(psutil.Error):
                waiting += [child.pid for child in psutil.Process(member).children()]
    return family


def resident_of(pid: int) -> int | None:
    """Resident bytes of a process; None if it is gone."""
    try:
        # In pages, unlike the numbers of /proc/PID/status.
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return None


def highest_of(pid: int) -> int:
    """The most resident bytes of a process so far; 0 if that is unknown."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
