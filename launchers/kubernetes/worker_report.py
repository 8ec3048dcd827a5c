"""Reports of workers on the volume, and what the supervisor process concludes from them when ranks have ended without
a record.

mpirun's exit code does not distinguish a deleted pod from a crashed one, and the two count differently: a deleted pod
is not a failure, one that ran out of memory is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ortflow.launchers.attempts.cause import Cause
from ortflow.launchers.kubernetes.pod import Pod
from ortflow.launchers.records import Outcome
from ortflow.workflow.errors import EXIT_FAILURE, EXIT_PREEMPTED
from ortflow.workflow.run.rundir import write_atomically


@dataclass(frozen=True)
class WorkerReport:
    """A worker's state."""

    address: str
    """Address of its pod: another pod of the same name has another one."""
    started: float
    """Unix time at which its container began."""
    leaving: bool = False
    """It was asked to end."""
    out_of_memory: int = 0
    """Out-of-memory kills since then."""
    key: str = ""
    """Digest of the ssh key that it accepts; empty if not reported."""
    node: str = ""
    """The node that its pod is on; empty if not reported."""


WorkerReports = Mapping[str, WorkerReport | None]
"""By host; None for one without a report."""


def write_report(pod: Pod, host: str, worker_report: WorkerReport) -> None:
    """Write a worker's report to the volume."""
    write_atomically(pod.worker_report(host), json.dumps(asdict(worker_report)).encode())


def read_reports(pod: Pod, hosts: Iterable[str]) -> dict[str, WorkerReport | None]:
    """The newest report of each host's worker."""
    return {host: _read(pod, host) for host in hosts}


def other_key(pod: Pod, host: str, key: str) -> bool:
    """Whether a host's worker accepts another ssh key than one whose digest is `key`: the Secret was replaced."""
    report = _read(pod, host)
    return report is not None and bool(report.key and key) and report.key != key


def key_digest(folder: Path) -> str:
    """Digest of the key that a pod's ssh daemon accepts, from the folder of the operator's keys; empty if none."""
    try:
        return hashlib.sha256((folder / "authorized_keys").read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def leaves(pod: Pod, host: str, address: str) -> bool:
    """Whether the host's pod with this address has reported that it was asked to end."""
    report = _read(pod, host)
    return report is not None and report.leaving and report.address == address


def is_on(pod: Pod, host: str, address: str, nodes: Collection[str]) -> str | None:
    """The one of some nodes that the host's pod with this address reports to be on; None if it is on none of them."""
    report = _read(pod, host)
    return report.node if report is not None and report.address == address and report.node in nodes else None


def node_of_host(pod: Pod, host: str) -> str:
    """The node that a host's pod is on; the pod's name if that is not reported."""
    report = _read(pod, host)
    return report.node or host if report is not None else host


def _read(pod: Pod, host: str) -> WorkerReport | None:
    try:
        values = json.loads(pod.worker_report(host).read_text())
        return WorkerReport(**values)
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def conclude(before: WorkerReports, after: WorkerReports, silent: Iterable[str]) -> Cause | None:
    """Why ranks ended, if the cause lies with their workers; None otherwise. Pure.

    `before`: the reports at the attempt's start; `silent`: the hosts that cannot be reached now.
    """
    heard = [
        (host, old, new) for host, old in before.items() if old is not None and (new := after.get(host)) is not None
    ]
    for host, old, new in heard:
        if new.address == old.address and new.out_of_memory > old.out_of_memory:
            return _failure(f"the worker {host} ran out of memory; raise resources.memory")
        if new.address == old.address and new.started != old.started:
            return _failure(f"the container of worker {host} ended and was started again: out of memory, or it crashed")
    for host, old, new in heard:
        if new.address != old.address or (new.leaving and not old.leaving):
            return Cause(Outcome.PREEMPTED, EXIT_PREEMPTED, f"the worker {host} was deleted or evicted")
    for host in sorted(silent):
        return Cause(
            Outcome.LOST,
            EXIT_FAILURE,
            f"the worker {host} no longer answers: its node is lost or cut off",
            nodes=(_node(before, host),),
        )
    return None


def _node(reports: WorkerReports, host: str) -> str:
    report = reports.get(host)
    return report.node or host if report is not None else host


def _failure(sentence: str) -> Cause:
    return Cause(Outcome.FAILURE, EXIT_FAILURE, sentence)
