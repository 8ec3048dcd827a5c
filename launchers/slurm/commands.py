"""Slurm's commands, each with a time-out; a missing command or answer is one sentence.

Used on the submitting side. Every command goes through a `Runner`, so that a connection to another machine can
be inserted. Of a run it knows only the folder of the script.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ortflow.launchers.batch import scheduler
from ortflow.launchers.remote.arrival import location_text
from ortflow.launchers.slurm import endings, reasons, sbatch
from ortflow.launchers.slurm.jobs import (
    FORMAT,
    SACCT_FIELDS,
    SEPARATOR,
    Job,
    read_sacct,
    read_scontrol,
    read_seconds,
    read_squeue,
)
from ortflow.launchers.slurm.refusals import refusal
from ortflow.launchers.slurm.runner import Answer, Runner, Settings, run_here
from ortflow.launchers.slurm.site import listed, read_config
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.system.disk_space import is_full, out_of_disk

PATIENCE = 12.0
"""Seconds for one command: Slurm's own commands give up a hung controller after 10."""
GLANCE = 1.5
"""Seconds for a command of which only the start matters."""
SETTINGS = {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
"""For commands whose output is parsed: the same text and times on any machine and for any user."""
NEVER_A_JOB = "67108862"
"""Beyond the largest id that Slurm gives to a job (MaxJobId)."""


_AWAY = re.compile(
    # "Unexpected message received": `scontrol requeue` while slurmctld is down (22.05).
    r"Unable to contact slurm controller|Socket timed out|Connection (?:refused|timed out|reset)|Zero Bytes were|"
    r"Unexpected message received|in standby mode|connect failure|Transport endpoint|Unable to connect to database",
    re.IGNORECASE,
)
_UNCONFIGURED = re.compile(r"configuration source|cannot stat file|Unable to process configuration", re.IGNORECASE)
_UNDER_WAY = re.compile(r"pending execution|already (?:pending|requeued)", re.IGNORECASE)
# `sbatch --parsable` appends the name of a cluster that was chosen (SBATCH_CLUSTERS): 123;NAME.
_SUBMITTED = re.compile(r"(?:Submitted batch job )?(\d+)(?:;\S*)?\s*$")


class NoAnswer(scheduler.NoAnswer):
    """The controller is dead, hung or unreachable. The request may still have been carried out."""

    who = "the Slurm controller"


class NotInstalled(UserError):
    """There is no such command."""


class Refused(scheduler.Refused):
    """sbatch rejects the job; `message` is its reason."""


class Slurm(scheduler.Scheduler[Job]):
    """The cluster, through its commands. Every method raises NoAnswer, and UserError if Slurm is not installed.

    `clock` is the clock of every wait, `patience` the seconds that a command may take.
    """

    launcher, name, submit_command = "slurm", "Slurm", "sbatch"
    folder = sbatch.FOLDER

    def __init__(self, runner: Runner = run_here, clock: Clock = SYSTEM_CLOCK, patience: float = PATIENCE) -> None:
        self.runner, self.clock, self.patience = runner, clock, patience

    def hand_over(self, folder: Path, script: str) -> str:
        """sbatch a script from the run directory `folder`; the job's id.

        Raises as `submit` does, and OutOfDisk if the script found no room.
        """
        try:
            path = sbatch.lay_out(folder, script)
        except OSError as error:
            if is_full(error):
                raise out_of_disk(error, default=folder) from error
            raise
        job = self.submit(str(path), sbatch.settings(script, os.environ, Path.cwd()))
        sbatch.keep(folder, script, job)
        return job

    def was_not_sent(self, message: str) -> bool:
        """Whether sbatch reports that it reached no controller: nothing was submitted. Pure."""
        return sbatch.NOT_SENT.search(message) is not None

    def refusal(self, message: str) -> UserError:
        """Return the error for sbatch's refusal. Pure."""
        return refusal(message)

    def waiting(self, job: Job) -> str | None:
        if job.waits:
            return reasons.waits(job)
        if job.ending:
            return "Slurm ends the job, to restart it or finally"
        if job.suspended:
            return "Slurm has suspended it"
        return "its nodes are being prepared" if job.state == "CONFIGURING" else None

    def expected_start(self, job: Job) -> float | None:
        """When Slurm expects a pending job to start; it keeps the time from before the job was held. Pure."""
        return None if reasons.never_starts(job) else job.start

    def left_in_queue(self, job: Job) -> str:
        return reasons.left_in_queue(job)

    def cancelled(self, job: Job) -> str | None:
        return endings.cancelled(job)

    def ending(self, run: RunDir, job: Job | None, job_id: str | None) -> str:
        return endings.ending(run, job, job_id)

    def mine(self, seconds: float | None = None) -> list[Job]:
        """All jobs of this user, including those that ended a few minutes ago (MinJobAge): one call."""
        # Without --states squeue leaves out jobs that have ended, and without --array all pending tasks of an array are
        # one row.
        command = ["squeue", "--me", "--noheader", "--array", "--states=all", f"--Format={FORMAT}"]
        answer = self._run(command, SETTINGS, seconds)
        if answer.code:
            raise OrtflowError(f"squeue failed: {answer.message}")
        return read_squeue(answer.out)

    def job(self, job_id: str) -> Job | None:
        """A job by its id, from the controller, then from the accounting; None if neither knows it."""
        return self.queued(job_id) or self.accounted([job_id]).get(job_id)

    def queued(self, job_id: str) -> Job | None:
        """A job by its id, from the controller; None if that has forgotten it."""
        try:
            answer = self._read("scontrol", "show", "job", "--oneliner", job_id)
        except NotInstalled:
            # A site may not install scontrol on its compute nodes.
            return self.in_queue([job_id]).get(job_id)
        jobs = read_scontrol(answer.out) if answer.code == 0 else []
        return next((job for job in jobs if job.id == job_id), jobs[0] if jobs else None)

    def in_queue(self, job_ids: Sequence[str]) -> dict[str, Job]:
        if not job_ids:
            return {}
        command = ["squeue", f"--jobs={','.join(job_ids)}", "--noheader", "--array", "--states=all"]
        answer = self._read(*command, f"--Format={FORMAT}")
        # Of a single id that it does not know, squeue says so; of several, it omits those.
        return {job.id: job for job in read_squeue(answer.out)} if answer.code == 0 else {}

    def seconds_left(self, job_id: str) -> float | None:
        """Seconds until the time limit ends a running job; None if there is no limit."""
        answer = self._read("squeue", "--noheader", "--format=%L", f"--jobs={job_id}")
        return read_seconds(answer.out) if answer.code == 0 else None

    def requeue(self, job_id: str) -> None:
        """Queue a running job again, if it is not yet. Raises Refused."""
        answer = self._read("scontrol", "requeue", job_id)
        # For a task of an array scontrol writes it to standard output, beside what other programs write to the other.
        if answer.code and not _UNDER_WAY.search(f"{answer.err}\n{answer.out}"):
            raise Refused(answer.message)

    def script(self, job_id: str) -> str:
        """The batch script of a job."""
        answer = self._read("scontrol", "write", "batch_script", job_id, "-")
        if answer.code:
            raise OrtflowError(f"scontrol failed: {answer.message}")
        return answer.out

    def accounted(self, job_ids: Sequence[str]) -> dict[str, Job]:
        """Jobs in the accounting, by id: one call. Empty if the site has no accounting."""
        if not job_ids:
            return {}
        fields = [f"--delimiter={SEPARATOR}", f"--format={SACCT_FIELDS}"]
        # -X: else each step is a row, too. With -j sacct searches from the epoch on, without it since midnight.
        answer = self._sacct("-X", "-P", "-n", *fields, "-j", ",".join(job_ids))
        return {job.id: job for job in read_sacct(answer.out)} if answer.code == 0 else {}

    def submit(self, script: str, settings: Settings, *options: str) -> str:
        """sbatch a script and return the job's id. Raises Refused, and NoAnswer if the result is unknown."""
        answer = self._run(["sbatch", "--parsable", *options, script], {"LC_ALL": "C", **settings})
        if answer.code:
            raise Refused(answer.message)
        match = _SUBMITTED.search(answer.out.strip())
        if match is None:
            raise NoAnswer(f"sbatch printed {answer.out.strip()!r}, without a job id")
        return match[1]

    def cancel(self, *job_ids: str, pending: bool = False) -> None:
        """scancel; `pending`: only those that have not started. A job that is already gone is not an error."""
        # With a filter, scancel cancels all pending tasks of an array instead of the given one.
        filtered = [job_id for job_id in job_ids if pending and "_" not in job_id]
        for ids, options in (
            (filtered, ["--state=PENDING"]),
            ([job_id for job_id in job_ids if job_id not in filtered], []),
        ):
            answer = self._read("scancel", *options, *ids) if ids else None
            if answer is not None and answer.code and "permission denied" in answer.message:
                raise scheduler.NotOwner(
                    f"job {', '.join(ids)} is another user's, and scancel refuses ({answer.message})",
                    fix="ask its owner or an administrator to cancel it",
                )
            if answer is not None and answer.code and "Invalid job id" not in answer.message:
                raise OrtflowError(f"scancel failed: {answer.message}")

    def version(self) -> tuple[int, int]:
        """Major and minor version, such as (22, 5); (0, 0) if the text has none."""
        match = re.search(r"(\d+)\.(\d+)", self._read("sbatch", "--version").out)
        return (int(match[1]), int(match[2])) if match else (0, 0)

    def longest_array(self) -> tuple[int, str] | None:
        """How many tasks an array may have, and the setting that says so; None if unknown."""
        settings = read_config(self._run(["scontrol", "show", "config"], SETTINGS, GLANCE).out)
        limits = {
            "MaxArraySize": settings.get("MaxArraySize", ""),
            # Lower than MaxArraySize, which then is a limit of the tasks' numbers alone (slurm.conf(5)).
            "max_array_tasks in SchedulerParameters": listed(settings, "SchedulerParameters").get(
                "max_array_tasks", ""
            ),
        }
        return min(((int(text), name) for name, text in limits.items() if text.isdigit()), default=None)

    def starts_with(self, kind: str) -> bool:
        """Whether srun can load the plug-in of --mpi=KIND here."""
        # `srun --mpi=list` names some that do not load. srun loads the plug-in before it contacts the controller:
        # without an answer of the controller, it has loaded.
        try:
            answer = self._run(["srun", f"--mpi={kind}", f"--jobid={NEVER_A_JOB}", "true"], SETTINGS, GLANCE)
        except NoAnswer:
            return True
        return "Invalid MPI type" not in answer.err

    def accounts(self) -> bool:
        """Whether the site has accounting: without it an ended job is forgotten after some minutes."""
        return self._sacct("-n", "-X", "-j", NEVER_A_JOB).code == 0

    def _sacct(self, *arguments: str) -> Answer:
        """Run sacct, which a site without accounting may not have installed."""
        try:
            return self._read("sacct", *arguments)
        except NotInstalled:
            return Answer(127, "", "sacct is not installed")

    def _read(self, *command: str) -> Answer:
        return self.answer(command)

    def answer(self, command: Sequence[str], settings: Settings = SETTINGS) -> Answer:
        """What a command of Slurm's answers, also if it refuses."""
        return self._run(command, settings)

    def _run(self, command: Sequence[str], settings: Settings, seconds: float | None = None) -> Answer:
        seconds = seconds or self.patience
        try:
            answer = self.runner(command, settings, seconds)
        except FileNotFoundError as error:
            raise NotInstalled(
                f"Slurm is not installed {location_text()}, or not on the PATH: there is no {command[0]}",
                fix="log in to the cluster, or load the site's module for Slurm",
            ) from error
        except subprocess.TimeoutExpired as error:
            raise NoAnswer(f"{command[0]} had no answer within {seconds:.0f} s") from error
        except OSError as error:  # a node without processes or memory left
            raise NoAnswer(f"{command[0]} cannot be started: {error.strerror}") from error
        if answer.code and _UNCONFIGURED.search(answer.err):
            raise UserError(
                f"Slurm's commands find no cluster here: {answer.message.splitlines()[0]}",
                fix="set SLURM_CONF to the cluster's slurm.conf, or load the site's module for Slurm",
            )
        if answer.code and _AWAY.search(answer.err):
            raise NoAnswer(answer.message)
        return answer
