"""The command of the launcher pod: `python -m ortflow.launchers.kubernetes.keeper`. It keeps the run going.

The local launcher's supervisor, inside the pod that the mpi-operator calls launcher: it opens the run directory on the
volume, waits until every worker answers, starts mpirun, and starts it again after a failure or a preemption within the
run's budgets, without the operator taking notice. What the operator retries is only this pod itself: the next one finds
on the volume what has happened. It ends with 0 if the run directory says that the run is finished, and never else.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from ortflow.launchers.base import Submission
from ortflow.launchers.interpreter import check, examine
from ortflow.launchers.kubernetes.attempt import PodAttempt
from ortflow.launchers.kubernetes.hosts import read_hosts, wait_for
from ortflow.launchers.kubernetes.mpirun import command, environment, hostfile
from ortflow.launchers.kubernetes.pod import Pod
from ortflow.launchers.kubernetes.story import Story
from ortflow.launchers.locks import holder_of, wait_free
from ortflow.launchers.mpi import find_mpi
from ortflow.launchers.opening import Opened, opened
from ortflow.launchers.prepare import prepare
from ortflow.launchers.processes import dies_with_us
from ortflow.launchers.records import Outcome, State, last_end, open_attempt, state
from ortflow.launchers.stop import Stop, interruptible, taken_over
from ortflow.launchers.supervisor import EXIT_CODES, Job, Supervisor, changed
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
from ortflow.workflow.fence import DELAY, EXIT_FENCED, VARIABLE, Owner
from ortflow.workflow.rundir import RunDir, write_atomically
from ortflow.workflow.spec.load import load_run_file
from ortflow.workflow.spec.paths import resolve_paths
from ortflow.workflow.spec.run import RunSpec
from ortflow.workflow.spec.units import parse_time

WAIT = 3600.0
"""Seconds for which workers are waited for; then the operator starts this pod again."""
OLD_KEEPER = 100.0
"""Seconds until a fenced keeper has let go of the lock: a file server takes it from a lost node after 90."""
ALIVE = 30.0
"""Seconds since its last sign after which another keeper is not at work any more."""
BEAT = 5.0
OLD_RANKS = 10.0
"""Seconds in which ranks are gone when their mpirun is; those that are not are fenced off."""
LOST = "the launcher pod was lost: deleted, evicted, or its node failed"
TERMINATION = Path("/dev/termination-log")
"""What stands there is shown as the reason for the container's end."""


class PodStop(Stop):
    """Set by the kubelet's SIGTERM, whatever it is for: if nobody wants the run any more, no pod follows this one."""

    def listening(self) -> AbstractContextManager[None]:
        """Take over the signals, for good."""
        return taken_over(self._handle, (signal.SIGTERM, signal.SIGINT), for_good=True)


class BeatingStory(Story):
    """The story, with a sign of life on the volume."""

    def __init__(self, run: RunDir, every_steps: int, world_size: int) -> None:
        super().__init__(run, every_steps, world_size)
        self._next_beat = 0.0

    def tick(self) -> None:
        """Pass on what ranks have printed, and show that we live."""
        super().tick()
        if (now := time.monotonic()) >= self._next_beat:
            self._next_beat = now + BEAT
            with suppress(OSError):
                beat_file(self._run).touch()


