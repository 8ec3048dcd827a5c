"""`ortflow evaluate`: the loss and the metrics of a model on another set."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from ortflow.cli.applied import (
    AppliedArgument,
    ColumnsOption,
    DataOption,
    MicroBatchOption,
    RanksOption,
    StepOption,
    applied,
    asked_of,
)
from ortflow.cli.runs import RUNS, JsonOption, RunsOption, print_json
from ortflow.workflow.errors import UserError


def evaluate(
    model: AppliedArgument,
    data: DataOption,
    column: ColumnsOption = [],  # noqa: B006 - typer's default
    step: StepOption = None,
    loss: Annotated[
        str | None, typer.Option("--loss", help="Kind of loss of an ONNX model, such as cross_entropy.")
    ] = None,
    label: Annotated[str | None, typer.Option("--label", help="Label of that loss (default: labels).")] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Output that the loss is computed of.")] = None,
    metric: Annotated[list[str], typer.Option("--metric", help="A further metric of an ONNX model.")] = [],  # noqa: B006
    micro_batch: MicroBatchOption = None,
    ranks: RanksOption = 1,
    json: JsonOption = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Print the loss and the metrics of a run or a model on a set."""
    subject = applied(model, runs, step)
    request = asked_of(data, column, micro_batch)

    from ortflow.workflow.inference.evaluate import evaluate_model, evaluate_run
    from ortflow.workflow.inference.models import Objective
    from ortflow.workflow.spec.locations import title_of

    if isinstance(subject, Path):
        if loss is None:
            raise UserError("an ONNX model needs --loss", fix="give its kind, such as cross_entropy, mse or l1")
        options = {"kind": loss, "output": output, "label": label}
        section = {key: value for key, value in options.items() if value is not None}
        done = evaluate_model(subject.absolute(), Objective(section, metric), request, ranks)
    else:
        if metric or any(option is not None for option in (loss, label, output)):
            problem = "--loss, --label, --output and --metric are for ONNX models"
            raise UserError(problem, fix="a run has them in its run file")
        done = evaluate_run(subject, step, request, ranks)
    if json:
        values = {name: value if math.isfinite(value) else None for name, value in done.metrics.items()}
        skipped = {"skipped": done.skipped} if done.skipped else {}
        print_json({"step": done.step, "samples": done.samples, **skipped, **values, **done.tables})
        return
    step_text = "" if done.step is None else f" at step {done.step}"
    typer.echo(
        f"{done.samples:,} samples of {title_of(data)}{step_text}{', averaged weights' if done.averaged else ''}"
    )
    if done.skipped:
        rows = "1 bad row was" if done.skipped == 1 else f"{done.skipped:,} bad rows were"
        typer.echo(f"{rows} skipped: {done.bad_rows[0]}")
    for name, value in done.metrics.items():
        typer.echo(f"{name:12} {value:.6g}")
    for name, table in done.tables.items():
        typer.echo(f"{name}, a row for each label:")
        for row in table:
            typer.echo("  " + "  ".join(f"{count:6}" for count in row))
