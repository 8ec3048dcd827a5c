"""Memory of this machine that its ranks may take: what is there or free, and what the limit of their cgroup leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

PROCESS = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


def available(process: Path = PROCESS, cgroups: Path = CGROUPS) -> int:
    """Bytes. A cgroup's limit counts all of its processes; without cgroups of version 2, only what is free counts."""
    free_bytes = int(psutil.virtual_memory().available)
    for folder, limit in _limits(process, cgroups):
        try:
            # Files in the page cache that nobody has read lately are no use of memory, as for Kubernetes' working set:
            # the kernel drops them first.
            used = int((folder / "memory.current").read_text()) - _inactive_files(folder)
        except (OSError, ValueError):
            continue
        free_bytes = min(free_bytes, max(0, limit - max(0, used)))
    return free_bytes


def total(process: Path = PROCESS, cgroups: Path = CGROUPS) -> int:
    """Bytes of this machine's memory, or of the limit of its cgroup of version 2 (a container), if that is lower."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([memory, *(limit for _, limit in _limits(process, cgroups))])


def _limits(process: Path, cgroups: Path) -> Iterator[tuple[Path, int]]:
    """The cgroups of a process that have a limit, and their bytes, from the inner one."""
    try:
        line = next(line for line in process.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return
    innermost = cgroups / line.removeprefix("0::").lstrip("/")
    for folder in (innermost, *innermost.parents):
        if folder == cgroups.parent:
            break
        try:
            limit = (folder / "memory.max").read_text().strip()
            if limit != "max":
                yield folder, int(limit)
        # The root cgroup has no limit.
        except (OSError, ValueError):
            continue


def _inactive_files(cgroup: Path) -> int:
    """Bytes; 0 if the kernel does not tell. Raises ValueError if it tells no number."""
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
