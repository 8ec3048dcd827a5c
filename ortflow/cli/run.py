"""`ortflow run` and `ortflow resume`: a run on this machine, followed until it ends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ortflow.cli.runs import RUNS, RunArgument, RunsOption, find_run, reference
from ortflow.cli.submission import FileArgument, FreshOption, OverridesArgument, submission_of
from ortflow.workflow.errors import EXIT_FAILURE, EXIT_PREEMPTED, EXIT_USER, OrtflowError, UserError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ortflow.launchers.base import Submission
    from ortflow.launchers.opening import Opened
    from ortflow.launchers.supervisor import View

DetachOption = Annotated[bool, typer.Option("--detach", "-d", help="Run in the background.")]


def run(
    file: FileArgument,
    overrides: OverridesArgument = None,
    detach: DetachOption = False,
    fresh: FreshOption = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Train on this machine and follow.

    Goes on where the run of the run directory was. Ctrl-C saves and leaves with exit code 75; a second one leaves at
    once.
    """
    start(submission_of(file, overrides, runs, fresh=fresh), runs, detach=detach)


def resume(run: RunArgument, detach: DetachOption = False, runs: RunsOption = Path(RUNS)) -> None:
    """Go on with a stopped, failed or lost run.

    Its failures and preemptions so far no longer count.
    """
    from ortflow.launchers.base import Submission
    from ortflow.launchers.opening import moved
    from ortflow.launchers.records import used
    from ortflow.workflow.spec.load import load_run_file

    found = find_run(run, runs)
    spec = moved(load_run_file(found.run_file), found.root)
    before = used(found.read_attempts())
    if before.failures or before.preemptions:
        typer.echo(
            f"{before.failures} failures and {before.preemptions} preemptions no longer count: "
            f"{spec.restart.failures} failures are allowed from here",
            err=True,
        )
    start(Submission(spec, found, new_budget=True), runs, detach=detach)


def start(submission: Submission, runs: Path, *, detach: bool) -> None:
    """Start a run here, in the foreground or detached, and say what can be done next."""
    from ortflow.launchers.local import LocalLauncher
    from ortflow.launchers.starting import run_here

    launcher, name = LocalLauncher(), reference(submission.run, runs)
    request = launcher.request(submission)
    if detach:
        launcher.submit(request)
        tell_how_to_follow(name)
        return
    end = run_here(request, watch)
    if end.code == EXIT_USER:
        raise UserError(end.cause)
    if end.code == EXIT_FAILURE:
        more = f"`ortflow resume {name}` tries again, `ortflow logs {name}` tells more"
        raise OrtflowError(f"{end.cause}; {end.why}; {more}")
    if end.code == EXIT_PREEMPTED:
        typer.echo(f"stopped: {end.why}; `ortflow resume {name}` goes on", err=True)
    raise typer.Exit(end.code)


def watch(ours: Opened) -> AbstractContextManager[View]:
    """The view that fits where the output goes."""
    if sys.stdout.isatty():
        from ortflow.launchers.live import LiveView

        return LiveView(ours.run, ours.spec.name)
    from ortflow.launchers.plain import PlainView

    return PlainView(ours.run, ours.spec.monitor.every_steps)


def tell_how_to_follow(name: str) -> None:
    """The verbs that work on a run in the background."""
    typer.echo(f"{name} runs in the background; follow it: ortflow logs -f {name}")
    typer.echo(f"  how it is: ortflow status {name}    save and leave: ortflow cancel {name}")
