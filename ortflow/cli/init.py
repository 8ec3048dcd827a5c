"""`ortflow init`: writes the commented run file of a training program or a model."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ortflow.cli.applied import place
from ortflow.cli.program import (
    GpusOption,
    NameOption,
    NodesOption,
    RanksOption,
    StartOption,
    Typed,
    is_program,
    is_python,
)
from ortflow.workflow.errors import UserError

ProgramArgument = Annotated[
    Path,
    typer.Argument(
        metavar="PROGRAM|MODEL",
        help="A Python file or an executable, its arguments behind `--`; or an ONNX model with --data.",
    ),
]


def init(
    program: ProgramArgument,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Run file to write; by default that of PROGRAM, with the suffix .yaml."),
    ] = None,
    ranks: RanksOption = None,
    nodes: NodesOption = None,
    gpus: GpusOption = None,
    name: NameOption = None,
    start_by: StartOption = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="The training set, for an ONNX model.", parser=place)
    ] = None,
) -> None:
    """Write the run file of a training program or a model, with comments.

    `ortflow run` does the same with it as with PROGRAM and these options. For an ONNX model and a set (--data),
    columns, label, loss and micro-batch are guessed. An existing file is not overwritten.
    """
    if program.suffix == ".onnx" or data is not None:
        _init_model(program, data, output, Typed.here(ranks, nodes, gpus, name, start_by))
        return
    if not program.is_file() or not is_program(program):
        problem = "is not a Python file or an executable" if program.exists() else "does not exist"
        raise UserError(f"{program} {problem}", fix="give the path of a training program")
    file = output or program.with_suffix(".yaml")
    _write(file, run_file_of(program, file, Typed.here(ranks, nodes, gpus, name, start_by)))


def _init_model(model: Path, data: Path | None, output: Path | None, typed: Typed) -> None:
    from ortflow.cli.init_model import refuse_options, run_file_of_model
    from ortflow.launchers.interpreter import check, examine
    from ortflow.workflow.spec.locations import absolute

    if model.suffix != ".onnx":
        raise UserError("--data is for ONNX models", fix="leave it out")
    if data is None:
        raise UserError("an ONNX model needs --data", fix="give its training set")
    refuse_options(typed)
    if not model.is_file():
        raise UserError(f"{model} does not exist", fix="give the path of an ONNX model")
    check(examine(sys.executable))
    file = output or model.with_suffix(".yaml")
    if file.exists():
        raise UserError(f"{file} exists", fix="remove it, or name another file with --output")
    _write(file, run_file_of_model(model.absolute(), absolute(data), file.absolute()))


def _write(file: Path, text: str) -> None:
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        raise UserError(f"{file} exists", fix="remove it, or name another file with --output") from None
    typer.echo(f"wrote {file}; `ortflow run {file}` starts the run")


def run_file_of(program: Path, file: Path, typed: Typed) -> str:
    """The text of the run file, which is valid as it is."""
    values = typed.values(program)
    path = os.path.relpath(program, file.absolute().parent)
    section: dict[str, Any] = values["program"]
    resources = values["resources"]
    start_line = f"script: {_text(path)}" if is_python(program) else f"command: {_text([f'./{path}'])}"
    start = typed.start or "direct"
    return f"""\
# The run of {program.name}: `ortflow run {file.name}` here, `ortflow submit -b slurm {file.name}` on a cluster.
# docs/programs.md describes what a program may do; docs/run-file.md lists every key.
name: {values["name"]}

program:
  {start_line}
  args: {_text(section["args"])}
  # Values for {{NAME}} in args, for sweeps: `--set program.parameters.lr=1e-3,1e-4`.
  # parameters: {{lr: 1e-3}}
  # env: {{TOKENIZERS_PARALLELISM: "false"}}
  # cwd: .                     # the folder that the program starts in
  start: {start:22}# direct, torchrun, deepspeed, accelerate or horovod
  stop_seconds: 120            # between the request to stop and SIGKILL

resources:
  nodes: {resources["nodes"]}
  ranks_per_node: {resources["ranks_per_node"]}
  gpus_per_rank: {resources["gpus_per_rank"]}
  # memory: 16G                # of a node
  # time_limit: 2:00:00

# Checkpoints that the program commits with ortflow.program.
checkpoint:
  # every_seconds: 300         # for programs that use ortflow.program.start
  keep: {{newest: 2}}

restart:
  failures: 3                  # restarts after failures, at most; preemptions have their own budget
  hung_seconds: 1800           # without output or a reported step, an attempt counts as hung; null: never

# backends:
#   slurm: {{partition: gpu}}
#   kubernetes: {{image: registry.example/train:1, volume: {{claim: data}}, files: [{_text(path)}]}}
"""


def _text(value: Any) -> str:
    """A value on one line of YAML."""
    import yaml

    from ortflow.workflow.spec.file.scalars import scalar

    if isinstance(value, list):
        return f"[{', '.join(_text(element) for element in value)}]"
    if not isinstance(scalar(value), str):
        return json.dumps(value)  # 1e-3 is text here
    # PyYAML folds at 80 columns, and ends a document that is a plain scalar with a line `...`.
    return yaml.safe_dump(value, width=10**6).removesuffix("\n").removesuffix("\n...")
