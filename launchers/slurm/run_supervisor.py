"""The batch step of a run's Slurm job: `python -m ortflow.launchers.slurm.run_supervisor RUN_DIR -- SRUN …`.

It runs the command after `--` as an attempt, restarts it after a failure within the budget, and asks Slurm to requeue
the job after a preemption or ahead of the time limit. Then it stays: if a batch step ends in its grace period, Slurm
marks the job as COMPLETED and does not start it again. Slurm may have lost contact with a node where an earlier batch
step still runs, so the run directory is fenced first (`ortflow.workflow.fence`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ortflow.launchers import processes
from ortflow.launchers.batch.job_validity import is_on_record, revoked, submission_of
from ortflow.launchers.locks import HeldError, hold, wait_free
from ortflow.launchers.plain import PlainView
from ortflow.launchers.records import CANCELS, Outcome, last_end, open_attempt, pending_changes
from ortflow.launchers.slurm import requeue, taking
from ortflow.launchers.slurm.outcome import begin_job, leave_result
from ortflow.launchers.slurm.requeue import Answer, Fate, JobOfOurs
from ortflow.launchers.slurm.step import StepAttempt
from ortflow.launchers.slurm.stopping import JobStop
from ortflow.launchers.stop import read_request
from ortflow.launchers.supervisor import Job, Supervisor
from ortflow.manifests.local import RANK_MODULE, MpiKind
from ortflow.manifests.slurm import Placement, settings
from ortflow.manifests.slurm.placement import Start
from ortflow.manifests.slurm.script import CARRIED, FOLDER
from ortflow.workflow.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PREEMPTED, EXIT_USER, OrtflowError, UserError
from ortflow.workflow.fence import DELAY, EXIT_FENCED, VARIABLE, Fence, claim
from ortflow.workflow.rank import lacking
from ortflow.workflow.record import ATTEMPTS, damage_message, set_aside
from ortflow.workflow.rundir import RunDir
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.run import RunSpec
from ortflow.workflow.streams import guard_log

OLD_SUPERVISOR = 10.0
"""Seconds that a fenced batch step has to release the lock; a node without network may hold it forever."""
SLOW_RANKS = 5.0
"""Seconds that ranks have to end by themselves after their step has ended."""
OLD_RANKS = 5.0
"""Seconds that ranks on other nodes have to end. Those that hang in MPI's start do not check the fence, nor write."""
STAY = 600.0
"""Seconds in which Slurm ends a job that it has requeued."""
CANCELLING = 60.0
"""The same for a job that is being cancelled."""
AWAY = 3600.0
"""Seconds for which an unreachable controller is retried; the time limit may end the job earlier."""
OURS = ("ORTFLOW_", "SLURM_")
STARTS: tuple[Start, ...] = ("pmi2", "pmix", "none")
LOST = "Slurm ended the job before more could be told: its node was lost, or it was killed without grace"


