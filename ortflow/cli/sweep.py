"""Sweeps: implements `submit --set` and `cancel --sweep`."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ortflow.cli.runs import default_runs
from ortflow.workflow.errors import OrtflowError, UserError

if TYPE_CHECKING:
    from ortflow.cli.program import Typed
    from ortflow.launchers.base import Submission
    from ortflow.launchers.capabilities import Sweeping
    from ortflow.launchers.sweeps import Sweep
    from ortflow.workflow.run.rundir import RunDir
    from ortflow.workflow.spec.file.combinations import Axis

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUES", help="Sweep over V1,V2,… or FIRST..LAST, as a job array."),
]
AtOnceOption = Annotated[
    int | None,
    typer.Option("--at-once", metavar="N", min=1, help="Number of runs of a sweep that may run at the same time."),
]
SweepOption = Annotated[str | None, typer.Option("--sweep", metavar="NAME", help="All runs of a sweep.")]

LONGEST = 52
"""Letters of a run's name."""


def plan_sweep(
    file: Path,
    overrides: Sequence[str] | None,
    sets: Sequence[str],
    runs: Path,
    launcher: Sweeping,
    backend: str,
    *,
    fresh: bool = False,
    files: bool = True,
    after: tuple[RunDir, ...] = (),
    retry: float = 0.0,
    typed: Typed | None = None,
) -> tuple[Sweep, list[Submission]]:
    """The sweep and its checked runs; raises Faults and UserError. Creates no files."""
    from ortflow.launchers.sweep_outputs import refuse_shared_outputs
    from ortflow.launchers.sweeps import Member, Sweep
    from ortflow.workflow.spec.file.combinations import combinations, count, read_axes

    axes = read_axes(sets, overrides or ())
    _refuse_fixed(axes, backend)
    launcher.check_sweep(count(axes))
    members, submissions = [], []
    for task, values in enumerate(combinations(axes)):
        changes = [*(overrides or ()), *(f"{key}={value}" for key, value in values.items())]
        root, submission = _submission(file, changes, runs, task, fresh=fresh, files=files, typed=typed)
        members.append(Member(submission.run, values))
        submissions.append(replace(submission, after=after, retry=retry))
    refuse_shared_outputs([submission.spec for submission in submissions])
    return Sweep(root, tuple(members)), submissions


def _submission(
    file: Path, changes: Sequence[str], runs: Path, task: int, *, fresh: bool, files: bool, typed: Typed | None
) -> tuple[Path, Submission]:
    """The run of a task, and the common start of the paths of all run directories of its sweep."""
    from ortflow.cli.program import Typed
    from ortflow.launchers.base import Submission
    from ortflow.launchers.sweeps import member_root
    from ortflow.workflow.errors import Faults
    from ortflow.workflow.run.rundir import RunDir
    from ortflow.workflow.spec.file.paths import resolve_paths, run_directory

    reading = (typed or Typed()).reading(file, changes, files=files)
    if reading.spec is None or reading.faults:
        raise Faults(reading.faults)
    spec = reading.spec
    if spec.run_dir is None:
        spec = spec.model_copy(update={"run_dir": str(runs / spec.name)})
    root, name = run_directory(spec, Path.cwd()), f"{spec.name}-{task}"
    if len(name) > LONGEST:
        raise UserError(
            f"{name} is longer than the {LONGEST} letters that a run's name may have",
            where="name",
            fix=f"use a name of at most {LONGEST - len(name) + len(spec.name)} letters for the sweep",
        )
    run = RunDir(member_root(root, task))
    spec = resolve_paths(spec.model_copy(update={"name": name, "run_dir": str(run.root)}), file)
    return root, Submission(spec, run, file.absolute().parent, fresh=fresh)


def _refuse_fixed(axes: Sequence[Axis], backend: str) -> None:
    """Raise UserError for keys that must be the same for all tasks of an array, or that identify its runs."""
    for axis in axes:
        path = axis.key.split(".")
        if path[0] in ("name", "run_dir"):
            raise UserError(
                f"--set {axis.key}: a sweep gives each run its own, {path[0]}-0, {path[0]}-1, …",
                fix=f"leave it out, or give one {path[0]} for all: {path[0]}=VALUE",
            )
        if path[0] == "resources" or path == ["backends"] or path[:2] == ["backends", backend]:
            raise UserError(
                f"--set {axis.key}: it must be the same for all runs of a sweep, which are one job array",
                fix="submit one run for each value",
            )