class Keeper:
    """One life of the launcher pod."""

    def __init__(self, pod: Pod, spec: RunSpec, folder: Path) -> None:
        self._pod, self._spec, self._folder = pod, spec, folder
        self._run = RunDir(Path(str(spec.run_dir)))
        self._python = spec.resources.python or sys.executable
        self._owner = Owner(self._run)
        self._story = BeatingStory(self._run, spec.monitor.every_steps, spec.world_size)
        self._stop = PodStop(self._run.stop_request, _limit(spec))

    def keep(self) -> int:
        """Keep the run going until it is done or given up; the pod's exit code."""
        mpi = self._find_mpi()
        with interruptible(), self._story:
            self._settle_with_others()
            fresh = self._pod.fresh and not self._begun()
            submission = Submission(self._spec, self._run, self._folder, fresh=fresh, new_budget=self._pod.new_budget)
            with opened(submission) as ours:
                # What happens from here on is on record there, and the next pod reads it.
                ours.handed_over = True
                return self._keep_open(ours, mpi)

    def _keep_open(self, ours: Opened, mpi: Mpi) -> int:
        self._owner.renew(job=self._pod.job, submission=self._pod.submission, pod=socket.gethostname())
        self._owner.watch(self._fenced)
        for note in ours.notes:
            self._story.say(note)
        if not self._begun():
            new_budget = self._pod.new_budget or state(self._run.read_attempts(), alive=False) is State.FAILED
            self._run.record_attempt(
                event="submit", launcher="kubernetes", job=self._pod.job, submission=self._pod.submission,
                new_budget=new_budget and not ours.finished,
            )  # fmt: skip
        self._story.begin()
        if ours.finished:
            self._story.say("the run directory holds this run, finished")
            return self._end(EXIT_DONE)
        if (before := self._settled()) is not None:
            self._story.say("this submission has ended already; `ortflow resume` goes on with the run")
            return self._end(before)
        # An earlier life passed on a signal with it and could not take it away.
        self._run.stop_request.unlink(missing_ok=True)
        prepare(self._spec, self._folder, self._python)
        spec = self._spec
        job = Job(
            self._run,
            spec.world_size,
            spec.restart,
            lambda number: self._start(number, mpi),
            self._clear,
            LOST,
            comes_back=True,
        )
        code = Supervisor(job, self._story, self._stop).supervise()
        if code == EXIT_PREEMPTED and self._stop.signalled:
            self._story.say("told to end: the next launcher pod goes on")
            return code
        return self._end(code)

    def _begun(self) -> bool:
        """Whether an earlier pod of this submission has been here."""
        return any(
            record.get("event") == "submit" and record.get("submission") == self._pod.submission
            for record in self._run.read_attempts()
        )

    def _settled(self) -> int | None:
        """The exit code of this submission if it has ended for good, None if it is to go on."""
        records = self._run.read_attempts()
        last: dict[str, Any] = next(
            (r for r in reversed(records) if r.get("event") in ("submit", "start", "end", "stop")), {}
        )
        if last.get("event") == "stop" or (last.get("event") == "end" and last.get("next") == "stop"):
            return EXIT_CODES[Outcome(last["outcome"])]
        return None

    def _end(self, code: int) -> int:
        """Tell everybody who asks how the run has ended; the exit code."""
        finished = state(self._run.read_attempts(), alive=False) is State.FINISHED
        if code == EXIT_DONE and not finished:
            code = EXIT_FAILURE
        if code != EXIT_DONE:
            release(self._pod)
        end = last_end(self._run.read_attempts()) or {}
        explain(f"{end.get('cause') or 'finished'}" + (f"; {end['why']}" if end.get("why") and code else ""))
        return code

    def _settle_with_others(self) -> None:
        """See that no other submission keeps the run; fence off an earlier pod of this one."""
        run = self._run
        try:
            owner = json.loads(run.owner.read_text())
        except (OSError, ValueError):
            return
        if owner.get("submission") != self._pod.submission and holder_of(run.lock) is not None:
            self._story.say(
                f"the run directory is in use by {owner.get('job', 'another launcher')}: looking whether it lives"
            )
            end = time.monotonic() + ALIVE
            while time.monotonic() < end and holder_of(run.lock) is not None:
                time.sleep(1.0)
            if holder_of(run.lock) is not None and time.time() - changed(beat_file(run)) < ALIVE:
                raise UserError(
                    f"{run.root} is in use by the MPIJob {owner.get('job', '?')}",
                    where="name",
                    fix="wait for it, delete it, or give this run another name or run_dir",
                )
        self._owner.renew(job=self._pod.job, submission=self._pod.submission, pod=socket.gethostname())
        if not wait_free(run.lock, OLD_KEEPER):
            raise OrtflowError(f"{run.lock} stays locked by a launcher pod that is fenced off")

    def _fenced(self) -> None:
        print("a newer launcher pod owns the run directory: this one ends", flush=True)
        os._exit(EXIT_FENCED)

    def _find_mpi(self) -> Mpi:
        check(examine(self._python))
        wanted = self._spec.backends.kubernetes.mpi
        mpi = find_mpi(self._python, wanted)
        if mpi is None:
            raise UserError(
                f"the image has no {wanted} beside {self._python} or on the PATH",
                where="backends.kubernetes.mpi",
                fix=f"install `ortflow[{wanted}]` in the image, or name the MPI that it has",
            )
        return mpi

    def _start(self, number: int, mpi: Mpi) -> PodAttempt:
        spec, pod = self._spec, self._pod
        hosts = read_hosts()
        if len(hosts) != spec.resources.nodes:
            raise UserError(
                f"the operator gives {len(hosts)} hosts, and the run has {spec.resources.nodes} nodes",
                where="resources.nodes",
                fix="do not scale the MPIJob: submit the run again with as many nodes as it shall have",
            )
        self._story.say(f"attempt {number}: waiting for {len(hosts)} worker{'s' if len(hosts) > 1 else ''}")
        known = wait_for(hosts, pod.ssh_port, WAIT, self._look, self._story.say)
        file = Path(tempfile.mkdtemp(prefix="ortflow-")) / "hosts"
        file.write_text(hostfile(mpi.kind, hosts, spec.resources.ranks_per_node))
        own = {
            "ORTFLOW_RUN_DIR": str(self._run.root),
            "ORTFLOW_LAUNCHER": "kubernetes",
            "ORTFLOW_ATTEMPT": str(number),
            "PYTHONUNBUFFERED": "1",
            VARIABLE: self._owner.renew(
                job=pod.job, submission=pod.submission, pod=socket.gethostname(), attempt=number
            ),
        }
        here = socket.gethostbyname(socket.gethostname())
        outer = environment(own, os.environ, mpi, pod.ssh_port)
        words = command(spec, self._run.root, self._python, mpi, file, here, sorted(outer))
        return PodAttempt(
            self._run, number, words, outer, mpi.kind, pod, known, spec.resources.ranks_per_node
        )  # fmt: skip

    def _look(self) -> None:
        """While workers are waited for: raise Preempted when told to end."""
        self._story.tick()
        if self._stop.look():
            raise Preempted("told to end while waiting for workers")

    def _clear(self) -> None:
        """Return when no rank of an earlier attempt can write any more."""
        if open_attempt(self._run.read_attempts()) is not None and not wait_free(self._run.ranks_lock, 0.0):
            time.sleep(DELAY)
        if not wait_free(self._run.ranks_lock, OLD_RANKS):
            self._owner.renew(job=self._pod.job, submission=self._pod.submission, pod=socket.gethostname())
            if not wait_free(self._run.ranks_lock, 2 * DELAY):
                self._story.say("ranks of an earlier attempt cannot be seen any more; they are fenced off")


