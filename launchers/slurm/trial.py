"""The trial job of `ortflow doctor --job`: submit, wait, collect the nodes' reports, remove everything.

The nodes report through files in a folder beside the runs; a missing report is also a finding, since Slurm lists
the job's nodes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ortflow.launchers.batch.history import COMMENT
from ortflow.launchers.file_system import existing
from ortflow.launchers.findings import Finding, fault, from_error, warning
from ortflow.launchers.interpreter import NEEDED
from ortflow.launchers.slurm import nccl_report, node_report
from ortflow.launchers.slurm.commands import NoAnswer, Refused
from ortflow.launchers.slurm.jobs import Job
from ortflow.launchers.slurm.reasons import explain
from ortflow.launchers.slurm.refusals import refusal
from ortflow.launchers.slurm.sbatch import settings
from ortflow.launchers.slurm.survey import Survey
from ortflow.launchers.stop import taken_over
from ortflow.manifests.slurm.trial import LIMIT, script
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.system.runtimes import RUNTIMES

if TYPE_CHECKING:
    from ortflow.manifests.slurm import Placement
    from ortflow.workflow.spec.run import RunSpec

PREFIX = ".ortflow-doctor-"
PAUSE = 0.5
"""Seconds between two polls of the queue."""
OVERDUE = 60.0
"""Seconds over its limit that Slurm may take to end a job."""
LAG = 10.0
"""Seconds for the nodes' files to become visible here after the job's end."""

Report = Callable[[str], None]


@dataclass
class Results:
    """The results of a trial job."""

    job: Job
    nodes: list[str]
    """The job's nodes, the batch step's first."""
    waited: float
    """Seconds until it started."""
    submitted: float
    """Unix time here."""
    collected: float
    """Unix time here."""
    locked: bool
    """A lock was held here for as long as the job ran."""
    seen: dict[str, float | None] = field(default_factory=dict)
    """By node, its clock when it wrote its first file."""
    logs: dict[str, str] = field(default_factory=dict)
    """By node, the output of its program; also of `run_supervisor`, `ranks` and the whole `job`."""
    codes: dict[str, int] = field(default_factory=dict)
    """Exit codes by the same names."""
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By node."""
    ranks: list[dict[str, Any]] = field(default_factory=list)


