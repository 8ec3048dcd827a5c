"""Grid Engine's commands, and its jobs as they are printed."""

from __future__ import annotations

import getpass
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from xml.etree import ElementTree

from ortflow.launchers.batch import scheduler
from ortflow.manifests.batch import SCRIPT
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.run.rundir import write_atomically
from ortflow.workflow.system.disk_space import is_full, out_of_disk

PATIENCE = 20.0
"""Seconds for one command."""
_AWAY = re.compile(r"unable to (?:send message to|contact) qmaster|commlib error|denied: qmaster is shutting down")
_FIELD = re.compile(r"^(job_number|context|hard resource_list): +(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Job:
    """A job in the queue."""

    id: str
    state: str
    """Letters of qstat: qw, r, Rq, dr, s, …"""
    comment: str = ""
    nodes: str = ""
    start: float | None = None
    limit: float | None = None
    """Seconds that it may run (h_rt)."""
    array: None = None
    active = True

    @property
    def number(self) -> int:
        return int(self.id)

    @property
    def waits(self) -> bool:
        return "q" in self.state

    @property
    def suspended(self) -> bool:
        return bool(set("sST") & set(self.state))

    @property
    def ending(self) -> bool:
        return "d" in self.state

    @property
    def restarts(self) -> int:
        return int("R" in self.state)

    @property
    def end(self) -> float | None:
        return None if self.start is None or self.limit is None else self.start + self.limit


class NoAnswer(scheduler.NoAnswer):
    """The qmaster is dead, hung or unreachable."""

    who = "Grid Engine"


class GridEngine(scheduler.Scheduler[Job]):
    """The cluster, through its commands; `before` is called in each of their processes."""

    launcher, name, submit_command = "gridengine", "Grid Engine", "qsub"

    def __init__(self, before: Callable[[], None] | None = None) -> None:
        self._before = before

    def mine(self, seconds: float | None = None) -> Sequence[Job]:
        listed = ElementTree.fromstring(self.run("qstat", "-xml", "-u", getpass.getuser(), seconds=seconds).stdout)
        found = [read_job(job) for job in listed.iter("job_list")]
        if not found:
            return []
        details = read_details(self.run("qstat", "-j", ",".join(job.id for job in found), seconds=seconds).stdout)
        return [
            replace(job, comment=details[job.id][0], limit=details[job.id][1]) for job in found if job.id in details
        ]

    def hand_over(self, folder: Path, script: str) -> str:
        path = folder / self.folder / SCRIPT
        try:
            for made in (path.parent, folder / "logs"):
                made.mkdir(exist_ok=True)
            write_atomically(path, script.encode())
        except OSError as error:
            raise out_of_disk(error, default=folder) if is_full(error) else error from error
        return self.submit(path)

    def submit(self, script: Path, *options: str) -> str:
        """qsub a script; returns the job's id. Raises Refused."""
        done = self.run("qsub", "-terse", *options, str(script))
        if done.returncode:
            raise scheduler.Refused(" ".join(done.stderr.split()))
        return done.stdout.split()[-1]

    def cancel(self, *job_ids: str, pending: bool = False) -> None:
        started = {job.id for job in self.mine() if not job.waits} if pending else set()
        for job_id in set(job_ids) - started:
            done = self.run("qdel", job_id)
            if done.returncode and "does not exist" not in done.stdout:
                raise OrtflowError(f"qdel failed: {done.stdout.strip()}")

    def was_not_sent(self, message: str) -> bool:
        return "Connection refused" in message

    def waiting(self, job: Job) -> str | None:
        if job.waits:
            if "E" in job.state:
                return f"will never start by itself: its last start failed; `qmod -cj {job.id}` tries again"
            if "h" in job.state:
                return f"it is held; `qrls {job.id}` releases it"
            return "waits for a free queue"
        if job.suspended:
            return "Grid Engine has suspended it"
        return "Grid Engine ends the job" if job.ending else None

    def run(self, *command: str, seconds: float | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command. Raises NoAnswer, and UserError if Grid Engine is not installed."""
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
                timeout=seconds or PATIENCE, preexec_fn=self._before, start_new_session=self._before is not None,
            )  # fmt: skip
        except FileNotFoundError as error:
            raise UserError(f"Grid Engine is not installed here: there is no {command[0]}") from error
        except subprocess.TimeoutExpired as error:
            raise NoAnswer(f"{command[0]} had no answer") from error
        if done.returncode and _AWAY.search(done.stderr + done.stdout):
            raise NoAnswer("; ".join(done.stderr.splitlines()))
        return done


def read_job(job: ElementTree.Element) -> Job:
    """A job of `qstat -xml`. Pure."""
    start, queue = job.findtext("JAT_start_time"), job.findtext("queue_name") or ""
    return Job(
        id=job.findtext("JB_job_number", ""),
        state=job.findtext("state", ""),
        nodes=queue.partition("@")[2],
        start=datetime.fromisoformat(start).timestamp() if start else None,
    )


def read_details(text: str) -> dict[str, tuple[str, float | None]]:
    """Comment and time limit of the jobs of `qstat -j`, by id. Pure."""
    found = {}
    for fields in map(dict, map(_FIELD.findall, text.split("=" * 62))):
        context = re.search(r"\bortflow=(\w[\w-]*)", fields.get("context", ""))
        limit = re.search(r"\bh_rt=(\d+)", fields.get("hard resource_list", ""))
        comment = f"ortflow {context[1]}" if context else ""
        found[fields.get("job_number", "")] = (comment, float(limit[1]) if limit else None)
    return found
