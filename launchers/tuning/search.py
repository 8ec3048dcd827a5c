"""The loop of a search: starts trials, follows them through their launcher, and records what they gave.

A search that was killed goes on with its record: trials that still run are followed, those that were stopped are
submitted again, and those that have ended are not repeated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ortflow.launchers.base import Launcher, Submission, statuses
from ortflow.launchers.records import State
from ortflow.launchers.sweeps import Member, Sweep, member_root
from ortflow.launchers.tuning.study import Record, Trial
from ortflow.launchers.view.best import evaluations
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.run.rundir import RunDir

if TYPE_CHECKING:
    from ortflow.launchers.status import RunStatus

FIRST_PAUSE, LONGEST_PAUSE = 0.3, 5.0
"""Seconds between queries, which may call a scheduler."""
PATIENCE = 90.0
"""Seconds that stopped runs have to save and end."""
ALIKE = 3
"""First trials after which a search ends if all have failed for the same reason."""


class Search:
    """A search, from its record to its end."""

    def __init__(
        self, root: Path, record: Record, metric: str, launcher: Launcher, at_once: int,
        submission: Callable[[int, Mapping[str, str], bool], Submission], report: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`submission` makes the run of a trial's number and values, with whether it is new; it may raise UserError.

        `report` is called with each message.
        """
        self._root, self._record, self._metric, self._launcher = root, record, metric, launcher
        self._at_once, self._submission, self._report = at_once, submission, report
        self._running: dict[int, RunDir] = {}
        self._reported: dict[int, int] = {}
        self._stopping: set[int] = set()

    def run(self) -> None:
        """Run all trials that are left.

        Raises OrtflowError if the first trials fail alike. On KeyboardInterrupt the running trials save and stop.
        """
        unfinished = [trial for trial in self._record.trials if not trial.ended]
        pause = FIRST_PAUSE
        try:
            while True:
                while unfinished and len(self._running) < self._at_once:
                    self._start(unfinished.pop(0), new=False)
                while len(self._running) < self._at_once and not unfinished:
                    self._refuse_alike()
                    trial = self._record.next()
                    if trial is None:
                        break
                    self._start(trial, new=True)
                if not self._running and not unfinished:
                    return
                pause = FIRST_PAUSE if self._look() else min(LONGEST_PAUSE, 1.3 * pause)
                if self._running:
                    time.sleep(pause)
        except KeyboardInterrupt:
            self._stop()
            raise

    def _start(self, trial: Trial, *, new: bool) -> None:
        run = RunDir(member_root(self._root, trial.number))
        self._write_sweep()
        name = run.root.name
        if trial.step is not None:
            self._reported[trial.number] = trial.step
        attempts = run.read_attempts()
        # The search was killed before it submitted this run: the one in its place is of something else.
        new = new or any(float(entry.get("time", 0)) < self._record.recorded_at(trial.number) for entry in attempts[:1])
        if not new and attempts:
            run_status = self._launcher.status(run)
            if run_status.state.active or run_status.state in (State.FINISHED, State.FAILED):
                self._report(f"{name} is {run_status.state.value}, and is followed")
                self._running[trial.number] = run
                return
        try:
            submission = self._submission(trial.number, trial.values, new)
            self._launcher.submit(self._launcher.request(submission))
        except UserError as error:
            self._fail(trial.number, str(error))
            return
        shown = ", ".join(f"{key}={value}" for key, value in trial.values.items())
        self._report(f"{name} {'starts' if new else 'goes on'}: {shown}")
        self._running[trial.number] = run

    def _look(self) -> bool:
        """Read what the running trials have reported; returns whether one has ended."""
        ended = False
        for (number, run), status in zip(list(self._running.items()), statuses([*self._running.values()]), strict=True):
            self._follow(number, run, status)
            if not status.state.active:
                del self._running[number]
                self._end(number, run, status)
                ended = True
        return ended

    def _follow(self, number: int, run: RunDir, status: RunStatus) -> None:
        """Report the new evaluations of a trial, and stop it if they are poor."""
        if number in self._stopping:
            return
        for record in evaluations(run.events(0)):
            step, value = record.get("step"), record.get(self._metric)
            if not isinstance(step, int) or step <= self._reported.get(number, -1):
                continue
            self._reported[number] = step
            if not isinstance(value, int | float) or not math.isfinite(value):
                continue
            poor = self._record.report(number, step, float(value))
            last = status.total_steps is not None and step >= status.total_steps
            if poor and not last and status.state.active:
                self._report(f"{run.root.name} is stopped at step {step}: {self._metric} {value:.4g} is behind others")
                self._stopping.add(number)
                self._launcher.cancel(run, now=False)
                return

    def _end(self, number: int, run: RunDir, status: RunStatus) -> None:
        name, value = run.root.name, status.evaluation.get(self._metric)
        if status.state is State.FINISHED:
            if value is None or not math.isfinite(value):
                self._fail(number, f"its last {self._metric} is not a finite number")
                return
            self._record.complete(number, value)
            self._report(f"{name} has finished: {self._metric} {value:.6g}")
        elif number in self._stopping and status.state is not State.FAILED:
            self._record.prune(number)
        else:
            self._fail(number, status.cause or status.state.value)

    def _fail(self, number: int, reason: str) -> None:
        self._record.fail(number, reason)
        self._report(f"{self._root.name}-{number} has failed: {reason}")

    def _refuse_alike(self) -> None:
        first = self._record.trials[:ALIKE]
        reasons = {trial.reason for trial in first}
        if len(first) == ALIKE and None not in reasons and len(reasons) == 1 and len(self._record.trials) == ALIKE:
            raise OrtflowError(
                f"the first {ALIKE} trials have failed for the same reason, and the search ends: {first[0].reason}; "
                "correct it, and search again with --fresh"
            )

    def _write_sweep(self) -> None:
        trials = self._record.trials
        members = tuple(Member(RunDir(member_root(self._root, trial.number)), dict(trial.values)) for trial in trials)
        Sweep(self._root, members).write()

    def _stop(self) -> None:
        """Have the running trials save and stop, and wait for their end."""
        for run in self._running.values():
            self._launcher.cancel(run, now=False)
        end = time.monotonic() + PATIENCE
        while any(status.state.active for status in statuses([*self._running.values()])) and time.monotonic() < end:
            time.sleep(FIRST_PAUSE)
