"""Slurm's jobs as squeue, scontrol and sacct print them. Pure.

All three print times as seconds (SLURM_TIME_FORMAT=%s), independent of the machine's time zone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

SEPARATOR = "\x1f"
"""Separates fields: never part of a name or a comment."""
_SQUEUE_FIELDS = (
    "JobArrayID", "ArrayJobID", "State", "Reason", "StartTime", "EndTime", "TimeLimit", "NodeList", "RestartCnt",
    "exit_code", "Name", "Comment", "SubmitTime", "Dependency", "PreemptTime",
)  # fmt: skip
# A suffix without a size makes squeue print the whole value: without a suffix it cuts each to 20 characters.
FORMAT = ",".join(f"{field}:{SEPARATOR}" for field in _SQUEUE_FIELDS)
"""For `squeue --Format`."""
SACCT_FIELDS = "JobID,State,Start,End,Timelimit,NodeList,ExitCode,JobName,Comment,Submit"
_SACCT_NAMES = (
    "JobArrayID", "State", "StartTime", "EndTime", "TimeLimit", "NodeList", "exit_code", "Name", "Comment",
    "SubmitTime",
)  # fmt: skip
"""What squeue calls these fields."""

_DURATION = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d\d)")

WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
"""States before the first or a later start."""
AT_WORK = frozenset(
    {
        "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING",
        "POWER_UP_NODE",
    }
)  # fmt: skip
"""States with allocated nodes."""


@dataclass(frozen=True)
class Job:
    """A job at one moment; None or empty if Slurm does not report it."""

    id: str
    """123, or 123_4 for a task of an array."""
    array: str | None
    """The array's id, for a task of an array."""
    state: str
    """Slurm's state, in capitals."""
    reason: str = ""
    """Why it waits, or why it ended."""
    start: float | None = None
    """Unix time; for a pending job, when Slurm expects it to start."""
    end: float | None = None
    """Unix time; for a running job, when its time limit ends it."""
    limit: float | None = None
    """Seconds."""
    nodes: str = ""
    """As Slurm writes them: node[1-2]."""
    restarts: int = 0
    code: int = 0
    signal: int = 0
    """What ended the batch script, if a signal did; 53 means that it never started."""
    name: str = ""
    comment: str = ""
    submitted: float | None = None
    dependency: str = ""
    """Its unfinished dependencies: afterok:12(unfulfilled)."""
    preempted: bool = False
    """Whether it is being preempted, or was; sacct does not report it."""

    @property
    def waits(self) -> bool:
        """Not started yet, or not restarted yet."""
        return self.state in WAITING

    @property
    def active(self) -> bool:
        """Pending or running: it will end by itself."""
        return self.waits or self.state in AT_WORK

    @property
    def suspended(self) -> bool:
        """Its processes are stopped."""
        return self.state in ("SUSPENDED", "STOPPED")

    @property
    def ending(self) -> bool:
        """Slurm ends its processes."""
        return self.state == "COMPLETING"

    @property
    def number(self) -> int:
        """Its order among all jobs; newer jobs have larger numbers."""
        return int(self.id.partition("_")[0])


def read_squeue(text: str) -> list[Job]:
    """Jobs of `squeue --noheader --array --Format=FORMAT`."""
    rows = (line.split(SEPARATOR) for line in text.splitlines())
    return [_job(dict(zip(_SQUEUE_FIELDS, row, strict=False))) for row in rows if len(row) >= len(_SQUEUE_FIELDS)]


def read_scontrol(text: str) -> list[Job]:
    """Jobs of `scontrol show job --oneliner`."""
    return [_from_scontrol(line) for line in text.splitlines() if line.startswith("JobId=")]


def _from_scontrol(line: str) -> Job:
    # Values hold spaces, and a comment may hold anything: the first of each key is Slurm's.
    fields: dict[str, str] = {}
    for key, value in re.findall(r"(?:^| )([A-Z][\w/:]*)=(.*?)(?=\s+[A-Z][\w/:]*=|\s*$)", line):
        fields.setdefault(key, value)
    array, task = fields.get("ArrayJobId"), fields.get("ArrayTaskId", "")
    return _job(
        {
            **fields,
            "JobArrayID": f"{array}_{task}" if array and task.isdigit() else fields["JobId"],
            "State": fields.get("JobState", "UNKNOWN").split()[0],
            "RestartCnt": fields.get("Restarts", ""),
            "exit_code": fields.get("ExitCode", ""),
            "Name": fields.get("JobName", ""),
        }
    )


def read_sacct(text: str) -> list[Job]:
    """Jobs of `sacct -X -P -n --delimiter=SEPARATOR --format=SACCT_FIELDS`, oldest start first."""
    jobs = []
    for line in text.splitlines():
        if len(row := line.split(SEPARATOR)) == len(_SACCT_NAMES):
            fields = dict(zip(_SACCT_NAMES, row, strict=True))
            state, _, by = fields["State"].strip().partition(" ")
            nodes = fields["NodeList"].replace("None assigned", "")
            jobs.append(_job({**fields, "State": state, "Reason": by, "NodeList": nodes}))
    return jobs


def _job(columns: Mapping[str, str]) -> Job:
    """A job from its fields by the names of squeue."""
    fields = {name: value.strip() for name, value in columns.items()}
    number = fields["JobArrayID"]
    code, signal = _exit(fields["exit_code"])
    return Job(
        id=number,
        array=number.partition("_")[0] if "_" in number else None,
        state=fields["State"],
        reason=_known(fields.get("Reason", "")),
        start=_time(fields.get("StartTime", "")),
        end=_time(fields.get("EndTime", "")),
        limit=read_seconds(fields.get("TimeLimit", "")),
        nodes=_known(fields.get("NodeList", "")),
        restarts=_count(fields.get("RestartCnt", "")),
        code=code,
        signal=signal,
        name=fields["Name"],
        comment=_known(fields.get("Comment", "")),
        submitted=_time(fields.get("SubmitTime", "")),
        dependency=_known(fields.get("Dependency", "")),
        preempted=bool(_known(fields.get("PreemptTime", ""))),
    )


def _known(text: str) -> str:
    return "" if text in ("None", "(null)", "N/A", "Unknown") else text


def _count(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _exit(text: str) -> tuple[int, int]:
    """Exit code and signal."""
    # squeue prints what wait() returned, scontrol and sacct CODE:SIGNAL.
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
    """Seconds of Slurm's [days-][[hours:]minutes:]seconds; None for its keywords, such as UNLIMITED. Pure."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24.0 + hours) * 60 + minutes) * 60 + seconds
