"""The supervisor process of the launcher pod: `python -m ortflow.launchers.kubernetes.run_supervisor`.

Runs in the pod that the mpi-operator calls launcher. It opens the run directory on the volume, waits until every worker
answers, starts mpirun, and restarts it after a failure or a preemption within the run's budgets. The operator retries
only the pod itself; the next pod reads the records on the volume. Exits with 0 only if the run directory shows that the
run is finished.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from ortflow.launchers.attempts.exclusion import excluded, retained
from ortflow.launchers.attempts.locks import wait_free
from ortflow.launchers.base import Submission
from ortflow.launchers.interpreter import check, examine
from ortflow.launchers.kubernetes.account import ensure_account
from ortflow.launchers.kubernetes.attempt import PodAttempt
from ortflow.launchers.kubernetes.disk_space import await_room
from ortflow.launchers.kubernetes.ending import begun, explain, release, settled
from ortflow.launchers.kubernetes.folder import read_spec, unpack
from ortflow.launchers.kubernetes.hosts import read_hosts, short, wait_for
from ortflow.launchers.kubernetes.log_stream import LogStream
from ortflow.launchers.kubernetes.mpirun import command, environment, hostfile
from ortflow.launchers.kubernetes.ownership import Ownership, owner_of
from ortflow.launchers.kubernetes.pod import Pod
from ortflow.launchers.kubernetes.pool import HostPool
from ortflow.launchers.kubernetes.sshd import keys
from ortflow.launchers.kubernetes.unready_workers import UnreadyWorkers
from ortflow.launchers.kubernetes.worker_report import node_of_host
from ortflow.launchers.mpi import find_mpi
from ortflow.launchers.prepare import prepare
from ortflow.launchers.records import Outcome, State, last_end, open_attempt, pending_changes, state
from ortflow.launchers.run_directory_lock import Opened, opened
from ortflow.launchers.stop import Stop, interruptible, taken_over
from ortflow.launchers.supervision.attempt import RankCommand
from ortflow.launchers.supervision.elastic import ElasticNodes
from ortflow.launchers.supervision.processes import dies_with_parent
from ortflow.launchers.supervision.supervised import Job, View
from ortflow.launchers.supervision.supervisor import Supervisor
from ortflow.manifests.local import Mpi
from ortflow.workflow.errors import (
    EXIT_DONE,
    EXIT_FAILURE,
    EXIT_PREEMPTED,
    EXIT_USER,
    OrtflowError,
    Preempted,
    UserError,
)
from ortflow.workflow.run.fence import DELAY, VARIABLE
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.checks.nodes import variables
from ortflow.workflow.spec.run import RunSpec
from ortflow.workflow.spec.units import parse_time
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.system.streams import guard_log

WAIT = 3600.0
"""Seconds to wait for the workers; then the pod fails and the operator retries it."""
OLD_RANKS = 10.0
"""Seconds in which ranks end after their mpirun has ended; later ones are fenced off."""
MARGIN = 5.0
"""Seconds of the grace period that are left for this process when the ranks have ended."""
LOST = "the launcher pod was lost: deleted, evicted, or its node failed"


def ranks_grace(seconds: int) -> float:
    """Seconds of a pod's grace period that ranks have to save: all but MARGIN, at least half. Pure."""
    return seconds - min(MARGIN, seconds / 2)


class PodStop(Stop):
    """Set by the kubelet's SIGTERM, which a deleted MPIJob causes too: then no pod follows this one."""

    def listening(self) -> AbstractContextManager[None]:
        """Take over the signals, for good."""
        return taken_over(self._handle, (signal.SIGTERM, signal.SIGINT), for_good=True, ignored=True)


