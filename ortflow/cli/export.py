"""`ortflow export`: writes the inference model of any checkpoint, without a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ortflow.cli.runs import RUNS, RunArgument, RunsOption, find_run


def export(
    run: RunArgument,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Step of the checkpoint (default: the newest).")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write (default: export.path of the run file).")
    ] = None,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Write the inference model of a checkpoint.

    It is checked on real samples.
    """
    from ortflow.launchers.interpreter import check, examine

    found = find_run(run, runs)
    check(examine(sys.executable))

    from ortflow.workflow.steps.export import deviation, export_checkpoint

    done = export_checkpoint(found, step, output.absolute() if output else None)
    typer.echo(f"{done.path}: step {done.step}, {deviation(done.max_difference)}")
