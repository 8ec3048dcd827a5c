"""`ortflow export`: writes the inference model or the weights of any checkpoint, without a run."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ortflow.cli.runs import RUNS, RunArgument, RunsOption, find_run


class Form(str, Enum):
    """What is written."""

    onnx = "onnx"
    state_dict = "state_dict"
    safetensors = "safetensors"
    lora = "lora"


def export(
    run: RunArgument,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Step of the checkpoint (default: the newest).")
    ] = None,
    to: Annotated[
        Form, typer.Option("--to", help="An ONNX model, the weights under PyTorch's names, or the LoRA adapters alone.")
    ] = Form.onnx,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File to write (default: export.path of the run file, or export/state_dict.pt or "
            "export/model.safetensors in the run directory).",
        ),
    ] = None,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Write the model of a checkpoint, or its weights.

    The model is checked on real samples.
    """
    from ortflow.launchers.interpreter import check, examine

    run_dir = find_run(run, runs)
    check(examine(sys.executable))
    out = output.absolute() if output else None
    if to is not Form.onnx:
        from ortflow.workflow.steps.export_weights import export_weights

        paths = export_weights(run_dir, step, to.value, out)
        averaged = ", averaged weights" if paths.averaged else ""
        typer.echo(f"{paths.path}: step {paths.step}, {paths.entries} tensors{averaged}{_names(paths.named)}")
        return

    from ortflow.workflow.steps.export import deviation, export_checkpoint

    done = export_checkpoint(run_dir, step, out)
    typer.echo(f"{done.path}: step {done.step}, {deviation(done.max_difference)}")
    for variant in done.variants:
        typer.echo(str(variant))


def _names(from_torch: bool) -> str:
    if from_torch:
        return ""
    return (
        " under the names of the ONNX file, which export_for_training did not write: check that they are those of your"
        " module"
    )