def beat_file(run: RunDir) -> Path:
    """Touched by the keeper that has the run."""
    return run.root / ".keeper"


def release(pod: Pod) -> None:
    """Let the workers go: the run does not need them any more, whatever the operator tries."""
    with suppress(OSError):
        write_atomically(pod.released, uuid.uuid4().hex.encode())


def explain(text: str) -> None:
    """Leave the reason of our end where `kubectl describe pod` shows it."""
    with suppress(OSError):
        TERMINATION.write_text(text[:4000])


def unpack(pod: Pod, folder: Path) -> None:
    """Put the files that came with the run file into its folder on the volume."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if pod.carried.is_dir():
            # The ConfigMap is a tree of links to a folder that is replaced as a whole.
            shutil.copytree(pod.carried, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("..*"))
    except (OSError, shutil.Error) as error:
        raise UserError(
            f"{folder} cannot be written by uid {os.getuid()}: {error}",
            where="backends.kubernetes.volume",
            fix="set backends.kubernetes.security to the owner of the volume, or open the volume for this uid",
        ) from error


def read_spec(pod: Pod) -> tuple[RunSpec, Path]:
    """The run, its paths seen from its folder on the volume, and that folder; raises Faults."""
    spec = load_run_file(pod.run_file)
    folder = Path(spec.backends.kubernetes.folder or pod.mount / "files" / spec.name)
    return resolve_paths(spec, folder / "run.yaml", cwd=pod.mount), folder


def _limit(spec: RunSpec) -> float | None:
    limit = spec.resources.time_limit
    return parse_time(limit) if limit is not None else None


def _own_sshd(spec: RunSpec, arguments: Sequence[str]) -> None:
    """Where the launcher pod is a worker too, ranks come to it as to the others."""
    if spec.backends.kubernetes.launcher_as_worker:
        subprocess.Popen(arguments, preexec_fn=dies_with_us())


def main() -> int:
    """Keep the run of the pod; its exit code."""
    pod = None
    try:
        pod = Pod.from_environment()
        spec, folder = read_spec(pod)
        unpack(pod, folder)
        _own_sshd(spec, [sys.executable, "-m", "ortflow.launchers.kubernetes.worker"])
        return Keeper(pod, spec, folder).keep()
    except OrtflowError as error:
        print(f"error: {error}", flush=True)
        explain(str(error))
        if pod is not None and error.exit_code == EXIT_USER:
            _record_refusal(pod, error)
            release(pod)
        return error.exit_code


def _record_refusal(pod: Pod, error: OrtflowError) -> None:
    """Put wrong input on record if there is a run directory that is ours: the next pod then does not try again."""
    with suppress(OrtflowError, OSError):
        run = RunDir(Path(str(read_spec(pod)[0].run_dir)))
        owner = json.loads(run.owner.read_text())
        if owner.get("submission") == pod.submission:
            run.record_attempt(
                event="stop", outcome=Outcome.USER_ERROR.value, cause=str(error), why="wrong input is not tried again"
            )


if __name__ == "__main__":
    sys.exit(main())