class RunSupervisor:
    """The supervisor process of one launcher pod.

    Parameters
    ----------
    pod
        The pod of this process.
    spec
        The run file, with the paths of the pods.
    folder
        Where the files of the run file's folder are.
    clock
        The clock of every wait.
    """

    def __init__(self, pod: Pod, spec: RunSpec, folder: Path, clock: Clock = SYSTEM_CLOCK) -> None:
        self._pod, self._spec, self._folder, self._clock = pod, spec, folder, clock
        self._run = RunDir(Path(str(spec.run_dir)))
        self._pool: HostPool | None = None
        self._nodes: ElasticNodes | None = None
        self._python = spec.resources.python or sys.executable
        self._ownership = Ownership(self._run, pod, clock)
        self._log_stream = LogStream(self._run, spec.monitor.every_steps, spec.world_size, clock)
        self._view: View = self._log_stream
        limit = spec.resources.time_limit
        self._stop = PodStop(self._run.stop_request, parse_time(limit) if limit is not None else None, clock)

    def await_room(self) -> None:
        """Wait for a volume that is full; raises OutOfDisk if it stays full."""
        seconds = self._spec.checkpoint.wait_for_room
        await_room(self._run, seconds, lambda lack: self._log_stream.lacks(lack, seconds), self._clock)

    def keep(self) -> int:
        """Supervise the run until it ends or the pod is asked to end.

        Returns
        -------
        int
            The exit code of the pod.

        Raises
        ------
        UserError
            The image has no MPI, the run directory belongs to another run, or the input is wrong.
        """
        mpi = self._find_mpi()
        with interruptible(), self._log_stream:
            self._ownership.settle_with_others(self._spec.backends.kubernetes.grace_seconds, self._log_stream.message)
            fresh = self._pod.fresh and not self._begun()
            submission = Submission(self._spec, self._run, self._folder, fresh=fresh, new_budget=self._pod.new_budget)
            with opened(submission) as directory:
                # From here on everything is recorded there, and the next pod reads it.
                directory.handed_over = True
                return self._keep_open(directory, mpi)

    def _keep_open(self, directory: Opened, mpi: Mpi) -> int:
        self._ownership.renew()
        self._ownership.watch()
        # Including those found by an earlier pod that started no attempt.
        for note in pending_changes(self._run.read_attempts()):
            self._log_stream.message(note)
        if directory.finished:
            self._log_stream.begin()
            self._log_stream.message("the run in the run directory has finished")
            return self._end(EXIT_DONE)
        if not self._begun():
            new_budget = self._pod.new_budget or state(self._run.read_attempts(), alive=False) is State.FAILED
            self._run.record_attempt(
                event="submit", launcher="kubernetes", job=self._pod.job, submission=self._pod.submission,
                new_budget=new_budget,
            )  # fmt: skip
        self._log_stream.begin()
        if (before := settled(self._run.read_attempts())) is not None:
            self._log_stream.message("this submission has already ended; continue the run with `ortflow resume`")
            return self._end(before)
        # An earlier pod passed on a signal with it and could not remove it.
        self._run.stop_request.unlink(missing_ok=True)
        has_ranks = self._spec.backends.kubernetes.launcher_as_worker
        memory = "resources.memory" if has_ranks else "backends.kubernetes.launcher_resources.memory"
        prepare(self._spec, self._folder, self._python, memory)
        code = self._supervise(mpi)
        if code == EXIT_PREEMPTED and self._stop.signalled:
            self._log_stream.message("asked to end: the next launcher pod continues the run")
            return code
        return self._end(code)

    def _supervise(self, mpi: Mpi) -> int:
        spec = self._spec
        if spec.chooses_nodes:
            leaves = UnreadyWorkers(self._pod, self._log_stream.message, self._clock)
            pod, run = self._pod, self._run
            self._pool = HostPool(self._hosts(), pod.ssh_port, leaves, lambda host: node_of_host(pod, short(host)))
            self._nodes = ElasticNodes(spec, self._pool, self._clock, lambda: excluded(run.read_attempts()))
        job = Job(
            self._run, spec.world_size, spec.restart, lambda number: self._start(number, mpi),
            self.wait_for_old_ranks, LOST, comes_back=True, grace=ranks_grace(spec.backends.kubernetes.grace_seconds),
            room_seconds=spec.checkpoint.wait_for_room, nodes=self._nodes, notify=spec.monitor.notify,
            replaces_nodes=self._replaces_nodes,
        )  # fmt: skip
        try:
            supervisor = Supervisor(job, self._log_stream, self._stop, self._clock)
            self._view = supervisor.view
            return supervisor.supervise()
        except Preempted:
            if not self._stop.signalled:
                reason = f"requested by {self._stop.reason}"
                self._run.record_attempt(
                    event="stop", outcome=Outcome.PREEMPTED.value, why=reason, asked=self._stop.reason
                )
            return EXIT_PREEMPTED

    def _replaces_nodes(self, nodes: Collection[str]) -> bool:
        """Whether the reconciler gives the run workers on other nodes; the launcher's own pod stays where it is."""
        backend, movable = self._spec.backends.kubernetes, set(nodes) - self._retained().keys()
        stuck = backend.launcher_as_worker and self._pod.node in movable
        return backend.supervisor and not stuck and bool(movable)

    def _retained(self) -> dict[str, str]:
        return retained(self._run.read_attempts())

    def _begun(self) -> bool:
        return begun(self._run.read_attempts(), self._pod.submission)

    def _end(self, code: int) -> int:
        """Release the workers, write the termination message; returns the exit code of the pod."""
        if code == EXIT_DONE and state(self._run.read_attempts(), alive=False) is not State.FINISHED:
            code = EXIT_FAILURE
        release(self._pod, at_once=code != EXIT_DONE)
        end = last_end(self._run.read_attempts()) or {}
        explain(f"{end.get('cause') or 'finished'}" + (f"; {end['why']}" if end.get("why") and code else ""))
        return code

    def _find_mpi(self) -> Mpi:
        check(examine(self._python), program=self._spec.program is not None)
        setting = self._spec.backends.kubernetes.mpi
        mpi = find_mpi(self._python, setting)
        if mpi is None:
            raise UserError(
                f"the image has no {setting} beside {self._python} or on the PATH",
                where="backends.kubernetes.mpi",
                fix=f"install `ortflow[{setting}]` in the image, or name the MPI that it has",
            )
        return mpi

    def _hosts(self) -> list[str]:
        hosts, nodes = read_hosts(), self._spec.asked_nodes
        if len(hosts) != nodes:
            raise UserError(
                f"the operator gives {len(hosts)} hosts, and the run has {nodes} nodes",
                where="resources.nodes",
                fix="do not scale the MPIJob: submit the run again with the number of nodes that it needs",
            )
        return hosts

    def _await_all(self, number: int) -> dict[str, str]:
        """The addresses of all hosts, as soon as all answer."""
        hosts = self._hosts()
        self._log_stream.message(f"attempt {number}: waiting for {len(hosts)} worker{'s' if len(hosts) > 1 else ''}")
        out = excluded(self._run.read_attempts()).keys() - self._retained().keys()
        out = out if self._replaces_nodes(out) else set()
        say = self._log_stream.message
        unready_workers = UnreadyWorkers(self._pod, say, self._clock, out, self._retained)
        return wait_for(hosts, self._pod.ssh_port, WAIT, self._check_for_stop, say, unready_workers, self._clock)

    def _start(self, number: int, mpi: Mpi) -> PodAttempt:
        spec, pod, extra_variables = self._spec, self._pod, dict[str, str]()
        slots = spec.resources.ranks_per_node
        if self._nodes is None or self._pool is None:
            host_addresses = self._await_all(number)
        else:
            spec, extra_variables = self._nodes.spec, variables(self._nodes.spec, self._nodes.summary)
            host_addresses = {host: self._pool.addresses[host] for host in self._nodes.names}
        file = Path(tempfile.mkdtemp(prefix="ortflow-")) / "hosts"
        file.write_text(hostfile(mpi.kind, list(host_addresses), slots))
        own_variables = {
            "ORTFLOW_RUN_DIR": str(self._run.root),
            "ORTFLOW_LAUNCHER": "kubernetes",
            "ORTFLOW_ATTEMPT": str(number),
            "PYTHONUNBUFFERED": "1",
            VARIABLE: self._ownership.renew(attempt=number),
            **extra_variables,
        }
        outer = environment(own_variables, os.environ, mpi, pod.ssh_port)
        mpirun = command(spec, self._run.root, self._python, mpi, file, pod.address, sorted(outer))
        rank_command = RankCommand(self._run, number, mpirun, outer)
        return PodAttempt(rank_command, mpi.kind, pod, host_addresses, slots, self._clock)

    def _check_for_stop(self) -> None:
        """Called while waiting for workers; raises Preempted if the pod is asked to end."""
        self._view.tick()
        if self._stop.check():
            raise Preempted("asked to end while waiting for workers")

    def wait_for_old_ranks(self) -> None:
        """Return when no rank of an earlier attempt can write any more."""
        if open_attempt(self._run.read_attempts()) is not None and not wait_free(self._run.ranks_lock, 0.0):
            self._clock.sleep(DELAY)
        if not wait_free(self._run.ranks_lock, OLD_RANKS, self._clock):
            self._ownership.renew()
            if not wait_free(self._run.ranks_lock, 2 * DELAY, self._clock):
                self._log_stream.message("ranks of an earlier attempt are unreachable; they are fenced off")


