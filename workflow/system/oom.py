"""Counts the kernel's out-of-memory kills: read before and after an attempt. Linux only, read only."""

from __future__ import annotations

from pathlib import Path


def oom_kills(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Out-of-memory kills so far: in this process's cgroup if it counts them, else on the whole machine.

    None if neither is available (not Linux, or hidden in a container).
    """
    try:
        rows = [row.split(":", 2) for row in (proc / "self/cgroup").read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, path in rows:
        # A container sees its own cgroup as the root, and gets a path that exists only on the host.
        if not controllers:
            files = [cgroups / path.lstrip("/") / "memory.events", cgroups / "memory.events"]
        elif "memory" in controllers.split(","):
            files = [
                cgroups / "memory" / path.lstrip("/") / "memory.oom_control",
                cgroups / "memory/memory.oom_control",
            ]
        else:
            continue
        for file in files:
            if (count := _field(file, "oom_kill")) is not None:
                return count
    return _field(proc / "vmstat", "oom_kill")


def _field(file: Path, name: str) -> int | None:
    try:
        fields = dict(line.split(None, 1) for line in file.read_text().splitlines())
        return int(fields[name])
    except (OSError, KeyError, ValueError):
        return None
