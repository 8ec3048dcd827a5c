"""A launcher for a spool: a job is a process on this machine that outlives its submitter."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from ortflow.launchers.base import Submission
from ortflow.launchers.findings import Finding, fault, ok
from ortflow.launchers.interpreter import locate
from ortflow.launchers.logs import log_lines
from ortflow.launchers.records import next_attempt
from ortflow.launchers.run_directory_lock import opened
from ortflow.launchers.status import RunStatus, read_status
from ortflow.launchers.stop import write_request
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.file.installed import options_of
from ortflow.workflow.spec.run import RunSpec
from ortflow_spool.options import SpoolOptions

QUEUES = ("short", "long")


@dataclass(frozen=True)
class SpoolRequest:
    """The command line of a job."""

    submission: Submission
    options: SpoolOptions

    @property
    def rank(self) -> list[str]:
        spec, run = self.submission.spec, self.submission.run
        return [*self.options.wrapper, locate(spec.resources.python), "-m", "ortflow.workflow.rank", str(run.root)]

    def __str__(self) -> str:
        return f"# queue {self.options.queue}, priority {self.options.priority}\n{shlex.join(self.rank)}"


class SpoolLauncher:
    """Runs in the spool."""

    def request(self, submission: Submission) -> SpoolRequest:
        return SpoolRequest(submission, options_of(submission.spec, "spool", SpoolOptions))

    def submit(self, request: SpoolRequest) -> str:
        with opened(request.submission) as ours:
            run = ours.run
            run.stop_request.unlink(missing_ok=True)
            attempt = next_attempt(run.read_attempts())
            (run.root / ".launcher").mkdir(exist_ok=True)
            (run.root / ".launcher" / "job").write_text(f"{request}\n")
            command = [sys.executable, "-m", "ortflow_spool.job", str(run.root), str(attempt), *request.rank]
            nothing = subprocess.DEVNULL
            job = subprocess.Popen(
                command, start_new_session=True, stdin=nothing, stdout=nothing, stderr=nothing, cwd="/"
            )
            ours.handed_over = True
            run.record_attempt(event="submit", launcher="spool", job=str(job.pid))
        return f"spool://{job.pid}"

    def status(self, run: RunDir) -> RunStatus:
        jobs = [record["job"] for record in run.read_attempts() if record.get("event") == "submit"]
        return read_status(run, alive=bool(jobs) and psutil.pid_exists(int(jobs[-1])))

    def logs(self, run: RunDir, *, attempt: int | None, rank: int, follow: bool) -> Iterator[str]:
        return log_lines(run, attempt=attempt, rank=rank, active=lambda: follow and self.status(run).state.active)

    def cancel(self, run: RunDir, *, now: bool) -> bool:
        if not self.status(run).state.active:
            return False
        write_request(run.stop_request, "cancel", now=now)
        return True

    def validate(self, spec: RunSpec, source: Mapping[str, Any], *, chosen: bool) -> None:
        queue = options_of(spec, "spool", SpoolOptions).queue
        if queue not in QUEUES:
            raise UserError(
                f"there is no queue {queue}", where="backends.spool.queue", fix=f"use {' or '.join(QUEUES)}"
            )

    def examine(self, submission: Submission, *, file: bool, overrides: bool) -> Iterator[Finding]:
        yield ok("spool", f"has the queues {', '.join(QUEUES)}")
        if file:
            queue = options_of(submission.spec, "spool", SpoolOptions).queue
            yield ok("queue", f"{queue} takes jobs") if queue in QUEUES else fault("queue", f"there is no {queue}")