class RunSupervisor:
    """The batch step of one start of a run's job.

    Parameters
    ----------
    run
        The run directory, with its run file.
    launch
        The command that starts the ranks.
    job
        The Slurm job of this process.
    comment
        The job's comment, with the id of the submission.
    clock
        The clock of every wait.

    Raises
    ------
    UserError
        The run directory is not visible on this node.
    """

    def __init__(
        self, run: RunDir, launch: Sequence[str], job: JobOfOurs, comment: str, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._run, self._launch, self._job, self._comment, self._clock = run, list(launch), job, comment, clock
        if not run.run_file.exists():
            raise UserError(f"{job.node} {lacking(run)}")
        self._spec: RunSpec = load_run_file(run.run_file)
        self._placement = placement_of(run, launch)
        self._view = PlainView(run, self._spec.monitor.every_steps)
        self._attempt: StepAttempt | None = None
        self._held: int | None = None
        self._fence: Fence = claim(run, job=job.id, restarts=job.restarts, node=job.node)

    def keep(self) -> int:
        """Supervise the run until it ends or Slurm requeues the job.

        Returns
        -------
        int
            The exit code of the batch step.
        """
        self._fence.watch(self._fenced)
        self._lock()
        request = read_request(self._run.stop_request)
        if request is not None and request.get("reason") != "cancel":
            # An earlier batch step passed on a signal with it and could not remove it.
            self._run.stop_request.unlink(missing_ok=True)
        if not is_on_record(self._run.read_attempts(), self._job.id):
            # The client that submitted it ended before Slurm had answered.
            submission = submission_of(self._comment)
            self._run.record_attempt(event="submit", launcher="slurm", job=self._job.id, submission=submission)
        if words := damage_message(self._run.attempts, set_aside(self._run.attempts, ATTEMPTS), aside=True):
            self._view.say(f"warning: {words}")
        begin_job(self._run, self._job.id)
        if self._job.restarts:
            self._view.say(f"started again by Slurm on {self._job.node}, restart {self._job.restarts}")
        for note in pending_changes(self._run.read_attempts()):
            self._view.say(note)
        spec = self._spec
        job = Job(
            self._run,
            spec.world_size,
            spec.restart,
            self._start,
            self._clear,
            LOST,
            hands_back=True,
            comes_back=True,
            room_seconds=spec.checkpoint.wait_for_room,
        )
        ahead = spec.backends.slurm.signal_seconds
        stop = JobStop(self._run.stop_request, self._job, ahead, self._output, self._clock)
        code = Supervisor(job, self._view, stop, self._clock).supervise()
        leave_result(self._run, self._job.id)
        end = last_end(self._run.read_attempts()) or {}
        if code == EXIT_PREEMPTED and end.get("asked") in CANCELS:
            return self._cancelled()
        if code == EXIT_PREEMPTED and end.get("given_up"):
            return EXIT_FAILURE
        if code == EXIT_PREEMPTED:
            code = self._again()
            leave_result(self._run, self._job.id)
        return code

    def _lock(self) -> None:
        """Take the lock to show who supervises the run. Not required: the fence keeps others out."""
        if wait_free(self._run.lock, OLD_SUPERVISOR, self._clock):
            with suppress(HeldError, OSError):
                self._held = hold(self._run.lock)

    def _start(self, number: int) -> StepAttempt:
        own = settings(self._spec, self._placement)
        # Variables of MPI that the user's prologue has set win over the defaults.
        ours = {name: value for name, value in own.items() if name not in os.environ or name.startswith(OURS)}
        environment = {
            **os.environ,
            **ours,
            "ORTFLOW_ATTEMPT": str(number),
            VARIABLE: self._fence.token,
        }
        mpirun = self._placement.kind if self._placement.start == "mpirun" else None
        self._attempt = StepAttempt(self._run, number, self._launch, environment, mpirun)
        return self._attempt

    def _output(self) -> str:
        """The output of srun in the newest attempt."""
        return self._attempt.output() if self._attempt is not None else ""

    def _clear(self) -> None:
        """Wait for the ranks of an earlier batch step: fenced ones end within DELAY.

        Ranks hold a lock until they end. If a node without network still holds it, the fence is enough: ranks check it
        before they make anything visible.
        """
        if open_attempt(self._run.read_attempts()) is not None and self._attempt is None:
            self._clock.sleep(DELAY)
        if wait_free(self._run.ranks_lock, SLOW_RANKS, self._clock):
            return
        # Slurm gave up this node while its daemon was away: srun has ended, ranks on the node have not.
        processes.kill(processes.of_run(self._run.root))
        if not wait_free(self._run.ranks_lock, OLD_RANKS, self._clock):
            self._view.say(f"{self._run.ranks_lock} is still held by ranks out of reach; they are fenced off")

    def _fenced(self) -> None:
        """A newer batch step owns the run directory: end this one before it writes again; ranks do the same."""
        print("a newer job or restart owns the run directory: this one ends", flush=True)
        os._exit(EXIT_FENCED)

    def _cancelled(self) -> int:
        """Cancel the job, so that it neither succeeds nor is started again."""
        if self._held is not None:
            # Everything is recorded: `ortflow resume` need not wait until Slurm has ended this job.
            os.close(self._held)
        if requeue.fate(self._job) is Fate.RUNNING:
            requeue.cancel(self._job)
            self._stay(CANCELLING)
        return EXIT_PREEMPTED

    def _again(self) -> int:
        """Have Slurm start the run again, and stay until Slurm ends this batch step."""
        answer, message = requeue.requeue(self._job, AWAY, self._clock)
        if answer is Answer.QUEUED:
            self._view.say("queued again; waiting for Slurm to end this job")
            self._stay(STAY)
            return EXIT_PREEMPTED
        if answer is Answer.CANCELLED:
            self._run.record_attempt(event="stop", outcome=Outcome.PREEMPTED.value, asked="scancel", why="scancel")
            return EXIT_PREEMPTED
        if answer is Answer.REFUSED:
            script = self._run.root / "slurm" / "job.sh"
            new, why = requeue.follow_up(self._job, script)
            if new is not None:
                self._view.say(f"Slurm refuses to requeue this job ({message}); job {new} follows it")
                self._run.record_attempt(event="submit", launcher="slurm", job=new, follows=self._job.id)
                return EXIT_PREEMPTED
            message = f"{message}; {why}"
        self._view.say(f"Slurm does not start the run again ({message}); continue it with `ortflow resume`")
        self._run.record_attempt(
            event="stop", outcome=Outcome.LOST.value, why=f"Slurm refused to start it again: {message}"
        )
        return EXIT_FAILURE

    def _stay(self, seconds: float) -> None:
        end = self._clock.monotonic() + seconds
        while self._clock.monotonic() < end:
            self._clock.sleep(1.0)


def placement_of(run: RunDir, launch: Sequence[str]) -> Placement:
    """How a command starts the ranks, parsed from it: an administrator may have changed the script. Pure."""
    kind: MpiKind = "openmpi" if {"--map-by", "--mpi=pmix"} & set(launch) else "mpich"
    start: Start = "mpirun"
    if Path(launch[0]).name == "srun":
        start = next((known for known in STARTS if f"--mpi={known}" in launch), "none")
    return Placement(run.root, sys.executable, sys.executable, start, submission="", kind=kind)


def begin(run: RunDir, job: JobOfOurs, comment: str, options: Sequence[str], launch: Sequence[str]) -> int | None:
    """Take the run for this job; returns the exit code if nothing is to do. Raises UserError if another job has it."""
    records = run.read_attempts()
    known, carried = is_on_record(records, job.id), CARRIED in options
    if carried and not known:
        folder = options[options.index(FOLDER) + 1] if FOLDER in options else None
        if not taking.claim(run, job, sys.stdin.read(), Path(folder) if folder else None, python_of(launch)):
            print(f"this job has nothing to do: the run in {run.root} has finished", flush=True)
            return EXIT_DONE
        taking.keep_script(run, job)
    else:
        if not known:
            taking.leave_to_another(run, job)
        if why := revoked(records, "slurm", job.id, comment):
            print(f"this job has nothing to do: {why}", flush=True)
            return EXIT_DONE if why.endswith(": done") else EXIT_PREEMPTED
    if carried:
        taking.redirect(run, job)
    return None


def python_of(launch: Sequence[str]) -> str:
    """The ranks' interpreter in the command that starts them. Pure."""
    return launch[launch.index(RANK_MODULE) - 2]


def main(arguments: list[str]) -> int:
    """Supervise the run of a directory, whose run file may come with the script."""
    guard_log()
    place = arguments.index("--")
    run, options, launch = RunDir(Path(arguments[0])), arguments[1:place], arguments[place + 1 :]
    if "SLURM_JOB_ID" not in os.environ:
        print("error: this batch script runs only inside a Slurm job: submit it with sbatch", flush=True)
        return EXIT_USER
    job = JobOfOurs.from_environment()
    comment = requeue.comment(job)
    try:
        code = begin(run, job, comment, options, launch)
    except (OrtflowError, OSError) as error:
        # Printed only: the records belong to the job that has the run.
        print(f"error: {error}", flush=True)
        return error.exit_code if isinstance(error, OrtflowError) else EXIT_FAILURE
    if code is not None:
        return code
    try:
        return RunSupervisor(run, launch, job, comment).keep()
    except OrtflowError as error:
        print(f"error: {error}", flush=True)
        with suppress(OSError):
            outcome = Outcome.USER_ERROR if error.exit_code == EXIT_USER else Outcome.FAILURE
            run.record_attempt(event="stop", outcome=outcome.value, cause=str(error), why="the job could not begin")
            leave_result(run, job.id)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
