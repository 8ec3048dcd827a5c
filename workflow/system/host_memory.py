"""Memory of this machine that its ranks may still take: what is free, and what the limit of their cgroup leaves."""

from __future__ import annotations

from pathlib import Path

import psutil


def available(proc: Path = Path("/proc/self/cgroup"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes. A cgroup's limit counts all of its processes; without cgroups of version 2, only what is free counts.

    Files in the page cache that nobody has read lately do not count as used, as for Kubernetes' working set: the kernel
    drops them first.
    """
    free_bytes = int(psutil.virtual_memory().available)
    try:
        line = next(line for line in proc.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return free_bytes
    folder = cgroups / line.removeprefix("0::").lstrip("/")
    for cgroup in (folder, *folder.parents):
        if cgroup == cgroups.parent:
            break
        try:
            limit = (cgroup / "memory.max").read_text().strip()
            used = int((cgroup / "memory.current").read_text()) - _inactive_files(cgroup)
        # The root cgroup has no limit, and no such files.
        except (OSError, ValueError):
            continue
        if limit != "max":
            free_bytes = min(free_bytes, max(0, int(limit) - max(0, used)))
    return free_bytes


def _inactive_files(cgroup: Path) -> int:
    """Bytes; 0 if the kernel does not tell. Raises ValueError if it tells no number."""
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
