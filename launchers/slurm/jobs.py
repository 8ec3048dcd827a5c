"""Slurm's jobs as squeue, scontrol and sacct print them. Pure.

All three are asked for times as seconds (SLURM_TIME_FORMAT=%s): the zone of the machine that prints does not matter.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

SEPARATOR = "\x1f"
"""Between fields: stands in no name and no comment."""
_SQUEUE_FIELDS = (
    "JobArrayID", "ArrayJobID", "State", "Reason", "StartTime", "EndTime", "TimeLimit", "NodeList", "RestartCnt",
    "exit_code", "Name", "Comment", "SubmitTime", "Dependency",
)  # fmt: skip
FORMAT = ",".join(f"{field}:{SEPARATOR}" for field in _SQUEUE_FIELDS)
"""For `squeue --Format`."""
SACCT_FIELDS = "JobID,State,Start,End,Timelimit,NodeList,ExitCode,JobName,Comment,Submit"

_DURATION = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d\d)")

WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
"""States before a start, the first or another."""
AT_WORK = frozenset(
    {
        "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING",
        "POWER_UP_NODE",
    }
)  # fmt: skip
"""States with nodes in hand."""


@dataclass(frozen=True)
class Job:
    """A job at one moment; None and empty where Slurm does not say."""

    id: str
    """123, or 123_4 for a task of an array."""
    array: str | None
    """The array's id, of a task of one."""
    state: str
    """Slurm's word, in capitals."""
    reason: str = ""
    """Why it waits, or why it ended."""
    start: float | None = None
    """Unix time; of a waiting job when Slurm expects it to start."""
    end: float | None = None
    """Unix time; of a running job when its time limit ends it."""
    limit: float | None = None
    """Seconds."""
    nodes: str = ""
    """As Slurm writes them: node[1-2]."""
    restarts: int = 0
    code: int = 0
    signal: int = 0
    """What ended the batch script, if a signal did; 53 means that it never began."""
    name: str = ""
    comment: str = ""
    submitted: float | None = None
    dependency: str = ""
    """What it still waits for: afterok:12(unfulfilled)."""

    @property
    def waits(self) -> bool:
        """Not started yet, or not again."""
        return self.state in WAITING

    @property
    def active(self) -> bool:
        """Waits or is at work: will end without being touched."""
        return self.waits or self.state in AT_WORK

    @property
    def number(self) -> int:
        """Its place among all jobs: newer ones have larger ones."""
        return int(self.id.partition("_")[0])


def read_squeue(text: str) -> list[Job]:
    """Jobs of `squeue --noheader --array --Format=FORMAT`."""
    jobs = []
    for line in text.splitlines():
        values = line.split(SEPARATOR)
        if len(values) <= len(_SQUEUE_FIELDS) - 1:
            continue
        told = dict(zip(_SQUEUE_FIELDS, map(str.strip, values), strict=False))
        code, signal = _exit(told["exit_code"])
        jobs.append(
            Job(
                id=told["JobArrayID"],
                array=told["ArrayJobID"] if "_" in told["JobArrayID"] else None,
                state=told["State"],
                reason=_known(told["Reason"]),
                start=_time(told["StartTime"]),
                end=_time(told["EndTime"]),
                limit=read_seconds(told["TimeLimit"]),
                nodes=_known(told["NodeList"]),
                restarts=_count(told["RestartCnt"]),
                code=code,
                signal=signal,
                name=told["Name"],
                comment=_known(told["Comment"]),
                submitted=_time(told["SubmitTime"]),
                dependency=_known(told["Dependency"]),
            )
        )
    return jobs


def read_scontrol(text: str) -> list[Job]:
    """Jobs of `scontrol show job --oneliner`."""
    return [_from_scontrol(line) for line in text.splitlines() if line.startswith("JobId=")]


def _from_scontrol(line: str) -> Job:
    # Values hold spaces, and a comment may hold anything: the first of each key is Slurm's.
    told: dict[str, str] = {}
    for key, value in re.findall(r"(?:^| )([A-Z][\w/:]*)=(.*?)(?=\s+[A-Z][\w/:]*=|\s*$)", line):
        told.setdefault(key, value)
    array, task = told.get("ArrayJobId"), told.get("ArrayTaskId", "")
    code, signal = _exit(told.get("ExitCode", ""))
    return Job(
        id=f"{array}_{task}" if array and task.isdigit() else told["JobId"],
        array=array if task.isdigit() else None,
        state=told.get("JobState", "UNKNOWN").split()[0],
        reason=_known(told.get("Reason", "")),
        start=_time(told.get("StartTime", "")),
        end=_time(told.get("EndTime", "")),
        limit=read_seconds(told.get("TimeLimit", "")),
        nodes=_known(told.get("NodeList", "")),
        restarts=_count(told.get("Restarts", "")),
        code=code,
        signal=signal,
        name=told.get("JobName", ""),
        comment=_known(told.get("Comment", "")),
        submitted=_time(told.get("SubmitTime", "")),
        dependency=_known(told.get("Dependency", "")),
    )


def read_sacct(text: str) -> list[Job]:
    """Jobs of `sacct -X -P -n --delimiter=SEPARATOR --format=SACCT_FIELDS`, oldest life first."""
    jobs = []
    names = SACCT_FIELDS.split(",")
    for line in text.splitlines():
        values = line.split(SEPARATOR)
        if len(values) != len(names):
            continue
        told = dict(zip(names, map(str.strip, values), strict=True))
        code, signal = _exit(told["ExitCode"])
        state, _, by = told["State"].partition(" ")
        array, _, task = told["JobID"].partition("_")
        jobs.append(
            Job(
                id=told["JobID"],
                array=array if task else None,
                state=state,
                reason=by,
                start=_time(told["Start"]),
                end=_time(told["End"]),
                limit=read_seconds(told["Timelimit"]),
                nodes="" if told["NodeList"] == "None assigned" else told["NodeList"],
                code=code,
                signal=signal,
                name=told["JobName"],
                comment=told["Comment"],
                submitted=_time(told["Submit"]),
            )
        )
    return jobs


def _known(text: str) -> str:
    return "" if text in ("None", "(null)", "N/A", "Unknown") else text


def _count(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _exit(text: str) -> tuple[int, int]:
    """Exit code and signal; squeue prints what wait() returned, the others CODE:SIGNAL."""
    code, colon, signal = text.partition(":")
    if colon:
        return _count(code), _count(signal)
    status = _count(text)
    return (0, status & 0x7F) if status & 0x7F else (status >> 8, 0)


def _time(text: str) -> float | None:
    if text.isdigit():
        return float(text) or None
    with suppress(ValueError):
        return datetime.fromisoformat(text).timestamp()
    return None


def read_seconds(text: str) -> float | None:
    """Seconds of Slurm's [days-][[hours:]minutes:]seconds; None for its words, such as UNLIMITED. Pure."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24.0 + hours) * 60 + minutes) * 60 + seconds
