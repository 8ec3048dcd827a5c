"""`ortflow cancel`: have a run save and leave."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ortflow.cli.runs import RUNS, RunArgument, RunsOption, find_run
from ortflow.workflow.errors import OrtflowError

PATIENCE = 60.0
"""Seconds after which waiting ends; a supervisor kills ranks that do not leave within 30."""


def cancel(
    run: RunArgument,
    now: Annotated[bool, typer.Option("--now", help="Leave at once, without saving.")] = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Have a run save and leave.

    Waits until it has. Resume goes on with it.
    """
    from ortflow.launchers.base import launcher_of

    found = find_run(run, runs)
    launcher = launcher_of(found)
    if not launcher.cancel(found, now=now):
        typer.echo(f"{found.root.name} is not running: {launcher.status(found).state.value}")
        return
    end = time.monotonic() + PATIENCE
    while (how := launcher.status(found)).state.active:
        if time.monotonic() > end:
            raise OrtflowError(f"{found.root.name} was asked to leave and has not within {PATIENCE:.0f} s")
        time.sleep(0.2)
    typer.echo(f"{found.root.name}: {how.state.value} at step {how.step}")
