"""`ortflow find-lr`: a learning rate for a run, by a short test."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from ortflow.cli.runs import JsonOption, print_json
from ortflow.workflow.errors import UserError

SHOWN = 12
"""Rows of the table."""


def find_lr(
    run_file: Annotated[Path, typer.Argument(metavar="RUN_FILE", help="The run file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides.")] = None,
    low: Annotated[float, typer.Option("--from", help="First learning rate.")] = 1e-6,
    high: Annotated[float, typer.Option("--to", help="Last learning rate.")] = 1.0,
    steps: Annotated[int, typer.Option("--steps", min=12, help="Steps between them.")] = 100,
    json: JsonOption = False,
) -> None:
    """Suggest a learning rate by a short test.

    A run of one rank on the CPU raises the rate from step to step, and writes nothing. The suggestion is the rate at
    which the loss falls most steeply.
    """
    if not 0 < low < high < math.inf:
        raise UserError(f"--from is {low:g} and --to is {high:g}", fix="give positive numbers, the smaller one first")
    from ortflow.launchers.interpreter import check, examine

    check(examine(sys.executable))

    from ortflow.workflow.planning.lr_range import range_test, suggestion
    from ortflow.workflow.spec.file.load import load_run_file
    from ortflow.workflow.spec.file.paths import resolve_paths
    from ortflow.workflow.spec.run import trainer_run

    spec = trainer_run(resolve_paths(load_run_file(run_file, overrides or (), files=True), run_file), "ortflow find-lr")
    points = range_test(spec, low, high, steps)
    best = suggestion(points)
    if json:
        print_json({"suggestion": best, "points": [vars(point) for point in points]})
        return
    typer.echo(f"{'lr':>10}  {'loss':>10}  smoothed")
    for point in points[:: max(1, len(points) // SHOWN)]:
        typer.echo(f"{point.lr:10.2e}  {point.loss:10.4g}  {point.smoothed:.4g}")
    typer.echo(f"steepest fall at {best:.1e}: train.optimizer.lr={best:.1e}")
