"""Parses the messages of srun and slurmstepd when a step ends. Pure."""

from __future__ import annotations

import re
import signal

from ortflow.launchers.attempts.cause import Cause
from ortflow.launchers.records import Outcome
from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PREEMPTED, EXIT_USER

_ENDED = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+)$", re.MULTILINE)
_ABORTED = "srun: Job step aborted"
_CODE = re.compile(r"Exited with exit code (\d+)")
# By strsignal(3), in the locale C, except for Out Of Memory.
_SIGNALS = {
    "Killed": signal.SIGKILL,
    "Out Of Memory": signal.SIGKILL,
    "Terminated": signal.SIGTERM,
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Floating point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
    "Interrupt": signal.SIGINT,
    "Hangup": signal.SIGHUP,
    "Alarm clock": signal.SIGALRM,
    "User defined signal 1": signal.SIGUSR1,
    "User defined signal 2": signal.SIGUSR2,
}
_EXECVE = re.compile(r"execve\(\): (.+): (No such file or directory|Permission denied|Exec format error)")
_NODE_FAILURE = re.compile(r"Node failure on (\S+)")
_LAUNCH = re.compile(
    r"^srun: error: (?:task (?P<rank>\d+) launch failed|Task launch for \S+ failed on node (?P<node>\S+)): "
    r"(?P<why>.+)$",
    re.MULTILINE,
)
_SILENT = re.compile(r"^Communication |timed out|Zero Bytes|not respond|Connection (?:refused|reset)|No route to host")
_UNSEEN = re.compile(r"^error: (\S+ (?:does not see the run directory|finds no) .+?)(?=error: |$)", re.MULTILINE)
_STEP = re.compile(r"^srun: error: Unable to create step for job \d+: (.+)$", re.MULTILINE)
_ALLOCATION = re.compile(r"^srun: error: Unable to confirm allocation for job \S+: (.+)$", re.MULTILINE)
_AWAY = re.compile(r"Unable to contact slurm controller|timed out|Connection refused|Unexpected message", re.IGNORECASE)
_MPI_TYPE = re.compile(r"Invalid MPI type '(\S+)'")
_CANCELLED = re.compile(r"^slurmstepd\S*: error: \*\*\* STEP (\S+) ON \S+ CANCELLED AT \S+ \*\*\*", re.MULTILINE)
_DUE = re.compile(r"\*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT \S+ DUE TO (JOB REQUEUE|NODE FAILURE)\b")
_MEMORY = re.compile(r"oom[-_]kill|Out Of Memory|exceeded memory limit", re.IGNORECASE)


def first_end(output: str) -> dict[int, int]:
    """Exit status of the first task that srun reported (minus the signal for a killed one), by rank.

    Later ones were ended because of it (--kill-on-bad-exit), as are all after an aborted step: there a rank
    has had MPI end the others, and has recorded the cause.
    """
    for _, tasks, end in _ENDED.findall(output.partition(_ABORTED)[0]):
        status = _status(end)
        if status:
            return {int(re.split("[,-]", tasks)[0]): status}
    return {}


def never_launched(output: str) -> set[int]:
    """Ranks that srun could not start."""
    return {int(match["rank"] or 0) for match in _LAUNCH.finditer(output)}


def verdict(output: str, returncode: int) -> Cause | None:
    """The cause, if Slurm itself names one outside the ranks; None otherwise."""
    if match := _NODE_FAILURE.search(output):
        return Cause(Outcome.LOST, EXIT_FAILURE, f"node {match[1]} was lost", nodes=(match[1],))
    if match := _MPI_TYPE.search(output):
        return _wrong(
            f"this Slurm has no working --mpi={match[1]}: set backends.slurm.mpi to one that `srun --mpi=list` shows "
            "and that loads, or to mpirun"
        )
    if match := _EXECVE.search(output):
        node = next((name for name, _, end in _ENDED.findall(output) if _CODE.search(end)), None)
        place = f"on {node}" if node else "on a node"
        return _wrong(
            f"{match[1]} cannot be run {place} ({match[2].lower()}): the ranks' environment must be on storage that "
            "every node mounts; set resources.python to one that is"
        )
    if match := _UNSEEN.search(output):
        return _wrong(match[1])
    if match := _LAUNCH.search(output):
        if match["node"] and _SILENT.search(match["why"]):
            # Slurm has not detected it yet and would launch there again; a requeued job gets another node.
            return Cause(
                Outcome.LOST, EXIT_FAILURE, f"node {match['node']} did not answer Slurm's launch: {match['why']}",
                nodes=(match["node"],),
            )  # fmt: skip
        return Cause(Outcome.FAILURE, EXIT_FAILURE, f"Slurm could not launch the ranks: {match['why']}")
    if (match := _ALLOCATION.search(output) or _STEP.search(output)) and _AWAY.search(output):
        return Cause(
            Outcome.LOST, EXIT_FAILURE, f"the Slurm controller did not answer when the ranks were started: {match[1]}"
        )
    if match := _ALLOCATION.search(output):
        # A controller that died before it had stored the job's start treats the job as pending.
        return Cause(Outcome.LOST, EXIT_FAILURE, f"the Slurm controller has lost the job's state: {match[1]}")
    if match := _STEP.search(output):
        return Cause(Outcome.FAILURE, EXIT_FAILURE, f"Slurm could not create the step: {match[1]}")
    ended = first_end(output)
    rank = next(iter(ended), None)
    # The job itself ends as FAILED, not as OUT_OF_MEMORY (22.05, by cgroup as well as by OverMemoryKill).
    if rank is not None and ended[rank] == -signal.SIGKILL and _MEMORY.search(output):
        return Cause(Outcome.FAILURE, -signal.SIGKILL, f"rank {rank} was killed by SIGKILL (out of memory)", rank)
    return None


def cancelled(output: str, returncode: int) -> Cause | None:
    """The cause if a step was cancelled and its job was not; MPI's abort of all ranks looks the same to Slurm."""
    match = _CANCELLED.search(_ENDED.split(output)[0])
    if match is None or returncode in (EXIT_DONE, EXIT_PREEMPTED):
        return None
    return Cause(Outcome.FAILURE, returncode, f"the job's step {match[1]} was cancelled in Slurm, the job was not")


def taken_away(output: str) -> str | None:
    """Why Slurm has requeued a job, if not for a preemption; only slurmstepd reports it."""
    match = _DUE.search(output)
    if match is None:
        return None
    return "a user requeued the job" if match[1] == "JOB REQUEUE" else "a node of the job was lost"


def _status(end: str) -> int:
    if match := _CODE.search(end):
        return int(match[1])
    return next((-number for name, number in _SIGNALS.items() if end.startswith(name)), EXIT_FAILURE)


def _wrong(sentence: str) -> Cause:
    return Cause(Outcome.USER_ERROR, EXIT_USER, sentence)
