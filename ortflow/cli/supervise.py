"""`ortflow supervise`: look after a run on Kubernetes, from a terminal."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from ortflow.cli.runs import RUNS, RunArgument, RunsOption, find_run
from ortflow.workflow.errors import UserError


def supervise(run: RunArgument, runs: RunsOption = Path(RUNS)) -> None:
    """Repair what Kubernetes cannot until the run ends: dead workers, lost nodes, spent retries.

    Ctrl-C does not stop the run. With backends.kubernetes.supervisor this runs in the cluster.
    """
    from ortflow.launchers.base import launcher_name

    found = find_run(run, runs)
    if (name := launcher_name(found.read_attempts())) != "kubernetes":
        raise UserError(f"{found.root.name} is a run of the {name} launcher, which looks after it itself")
    from ortflow.launchers.kubernetes.links import Links
    from ortflow.launchers.kubernetes.supervise import in_terminal

    def say(text: str) -> None:
        typer.echo(f"{time.strftime('%H:%M:%S')}  {text}")

    try:
        code = in_terminal(found, Links(), say)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit(code)