def main() -> int:
    """Supervise the run of this pod; returns its exit code."""
    pod = None
    guard_log()
    try:
        ensure_account(keys().parent)
        pod = Pod.from_environment()
        spec, folder = read_spec(pod)
        run_supervisor = RunSupervisor(pod, spec, folder)
        run_supervisor.await_room()
        unpack(pod, folder)
        if spec.backends.kubernetes.launcher_as_worker:
            # This pod runs ranks as the workers do.
            worker = [sys.executable, "-m", "ortflow.launchers.kubernetes.worker"]
            subprocess.Popen(worker, preexec_fn=dies_with_parent())
        return run_supervisor.keep()
    except OrtflowError as error:
        print(f"error: {error}", flush=True)
        explain(str(error))
        if pod is not None and error.exit_code == EXIT_USER:
            _record_refusal(pod, error)
            release(pod, at_once=True)
        return error.exit_code


def _record_refusal(pod: Pod, error: OrtflowError) -> None:
    """Record wrong input if the run directory belongs to this submission: the next pod then does not try again."""
    with suppress(OrtflowError, OSError):
        run = RunDir(Path(str(read_spec(pod)[0].run_dir)))
        if (owner_of(run) or {}).get("submission") == pod.submission:
            reason = "wrong input is not tried again"
            run.record_attempt(event="stop", outcome=Outcome.USER_ERROR.value, cause=str(error), why=reason)


if __name__ == "__main__":
    sys.exit(main())
