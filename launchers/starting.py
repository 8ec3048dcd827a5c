"""Starting a run on this machine: from the request to the supervisor.

Used by `ortflow run` in the foreground and by the local launcher's `submit`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ortflow.launchers import open_files
from ortflow.launchers.attempts.exclusion import excluded
from ortflow.launchers.attempts.locks import wait_free
from ortflow.launchers.interpreter import check, examine
from ortflow.launchers.local import LocalRequest
from ortflow.launchers.prepare import prepare
from ortflow.launchers.records import State, last_end, state
from ortflow.launchers.run_directory_lock import Opened, opened
from ortflow.launchers.start_folder import ROOT, leaving
from ortflow.launchers.stop import Stop, interruptible
from ortflow.launchers.supervision import processes
from ortflow.launchers.supervision.attempt import Attempt, RankCommand
from ortflow.launchers.supervision.elastic import ElasticNodes
from ortflow.launchers.supervision.simulated import SimulatedAttempt, SimulatedNodes
from ortflow.launchers.supervision.supervised import Job, View, grace_of
from ortflow.launchers.supervision.supervisor import Supervisor
from ortflow.workflow.comm.segments import sweep
from ortflow.workflow.errors import EXIT_DONE, OrtflowError, UserError
from ortflow.workflow.program.source import check_source
from ortflow.workflow.ranks import NODE_NAMES
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.checks.nodes import variables
from ortflow.workflow.spec.units import parse_time
from ortflow.workflow.steps.save_period import save_message

FILES_OF_MPIRUN, FILES_OF_A_RANK = 64, 8
"""Open files of mpirun itself and of each rank: pipes and sockets."""
LEFTOVERS = 10.0
"""Seconds that ranks of a dead launcher have to end."""


@dataclass(frozen=True)
class Ending:
    """How a run in the foreground ended."""

    code: int
    """ortflow's exit code."""
    cause: str = ""
    """Why the last attempt ended."""
    reason: str = ""
    """Why it was not restarted."""
    finished: bool = False
    """The run had already finished: nothing was started."""


def run_here(request: LocalRequest, watch: Callable[[Opened], AbstractContextManager[View]]) -> Ending:
    """Start in the foreground and wait for the end; `watch` makes the view.

    Raises UserError if the ranks cannot run or the directory is not free.
    """
    check_request(request)
    with interruptible(), opened(request.submission) as directory:
        if directory.finished:
            return Ending(EXIT_DONE, finished=True)
        begin(request, directory)
        with watch(directory) as view:
            saves = save_message(directory.spec.checkpoint, by_program=directory.spec.program is not None)
            for note in (*directory.notes, saves):
                view.message(note)
            code = supervise(request, view)
        end = last_end(directory.run.read_attempts()) or {}
        return Ending(code, end.get("cause") or "", end.get("why") or "")


def start_detached(request: LocalRequest) -> None:
    """Start in the background and return. Raises as `run_here` does."""
    check_request(request)
    with interruptible(), opened(request.submission) as directory:
        if not directory.finished:
            begin(request, directory)
            detach(directory.run, directory.lock)
            directory.handed_over = True


def check_request(request: LocalRequest) -> None:
    """Raise UserError if the ranks of a request cannot run here."""
    check(examine(request.python), program=request.submission.spec.program is not None)
    if request.submission.spec.program is not None:
        check_source(request.submission.spec.program, request.python)
    ranks = request.submission.spec.world_size
    # One rank needs about what mpirun does: for its own libraries, the data, the records and the checkpoints.
    open_files.allow(FILES_OF_MPIRUN + FILES_OF_A_RANK * ranks, f"a run of {ranks} rank(s)")
    if request.mpi is not None and shutil.which(request.mpi.executable) is None:
        setting = request.submission.spec.backends.local.mpi
        raise UserError(
            f"{request.submission.spec.world_size} ranks need an MPI, and "
            + ("there is none" if setting == "auto" else f"there is no {setting}")
            + f" beside {request.python} or on the PATH",
            fix=f"`{request.python} -m pip install 'ortflow[{'mpich' if setting == 'auto' else setting}]'`",
        )


def begin(request: LocalRequest, directory: Opened) -> None:
    """Prepare the first attempt: make missing files, record the submission.

    Starting a run that gave up resets its budgets; a run whose launcher died continues with
    the rest of them.
    """
    submission = request.submission
    prepare(submission.spec, submission.folder, request.python)
    directory.run.stop_request.unlink(missing_ok=True)
    new_budget = submission.new_budget or state(directory.run.read_attempts(), alive=False) is State.FAILED
    directory.run.record_attempt(event="submit", launcher="local", new_budget=new_budget)


def supervise(request: LocalRequest, view: View) -> int:
    """Supervise the run to its end, with the launcher's lock held; returns ortflow's exit code."""
    spec, run = request.submission.spec, request.submission.run
    limit = spec.resources.time_limit
    mpi = request.mpi.kind if request.mpi else None

    pool = SimulatedNodes(run, spec.asked_nodes)
    nodes = None
    if spec.chooses_nodes:
        nodes = ElasticNodes(spec, pool, excluded=lambda: excluded(run.read_attempts()))

    def start(number: int) -> Attempt:
        if nodes is None:
            return Attempt(RankCommand(run, number, *request.start(number)), spec.world_size, mpi)
        ranks = nodes.spec.world_size
        node_variables = {**variables(nodes.spec, nodes.summary), NODE_NAMES: ",".join(nodes.names)}
        command = RankCommand(run, number, *request.start(number, nodes.spec, node_variables))
        return SimulatedAttempt(command, ranks, mpi if ranks > 1 else None, pool, nodes.names)

    job = Job(
        run,
        spec.world_size,
        spec.restart,
        start,
        lambda: clear_leftovers(run, of_program=spec.program is not None),
        grace=grace_of(spec),
        room_seconds=spec.checkpoint.wait_for_room,
        nodes=nodes,
        notify=spec.monitor.notify,
    )
    try:
        return Supervisor(job, view, Stop(run.stop_request, parse_time(limit) if limit else None)).supervise()
    finally:
        # The last attempt's killed ranks leave segments, and possibly no later rank starts here to remove them.
        sweep()


def clear_leftovers(run: RunDir, *, of_program: bool = False) -> None:
    """Kill the ranks of earlier attempts: two generations must never write to one run directory.

    A program's processes may outlive its rank if they have left its process group: they are found by their environment.
    """
    if of_program:
        processes.kill(processes.of_run(run.root))
    if not wait_free(run.ranks_lock, 0.0):
        processes.kill(processes.of_run(run.root))
        if not wait_free(run.ranks_lock, LEFTOVERS):
            raise OrtflowError(f"ranks of an earlier attempt still run: they hold {run.ranks_lock}")
    sweep()


def detach(run: RunDir, lock: int) -> None:
    """Start the supervisor in its own session; it inherits the lock."""
    log = run.root / "logs" / "supervisor.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        subprocess.Popen(
            [sys.executable, "-m", "ortflow.launchers.detached", str(run.root), str(lock)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock,),
            cwd=ROOT,
            env=leaving(os.getcwd(), os.environ),
        )
