"""The number of cores available to a rank: affinity and cgroup quota, not the machine's total."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Grant:
    """The CPU limits of one rank."""

    host: str
    cores: frozenset[int]
    """Cores of its affinity mask."""
    quota: float | None
    """CPU seconds per second that its cgroup may use; None without a limit."""
    cgroup: str
    """The cgroup that sets the quota."""


def grant_of_this_process(host: str) -> Grant:
    """Affinity, and the smallest CPU quota of the cgroup and its parents."""
    # macOS has no affinity of a process.
    if hasattr(os, "sched_getaffinity"):
        cores = frozenset(os.sched_getaffinity(0))
    else:
        cores = frozenset(range(os.cpu_count() or 1))
    quota, cgroup = _quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return Grant(host, cores, quota, cgroup)


def cores_of(own_grant: Grant, all_ranks: Sequence[Grant]) -> int:
    """Cores for one rank, at least 1: its mask and quota, divided by the ranks of its host that share them."""
    host_grants = [grant for grant in all_ranks if grant.host == own_grant.host]
    shared_mask = sum(1 for grant in host_grants if grant.cores & own_grant.cores)
    cores = len(own_grant.cores) / max(1, shared_mask)
    if own_grant.quota is not None:
        shared_quota = sum(1 for grant in host_grants if grant.cgroup == own_grant.cgroup)
        cores = min(cores, own_grant.quota / max(1, shared_quota))
    return max(1, int(cores))


def cores_per_rank(cpus_per_rank: int | None, ranks: int) -> int:
    """Cores of one of `ranks` ranks of this machine: `cpus_per_rank`, or an equal share of this process's.

    For predictions before the ranks have compared their masks.
    """
    if cpus_per_rank is not None:
        return cpus_per_rank
    own_grant = grant_of_this_process("localhost")
    return cores_of(own_grant, [own_grant] * ranks)


def _quota(membership: Path, root: Path) -> tuple[float | None, str]:
    try:
        rows = membership.read_text().splitlines()
    except OSError:
        return None, ""
    path = next((row.split(":", 2)[2] for row in rows if row.startswith("0::")), None)
    if path is None:
        return None, ""
    tightest: float | None = None
    holder = ""
    folder = root / path.lstrip("/")
    while True:
        try:
            limit, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            # The root cgroup has no such file.
            limit, period = "max", "1"
        if limit != "max":
            quota = int(limit) / int(period)
            if tightest is None or quota < tightest:
                tightest, holder = quota, str(folder)
        if folder in (root, folder.parent):
            return tightest, holder
        folder = folder.parent
