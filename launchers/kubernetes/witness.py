"""What workers say of themselves on the volume, and what the keeper concludes when ranks have ended without a word.

An exit code of mpirun does not tell a deleted pod from a crashed one, and the two count differently: one that was taken
away is nobody's failure, one that ran out of memory is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ortflow.launchers.cause import Cause
from ortflow.launchers.kubernetes.pod import Pod
from ortflow.launchers.records import Outcome
from ortflow.workflow.errors import EXIT_FAILURE, EXIT_PREEMPTED
from ortflow.workflow.rundir import write_atomically


@dataclass(frozen=True)
class Witness:
    """A worker at one moment."""

    address: str
    """Of its pod: another pod of the same name has another."""
    started: float
    """Unix time at which its container began."""
    leaving: bool = False
    """It was told to end."""
    out_of_memory: int = 0
    """Kills for want of memory since then."""
    key: str = ""
    """Of the key that opens it, a digest; empty where it does not say."""


Witnesses = Mapping[str, Witness | None]
"""By host; None for one that has said nothing."""


def tell(pod: Pod, host: str, witness: Witness) -> None:
    """Put a worker's word on the volume."""
    write_atomically(pod.witness(host), json.dumps(asdict(witness)).encode())


def hear(pod: Pod, hosts: Iterable[str]) -> dict[str, Witness | None]:
    """What each host's worker said last."""
    return {host: _read(pod, host) for host in hosts}


def other_key(pod: Pod, host: str, key: str) -> bool:
    """Whether a host's worker takes another ssh key than one whose digest is `key`: the Secret was replaced."""
    said = _read(pod, host)
    return said is not None and bool(said.key and key) and said.key != key


def key_digest(folder: Path) -> str:
    """A digest of the key that a pod's ssh daemon takes, of the folder where the operator's keys are; empty if none."""
    try:
        return hashlib.sha256((folder / "authorized_keys").read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def leaves(pod: Pod, host: str, address: str) -> bool:
    """Whether the pod that answers for the host at an address has said that it was told to end."""
    said = _read(pod, host)
    return said is not None and said.leaving and said.address == address


def _read(pod: Pod, host: str) -> Witness | None:
    try:
        values = json.loads(pod.witness(host).read_text())
        return Witness(**values)
    except (OSError, ValueError, TypeError):
        return None


def conclude(before: Witnesses, after: Witnesses, silent: Iterable[str]) -> Cause | None:
    """Why ranks ended, where that lies with their workers; None where it does not. Pure.

    `before` as of the attempt's start; `silent` are the hosts that cannot be reached now.
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
            return Cause(Outcome.PREEMPTED, EXIT_PREEMPTED, f"the worker {host} was taken away")
    for host in sorted(silent):
        return Cause(
            Outcome.LOST, EXIT_FAILURE, f"the worker {host} does not answer any more: its node is lost, or cut off"
        )
    return None


def _failure(sentence: str) -> Cause:
    return Cause(Outcome.FAILURE, EXIT_FAILURE, sentence)
