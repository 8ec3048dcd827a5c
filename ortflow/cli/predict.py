"""`ortflow predict`: the outputs of a model for every sample of a set."""

from __future__ import annotations

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
from ortflow.cli.runs import RUNS, RunsOption


def predict(
    model: AppliedArgument,
    data: DataOption,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write: .parquet, .arrow, .csv or .npz.")],
    column: ColumnsOption = [],  # noqa: B006 - typer's default
    step: StepOption = None,
    micro_batch: MicroBatchOption = None,
    ranks: RanksOption = 1,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Write the outputs of a model for every sample of a set.

    The table has one row a sample, in the order of the set.
    """
    applied_model = applied(model, runs, step)
    request, out = asked_of(data, column, micro_batch), output.absolute()

    from ortflow.workflow.inference.predict import predict_model, predict_run

    if isinstance(applied_model, Path):
        done = predict_model(applied_model.absolute(), request, out, ranks)
    else:
        done = predict_run(applied_model, step, request, out, ranks)
    step_text = "" if done.step is None else f", step {done.step}"
    typer.echo(f"{output}: {done.samples:,} rows of {', '.join(done.columns)}{step_text}")
