"""`ortflow logs`: prints the output of a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ortflow.cli.runs import RUNS, RunArgument, RunsOption, find_run


def logs(
    run: RunArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep following while the run is active.")] = False,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Rank whose log is printed.")] = 0,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=0, help="Attempt, from 0 (default: the newest).")
    ] = None,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Print a rank's log."""
    from ortflow.launchers.base import launcher_of

    run_dir = find_run(run, runs, adopts=True)
    launcher = launcher_of(run_dir)
    try:
        if follow and attempt is None and (run_status := launcher.status(run_dir)).waits:
            typer.echo(f"{run_dir.root.name} is {run_status.state.value}: {run_status.waits}", err=True)
        for line in launcher.logs(run_dir, attempt=attempt, rank=rank, follow=follow):
            typer.echo(line)
    except KeyboardInterrupt:
        return
