"""Shared by `evaluate` and `predict`: what they are applied to, and the options about the samples."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ortflow.cli.runs import complete_run, find_run
from ortflow.workflow.errors import UserError

if TYPE_CHECKING:
    from ortflow.workflow.inference.models import SampleOptions
    from ortflow.workflow.run.rundir import RunDir

AppliedArgument = Annotated[
    str, typer.Argument(metavar="RUN|MODEL", help="A run, or an ONNX model.", autocompletion=complete_run)
]


def place(text: str) -> Path:
    """A path that is not empty, as that of an unset variable is: it would name the current folder."""
    if not text:
        raise UserError("is empty", where="--data", fix="give the path of a set")
    return Path(text)


DataOption = Annotated[Path, typer.Option("--data", help="The samples, as data.train takes them.", parser=place)]
ColumnsOption = Annotated[
    list[str], typer.Option("--column", metavar="INPUT=COLUMN", help="The column of an input, where the names differ.")
]
StepOption = Annotated[
    int | None, typer.Option("--step", min=0, help="Step of the run's checkpoint (default: the newest).")
]
RanksOption = Annotated[
    int, typer.Option("--ranks", min=1, max=1024, help="Processes of this machine that share the samples.")
]
MicroBatchOption = Annotated[int | None, typer.Option("--micro-batch", min=1, help="Samples computed at once.")]


def applied(text: str, runs: Path, step: int | None) -> Path | RunDir:
    """The ONNX model or the run that a text names. Raises UserError."""
    from ortflow.launchers.interpreter import check, examine

    model = Path(text)
    run = model if model.suffix == ".onnx" else find_run(text, runs)
    if run is model:
        if not model.is_file():
            raise UserError(f"there is no file {model}", fix="give an ONNX model or a run")
        if step is not None:
            raise UserError("--step is for runs", fix="leave it out")
    check(examine(sys.executable))
    return run


def asked_of(data: Path, columns: list[str], micro_batch: int | None) -> SampleOptions:
    """The options about the samples. Raises UserError."""
    from ortflow.workflow.inference.models import SampleOptions
    from ortflow.workflow.spec.locations import absolute

    pairs = [text.partition("=") for text in columns]
    for name, equals, column in pairs:
        if not (name and equals and column):
            raise UserError(f"{name}{equals}{column} is not INPUT=COLUMN", where="--column")
    return SampleOptions(absolute(data), {name: column for name, _, column in pairs}, micro_batch)
