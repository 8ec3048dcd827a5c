"""Why an attempt ended. Pure.

mpirun combines the exit codes of all ranks into one (Hydra takes the bitwise or), so there are three sources: the
exit status of each rank as far as mpirun reports it, the `failure` event that a rank writes when it can, and
mpirun's own exit code.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ortflow.launchers.records import Outcome
from ortflow.manifests.local import MpiKind
from ortflow.workflow.errors import EXIT_DONE, EXIT_PREEMPTED, EXIT_USER, signal_name

_HYDRA_CODES = re.compile(r"Exit codes: \[[^\]]*\] ([-\d,]+)")
_HYDRA_FIRST = re.compile(r"PID (\d+) RUNNING AT")
_OPENMPI_SIGNAL = re.compile(r"process rank (\d+) with PID \d+ on node \S+\s+exited on\s+signal (\d+)")
_OPENMPI_CODE = re.compile(r"Process name: \[\S+?,(\d+)\]\s+Exit code:\s+(\d+)")
SAVED = "saved and stopped"
_LEAVE = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGALRM)
"""Signals that ask a rank to stop, or with which it leaves an MPI that blocks."""


@dataclass(frozen=True)
class Cause:
    """How an attempt ended and why, for the records and for messages."""

    outcome: Outcome
    exit_code: int
    sentence: str
    rank: int | None = None
    """The rank that ended first, if known."""
    reported: bool = False
    """Whether the rank itself recorded the cause."""
    hung: bool = False
    """Whether the attempt was ended because it made no progress."""
    waited_for: tuple[int, ...] = ()
    """The ranks of an attempt that hung for which the others wait, if that is known."""
    nodes: tuple[str, ...] = ()
    """The nodes that were lost, if they are known."""


def statuses(
    kind: MpiKind | None, returncode: int, output: str, pids: Mapping[int, int], order: Sequence[int] = ()
) -> dict[int, int]:
    """Exit status of the ranks that did not end with 0, as far as it is reported; minus the signal for killed ones.

    `kind` None: one rank without mpirun, `returncode` is its own. `output` is mpirun's output, `pids` the rank of
    each known process, `order` all ranks by their end, if known. Hydra mostly names the process that ended first,
    and kills the others itself. If that process is unknown, a rank that was not killed by SIGKILL is assumed to
    be the first.
    """
    if kind is None:
        return {0: returncode} if returncode else {}
    if kind == "mpich":
        codes = [int(code) for line in _HYDRA_CODES.findall(output) for code in line.split(",")]
        ended = {rank: _from_wait_status(status) for rank, status in enumerate(codes) if status}
        named_ranks = [pids[int(pid)] for pid in _HYDRA_FIRST.findall(output) if int(pid) in pids]
        first = next((rank for rank in (*order, *named_ranks) if rank in ended), None)
        if first is None:
            return {rank: code for rank, code in ended.items() if code != -signal.SIGKILL} or ended
        return {rank: code for rank, code in ended.items() if rank == first or code > 0}
    signals = {int(rank): -int(number) for rank, number in _OPENMPI_SIGNAL.findall(output)}
    return signals or {int(rank): int(code) for rank, code in _OPENMPI_CODE.findall(output)}


def cause(
    returncode: int,
    ended: Mapping[int, int],
    failures: Mapping[int, Mapping[str, Any]],
    *,
    out_of_memory: bool = False,
) -> Cause:
    """Return why an attempt ended.

    `ended` is the result of `statuses`, `failures` the newest failure event of each rank in this attempt.
    """
    if returncode == EXIT_DONE and not failures:
        return Cause(Outcome.FINISHED, EXIT_DONE, "finished")
    killed = [rank for rank, status in ended.items() if status < 0 and -status not in _LEAVE]
    if killed:
        status = ended[killed[0]]
        subject = f"rank {killed[0]} was" if len(killed) == 1 else f"ranks {', '.join(map(str, killed))} were"
        memory = " (out of memory)" if out_of_memory and -status == signal.SIGKILL else ""
        sentence = f"{subject} killed by {signal_name(-status)}{memory}"
        return Cause(Outcome.FAILURE, status, sentence, killed[0] if len(killed) == 1 else None)

    def code_of(rank: int) -> int:
        return int(failures[rank].get("exit_code") or ended.get(rank) or returncode)

    def late(rank: int) -> tuple[bool, bool, float]:
        # A failure never causes wrong input on another rank, and a call to other ranks fails because one of them has.
        # Otherwise times decide, though nodes' clocks may differ.
        failure = failures[rank]
        return code_of(rank) != EXIT_USER, bool(failure.get("communication")), failure.get("time", 0.0)

    for rank in sorted(failures, key=late):
        failure, code = failures[rank], code_of(rank)
        if code not in (EXIT_DONE, EXIT_PREEMPTED):
            outcome = Outcome.USER_ERROR if code == EXIT_USER else Outcome.FAILURE
            return Cause(outcome, code, str(failure.get("reason", f"rank {rank} failed")), rank, reported=True)
    for rank, status in sorted(ended.items()):
        if status > 0 and status not in (EXIT_PREEMPTED, EXIT_USER):
            return Cause(Outcome.FAILURE, status, f"rank {rank} ended with exit code {status}", rank)
    for rank, status in sorted(ended.items()):
        if status == EXIT_USER:
            return Cause(Outcome.USER_ERROR, status, f"rank {rank} ended with exit code {status}", rank)
    if ended:
        status, rank = min((status, rank) for rank, status in ended.items())
        if status < 0:
            return Cause(Outcome.PREEMPTED, EXIT_PREEMPTED, f"rank {rank} was ended by {signal_name(-status)}", rank)
        return Cause(Outcome.PREEMPTED, EXIT_PREEMPTED, SAVED)
    if returncode < 0:
        return Cause(Outcome.FAILURE, returncode, f"mpirun was killed by {signal_name(-returncode)}")
    if returncode == EXIT_PREEMPTED:
        return Cause(Outcome.PREEMPTED, EXIT_PREEMPTED, SAVED)
    if returncode == EXIT_USER:
        return Cause(Outcome.USER_ERROR, EXIT_USER, f"the ranks ended with exit code {EXIT_USER}")
    return Cause(Outcome.FAILURE, returncode, f"the ranks ended with exit code {returncode}")


def agreed(ends: Mapping[int, str], world_size: int) -> Cause | None:
    """The end of an attempt as recorded by every rank; None if a record is missing or they differ. Pure.

    It takes precedence over the process manager: Hydra's exit codes have named a rank as killed by SIGKILL that was
    leaving MPI with the others.
    """
    if len(ends) < world_size or len(set(ends.values())) > 1:
        return None
    if "finished" in ends.values():
        return Cause(Outcome.FINISHED, EXIT_DONE, "finished")
    return Cause(Outcome.PREEMPTED, EXIT_PREEMPTED, SAVED)


def _from_wait_status(status: int) -> int:
    """Like os.waitstatus_to_exitcode, for the statuses with which a process can end."""
    number = status & 0x7F
    return -number if number else (status >> 8) & 0xFF
