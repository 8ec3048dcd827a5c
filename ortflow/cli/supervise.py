"""`ortflow supervise`: repairs, from a terminal, what the cluster cannot repair in a run."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from ortflow.cli.runs import RUNS, RunArgument, RunsOption, find_run
from ortflow.workflow.errors import UserError


def supervise(run: RunArgument, runs: RunsOption = Path(RUNS)) -> None:
    """Replace lost pods until the run ends.

    Handles what the cluster does not: dead workers, lost nodes, spent retries.
    Ctrl-C does not stop the run.
    """
    from ortflow.launchers.base import launcher_name, launcher_of
    from ortflow.launchers.capabilities import Supervising

    run_dir = find_run(run, runs)
    launcher = launcher_of(run_dir)
    if not isinstance(launcher, Supervising):
        name = launcher_name(run_dir.read_attempts())
        raise UserError(f"{run_dir.root.name} is a run of the {name} launcher, which needs no `ortflow supervise`")

    def report(text: str) -> None:
        typer.echo(f"{time.strftime('%H:%M:%S')}  {text}")

    try:
        code = launcher.supervise(run_dir, report)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit(code)