def submit_sweep(planned: tuple[Sweep, list[Submission]], launcher: Sweeping, at_once: int | None, runs: Path) -> None:
    """Submit a sweep, and print the next commands."""
    from ortflow.cli.run import refuse_elsewhere
    from ortflow.launchers.records import State, state

    sweep, submissions = planned
    request = launcher.request_sweep(sweep, submissions, at_once)
    for run in sweep.runs:
        refuse_elsewhere(run, launcher)
    typer.echo(launcher.submit_sweep(request))
    finished = sum(state(run.read_attempts(), alive=False) is State.FINISHED for run in sweep.runs)
    if finished == len(sweep.runs):
        typer.echo(f"{sweep.root} holds this sweep, finished; --fresh starts from the beginning and keeps the old runs")
        return
    name = _reference(sweep, runs)
    message = f"{len(sweep.runs)} runs" + (f", {finished} of them finished already" if finished else "")
    typer.echo(f"{name} is a job array of {message}; status: ortflow list --sweep {name}")
    typer.echo(f"  one of them: ortflow status {name}-0    save and stop all: ortflow cancel --sweep {name}")


def cancel_sweep(name: str, runs: Path, *, now: bool) -> None:
    """Have all runs of a sweep save and stop, and wait for their end."""
    from ortflow.cli.cancel import PATIENCE
    from ortflow.launchers.base import find_launcher, launcher_name, statuses
    from ortflow.launchers.capabilities import Sweeping

    sweep = find_sweep(name, runs)
    runs_here = [run for run in sweep.runs if run.run_file.is_file()]
    by_launcher: dict[str, list[RunDir]] = {}
    for run in runs_here:
        by_launcher.setdefault(launcher_name(run.read_attempts()), []).append(run)
    asked_count = 0
    for launcher, launcher_runs in ((find_launcher(key), launcher_runs) for key, launcher_runs in by_launcher.items()):
        if isinstance(launcher, Sweeping):
            asked_count += launcher.cancel_sweep(launcher_runs, now=now)
        else:
            asked_count += sum(launcher.cancel(run, now=now) for run in launcher_runs)
    end, pause = time.monotonic() + PATIENCE, 0.2
    run_statuses = statuses(runs_here)
    while active := [run_status for run_status in run_statuses if run_status.state.active]:
        if time.monotonic() > end:
            rest = f" and {len(active) - 1} more" if len(active) > 1 else ""
            harder = "" if now else "; `ortflow cancel --now` stops without saving"
            raise OrtflowError(f"{active[0].name}{rest} did not stop within {PATIENCE:.0f} s{harder}")
        time.sleep(pause)
        pause, run_statuses = min(2.0, pause * 1.3), statuses(runs_here)
    counts = Counter(run_status.state.value for run_status in run_statuses)
    message = ", ".join(f"{number} {state}" for state, number in counts.items())
    typer.echo(f"{sweep.name}: {message}" if asked_count else f"{sweep.name} is not running: {message}")


def find_sweep(text: str, runs: Path) -> Sweep:
    """The sweep of a name, or of the path that its runs' directories begin with; raises UserError."""
    from ortflow.launchers.sweeps import SUFFIX, is_sweep, read_sweep

    for path in (Path(text),) if os.sep in text else (runs / text, Path(text)):
        root = Path(os.path.abspath(path))
        root = root.with_name(root.name.removesuffix(SUFFIX))
        if is_sweep(root):
            return read_sweep(root)
    names = [path.name.removesuffix(SUFFIX) for path in sorted(runs.glob(f"*{SUFFIX}"))]
    hint = f"there are: {', '.join(names)}" if names else "`ortflow submit --backend NAME --set` makes one"
    raise UserError(f"there is no sweep {text} in {runs}", fix=hint)


def _reference(sweep: Sweep, runs: Path) -> str:
    """How to name the sweep in the next command: by its name if that is enough."""
    folders = {Path(os.path.abspath(folder)) for folder in (runs, default_runs())}
    return sweep.name if folders == {sweep.root.parent} else os.path.relpath(sweep.root)
