"""`ortflow run` and `ortflow resume`: a run on this machine, followed until it ends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from ortflow.cli.program import (
    GpusOption,
    NameOption,
    NodesOption,
    RanksOption,
    StartOption,
    TargetArgument,
    Typed,
)
from ortflow.cli.runs import RUNS, RunArgument, RunsOption, find_run, is_run, reference
from ortflow.cli.submission import FreshOption, OverridesArgument, submission_of
from ortflow.workflow.errors import EXIT_FAILURE, EXIT_PREEMPTED, EXIT_USER, OrtflowError, UserError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ortflow.launchers.base import Launcher, Submission
    from ortflow.launchers.run_directory_lock import Opened
    from ortflow.launchers.supervision.supervised import View
    from ortflow.workflow.run.rundir import RunDir

DetachOption = Annotated[bool, typer.Option("--detach", "-d", help="Run in the background.")]


def run(
    file: TargetArgument,
    overrides: OverridesArgument = None,
    detach: DetachOption = False,
    fresh: FreshOption = False,
    ranks: RanksOption = None,
    nodes: NodesOption = None,
    gpus: GpusOption = None,
    name: NameOption = None,
    start_by: StartOption = None,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Train on this machine and show progress.

    Resumes the run of the run directory. Ctrl-C saves and exits with code 75; a second Ctrl-C exits immediately.
    """
    typed = Typed.here(ranks, nodes, gpus, name, start_by)
    start(submission_of(file, overrides, runs, fresh=fresh, typed=typed), runs, detach=detach)


