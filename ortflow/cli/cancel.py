"""`ortflow cancel`: have a run save and stop."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ortflow.cli.runs import RUNS, RunsOption, complete_run, find_run
from ortflow.cli.sweep import SweepOption, cancel_sweep
from ortflow.workflow.errors import OrtflowError, UserError

PATIENCE = 60.0
"""Seconds to wait for the end; a supervisor kills ranks that do not exit within 30."""


def cancel(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Name or directory of the run.", autocompletion=complete_run)
    ] = None,
    sweep: SweepOption = None,
    now: Annotated[bool, typer.Option("--now", help="Stop immediately, without saving.")] = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Make a run, or all runs of a sweep, save and stop.

    Waits for the end. `ortflow resume` continues the run.
    """
    from ortflow.launchers.base import launcher_of

    if (run is None) == (sweep is None):
        raise UserError("cancel takes a run or a sweep", fix="give RUN, or --sweep NAME")
    if sweep is not None:
        cancel_sweep(sweep, runs, now=now)
        return
    assert run is not None
    run_dir = find_run(run, runs)
    launcher = launcher_of(run_dir)
    if not launcher.cancel(run_dir, now=now):
        typer.echo(f"{run_dir.root.name} is not running: {launcher.status(run_dir).state.value}")
        return
    end, pause = time.monotonic() + PATIENCE, 0.2
    while (run_status := launcher.status(run_dir)).state.active:
        if time.monotonic() > end:
            harder = "" if now else "; `ortflow cancel --now` stops without saving"
            raise OrtflowError(f"{run_dir.root.name} did not stop within {PATIENCE:.0f} s{harder}")
        time.sleep(pause)
        # Each query may call a scheduler.
        pause = min(2.0, pause * 1.3)
    typer.echo(f"{run_dir.root.name}: {run_status.state.value} at step {run_status.step}")
