"""Memory of this machine that its ranks may still take: what is free, and what the limit of their cgroup leaves."""

from __future__ import annotations

from pathlib import Path

import psutil


def available(proc: Path = Path("/proc/self/cgroup"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes. A cgroup's limit counts all of its processes; without cgroups of version 2, only what is free counts."""
    free = int(psutil.virtual_memory().available)
    try:
        line = next(line for line in proc.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return free
    folder = cgroups / line.removeprefix("0::").lstrip("/")
    for each in (folder, *folder.parents):
        if each == cgroups.parent:
            break
        try:
            limit, used = (each / "memory.max").read_text().strip(), int((each / "memory.current").read_text())
        except (OSError, ValueError):
            continue
        if limit != "max":
            free = min(free, max(0, int(limit) - used))
    return free