def resume(
    run: RunArgument,
    overrides: OverridesArgument = None,
    detach: DetachOption = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Resume a run, or make a finished one longer.

    A run of another launcher is submitted there again. Earlier failures and preemptions no longer count.
    """
    from ortflow.launchers.base import Submission, launcher_of
    from ortflow.launchers.local import LocalLauncher
    from ortflow.launchers.records import used
    from ortflow.workflow.spec.file.load import load_run_file
    from ortflow.workflow.spec.file.paths import moved, resolve_paths

    run_dir = find_run(run, runs)
    spec = moved(load_run_file(run_dir.run_file, overrides or ()), run_dir.root)
    before = used(run_dir.read_attempts())
    counted = ""
    if before.failures or before.preemptions:
        counted = (
            f"{before.failures} failures and {before.preemptions} preemptions are no longer counted: "
            f"{spec.restart.failures} failures are allowed from here"
        )
    launcher = launcher_of(run_dir)
    if overrides and spec.run_dir is not None:
        spec = resolve_paths(spec, Path("run.yaml").absolute())
    submission = Submission(spec, run_dir, new_budget=True, overrides=tuple(overrides or ()))
    if isinstance(launcher, LocalLauncher):
        if counted and not launcher.status(run_dir).state.active:
            typer.echo(counted, err=True)
        start(submission, runs, detach=detach)
    else:
        hand_over(launcher, submission, runs, follow=False, counted=counted)


def start(submission: Submission, runs: Path, *, detach: bool) -> None:
    """Start a run here, in the foreground or detached, and print the next commands."""
    from ortflow.launchers.local import LocalLauncher
    from ortflow.launchers.starting import run_here

    launcher, name = LocalLauncher(), reference(submission.run, runs)
    refuse_elsewhere(submission.run, launcher)
    request = launcher.request(submission)
    if detach:
        launcher.submit(request)
        print_submitted(submission.run, name)
        return
    end = run_here(request, watch)
    if end.finished:
        print_how_to_train_longer(submission.run, name)
    leave(end.code, end.cause, end.reason, submission.run, name)


def hand_over(launcher: Launcher, submission: Submission, runs: Path, *, follow: bool, counted: str = "") -> None:
    """Have a launcher start a run, print the next commands, and follow the run if requested.

    `counted`, a message about renewed budgets, is printed after the launcher has accepted the run.
    """
    run, name = submission.run, reference(submission.run, runs)
    refuse_elsewhere(run, launcher)
    request = launcher.request(submission)
    if not follow:
        before = len(run.read_attempts())
        typer.echo(launcher.submit(request))
        # A suspended run continues in its existing submission.
        if counted and len(run.read_attempts()) > before:
            typer.echo(counted, err=True)
        print_submitted(run, name)
        return
    from ortflow.launchers.supervision.following import Follower
    from ortflow.launchers.view.plain import PlainView
    from ortflow.workflow.steps.save_period import save_message

    follower = Follower(run, launcher, PlainView(run, submission.spec.monitor.every_steps))
    typer.echo(launcher.submit(request))
    print_changes(run)
    typer.echo(save_message(submission.spec.checkpoint, by_program=submission.spec.program is not None))
    try:
        end = follower.follow()
    except KeyboardInterrupt:
        typer.echo(f"the run continues; follow it: ortflow logs -f {name}", err=True)
        raise typer.Exit(130) from None
    leave(end.code, end.how.cause or end.how.state.value, end.how.why or "", run, name)


def leave(code: int, cause: str, reason: str, run: RunDir, name: str) -> NoReturn:
    """Exit as the run has ended, and print how to continue it; after wrong input only if steps were done."""
    if code == EXIT_USER:
        raise UserError(
            cause, fix=f"correct it, then continue with `ortflow resume {name} KEY=VALUE`" if is_run(run) else None
        )
    if code == EXIT_FAILURE:
        message = "; ".join(filter(None, (cause, reason)))
        raise OrtflowError(f"{message}; `ortflow resume {name}` tries again, `ortflow logs {name}` shows more")
    if code == EXIT_PREEMPTED:
        typer.echo(f"stopped: {reason or cause}; `ortflow resume {name}` continues", err=True)
    raise typer.Exit(code)


def refuse_elsewhere(run: RunDir, launcher: object) -> None:
    """Raise UserError if the run is active with another launcher."""
    from ortflow.launchers.base import launcher_of

    other = launcher_of(run)
    if type(other) is not type(launcher) and (run_status := other.status(run)).state.active:
        raise UserError(
            f"{run.root} is {run_status.state.value} with the {run_status.launcher} launcher"
            + (f", job {run_status.job}" if run_status.job else ""),
            fix=f"stop it first with `ortflow cancel {run.root}`",
        )


def watch(directory: Opened) -> AbstractContextManager[View]:
    """The live view on a terminal, otherwise plain lines; of a program, its output."""
    if directory.spec.program is not None:
        from ortflow.launchers.view.output import OutputView

        return OutputView(directory.run, directory.spec.monitor.every_steps)
    if sys.stdout.isatty():
        from ortflow.launchers.view.live import LiveView

        return LiveView(directory.run, directory.spec.name)
    from ortflow.launchers.view.plain import PlainView

    return PlainView(directory.run, directory.spec.monitor.every_steps)


def print_submitted(run: RunDir, name: str) -> None:
    """Print the changes of a run that continues in the background, and the next commands."""
    from ortflow.launchers.records import State, state

    if state(run.read_attempts(), alive=False) is State.FINISHED:
        print_how_to_train_longer(run, name)
        return
    print_changes(run)
    print_how_to_follow(name)


def print_changes(run: RunDir) -> None:
    """Print the keys that change from the next attempt on."""
    from ortflow.launchers.records import pending_changes

    for note in pending_changes(run.read_attempts()):
        typer.echo(note)


def print_how_to_train_longer(run: RunDir, name: str) -> None:
    """Print the command that continues a finished run."""
    from ortflow.launchers.attempts.tail import status_records
    from ortflow.workflow.spec.file.load import load_run_file

    train = load_run_file(run.run_file).train
    if train is None:
        typer.echo(
            f"the run in {run.root} has finished; run it further with other arguments "
            f"(`ortflow resume {name} program.args=…`), or from the beginning with --fresh, which renames the old run"
        )
        return
    longer = f"train.epochs={2 * train.epochs}" if train.epochs is not None else f"train.steps={2 * (train.steps or 1)}"
    if train.early_stop is not None and any(r.get("event") == "early_stop" for r in status_records(run.events(0))[0]):
        longer = f"train.early_stop.patience={2 * train.early_stop.patience}"
    typer.echo(
        f"the run in {run.root} has finished; train longer with `ortflow resume {name} {longer}`, "
        "or start from the beginning with --fresh, which renames the old run"
    )


def print_how_to_follow(name: str) -> None:
    """Print the commands for a run in the background."""
    from ortflow.launchers.remote.arrival import as_typed

    typer.echo(f"{name.removeprefix(as_typed())} runs in the background; follow it: ortflow logs -f {name}")
    typer.echo(f"  status: ortflow status {name}    save and stop: ortflow cancel {name}")