class NotRun(Exception):
    """The job gave no report; `finding` explains why."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        super().__init__(str(finding))


def run_trial(
    spec: RunSpec, placement: Placement, paths: list[str], slurm: Survey, wait: float, report: Report
) -> tuple[Results, list[Finding]]:
    """Run the job of a `trial_spec` and collect its reports; returns findings in addition to those from the reports.

    `placement.run_dir` is the run directory; `paths` are files that every node must see. Raises NotRun.
    """
    parent = existing(placement.run_dir.parent)
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    except OSError as error:
        raise NotRun(
            fault("run directory", f"{parent} cannot be written here: {error.strerror}", "give another run_dir")
        ) from error
    leftovers: list[Finding] = []
    try:
        with taken_over(_leave), _lock(folder / "lock") as locked:
            _lay_out(folder, spec, paths)
            results = _run(folder, spec, replace(placement, run_dir=folder), slurm, wait, report)
        results.locked = locked
    finally:
        if not _remove(folder):
            leftovers.append(warning("run directory", f"{folder} could not be removed", "remove it"))
    return results, leftovers


def _leave(number: int, frame: FrameType | None) -> None:
    raise OrtflowError(f"stopped by {signal.Signals(number).name}; the trial job was cancelled")


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold a lock that every node tries to take."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = True
        except OSError:
            is_held = False
        yield is_held


def _lay_out(folder: Path, spec: RunSpec, paths: list[str]) -> None:
    for module in (node_report, nccl_report):
        source = Path(str(module.__file__))
        shutil.copyfile(source, folder / source.name)
    request = {"packages": [*RUNTIMES, *NEEDED], "paths": paths, "gpus": spec.resources.gpus_per_rank}
    (folder / "request.json").write_text(json.dumps(request))


def _run(folder: Path, spec: RunSpec, placement: Placement, slurm: Survey, wait: float, report: Report) -> Results:
    text = script(spec, placement)
    file = folder / "job.sh"
    file.write_text(text)
    submitted, begun = time.time(), time.monotonic()
    job_id: str | None = None
    try:
        try:
            # A SBATCH_SIGNAL of the user would be sent to the programs of the trial, which do not handle it.
            job_id = slurm.submit(str(file), {**settings(text, os.environ, Path.cwd()), "SBATCH_SIGNAL": None})
        except Refused as error:
            raise NotRun(from_error("job", refusal(error.message))) from error
        job = _until_started(slurm, job_id, begun + wait, wait, report)
        waited = time.monotonic() - begun
        job = _until_ended(slurm, job, report)
    except NoAnswer as error:
        raise NotRun(fault("job", str(error))) from error
    finally:
        _cancel(slurm, job_id, placement.submission)
    nodes = slurm.hostnames(job.nodes) if job.nodes else []
    end = time.monotonic() + LAG
    while True:
        results = _collect(folder, Results(job, nodes, waited, submitted, time.time(), locked=False))
        if not (set(nodes) - set(results.reports)) or time.monotonic() > end:
            return results
        if all(node in results.codes for node in nodes) or job.code:
            end = min(end, time.monotonic() + LAG / 5)
        time.sleep(PAUSE)


def _until_started(slurm: Survey, job_id: str, end: float, wait: float, report: Report) -> Job:
    message = ""
    while True:
        job = slurm.job(job_id)
        if job is None:
            raise NotRun(fault("job", f"Slurm does not know job {job_id} any more"))
        if not job.waits:
            return job
        reason = explain(job.reason)
        if reason.never:
            # The rest of the fix applies only to a job that is still in the queue.
            fix = reason.fix.partition("cancel the run")[0].rstrip(": ")
            raise NotRun(fault("job", f"job {job_id} would never start: {reason.message}; it was cancelled", fix))
        if time.monotonic() >= end:
            text = f"job {job_id} was still pending after {wait:g} s: {reason.message}; it was cancelled"
            raise NotRun(warning("job", text, "wait longer with --wait, or try again later"))
        if reason.message != message:
            report(f"job {job_id}: {reason.message}" if job.reason else f"job {job_id} is in the queue")
            message = reason.message
        time.sleep(PAUSE)


def _until_ended(slurm: Survey, job: Job, report: Report) -> Job:
    report(f"job {job.id} runs on {job.nodes}")
    end = time.monotonic() + LIMIT + OVERDUE
    newest = job
    while newest.active:
        if newest.waits:
            raise NotRun(warning("job", f"job {job.id} was preempted or lost its nodes", "try again later"))
        if time.monotonic() >= end:
            raise NotRun(fault("job", f"job {job.id} does not end, though its time limit is over"))
        time.sleep(PAUSE)
        newest = slurm.job(job.id) or replace(newest, state="UNKNOWN")
    return replace(newest, nodes=newest.nodes or job.nodes)


def _cancel(slurm: Survey, job_id: str | None, submission: str) -> None:
    """Cancel the job; one whose submission got no answer is found by its comment."""
    with suppress(OrtflowError):
        if job_id is None:
            for job in slurm.mine():
                if job.comment.split()[:2] == [COMMENT, submission]:
                    slurm.cancel(job.id)
        elif (trial_job := slurm.job(job_id)) is not None and trial_job.active:
            slurm.cancel(job_id)


def _collect(folder: Path, results: Results) -> Results:
    node_report.afresh(str(folder))
    for file in sorted(folder.iterdir()):
        name, kind = file.stem, file.suffix
        with suppress(OSError, ValueError, RecursionError):
            if kind == ".seen":
                results.seen[name] = _number(file.read_text())
            elif kind == ".log":
                results.logs[name] = file.read_text(errors="replace")
            elif kind == ".code":
                results.codes[name] = int(file.read_text())
            elif kind == ".json" and name.endswith(".node"):
                results.reports[name.removesuffix(".node")] = json.loads(file.read_text())
            elif kind == ".json" and name.endswith(".rank"):
                results.ranks.append(json.loads(file.read_text()))
    return results


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _remove(folder: Path) -> bool:
    """Whether it is gone."""
    # A network file system keeps the names of files that a dying process still has open.
    for _ in range(10):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return True
        time.sleep(PAUSE)
    return False
