"""What the commands `evaluate` and `predict` apply: a run's checkpoint, or an ONNX model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ortflow.workflow.errors import Faults, UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.checks.check import check
from ortflow.workflow.spec.data import DataSection
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.file.paths import moved
from ortflow.workflow.spec.file.wording import problems
from ortflow.workflow.spec.problem import Problem, dotted
from ortflow.workflow.spec.run import TrainerRunSpec, trainer_run
from ortflow.workflow.steps.run_plan import Plan


@dataclass(frozen=True)
class SampleOptions:
    """What the command line says about the samples."""

    data: Path
    columns: Mapping[str, str]
    """Input -> column, where the names differ; these override the run file's."""
    micro_batch: int | None = None


@dataclass(frozen=True)
class Objective:
    """The loss of a model without a run."""

    loss: Mapping[str, Any]
    metrics: Sequence[str] = ()


def spec_of_run(run_dir: RunDir, options: SampleOptions, command: str) -> tuple[DataSection, TrainerRunSpec]:
    """`data` of the run, and its run file for one process on the CPU, with other samples. Raises UserError."""
    spec = trainer_run(moved(load_run_file(run_dir.run_file, others=False), run_dir.root), f"ortflow {command}")
    if spec.model is None:
        raise UserError(f"the run has the trainer {spec.trainer.name}, and `ortflow {command}` is for ONNX models")
    values = spec.model_dump()
    values["data"]["train"] = {"path": str(options.data)}
    values["data"]["eval"] = None
    values["data"]["by_length"] = None
    values["data"]["micro_batch"] = options.micro_batch or spec.data.eval_micro_batch or spec.data.micro_batch
    for key in ("parallel", "resources"):
        values.pop(key)
    values["train"] = {key: values["train"][key] for key in ("steps", "epochs", "optimizer")}
    return spec.data, TrainerRunSpec.model_validate(values)


def spec_of_model(model: Path, objective: Objective, options: SampleOptions) -> TrainerRunSpec:
    """A run file for an ONNX model. Raises Faults if the loss or a metric is not one."""
    values = {
        "name": "model",
        "model": {
            "path": str(model),
            "loss": dict(objective.loss),
            "metrics": list(objective.metrics),
            "accept_inference_export": True,
        },
        "data": {
            "train": {"path": str(options.data), "columns": dict(options.columns)},
            "micro_batch": options.micro_batch or 32,
            "last_batch": "keep",
        },
        "train": {"steps": 1, "optimizer": {"name": "sgd", "lr": 0.1}},
        "export": {"enabled": False},
    }
    try:
        spec = TrainerRunSpec.model_validate(values)
    except ValidationError as error:
        raise Faults([_of_option(problem) for problem in problems(error, values, TrainerRunSpec)]) from None
    if wrong := [problem for problem in check(spec) if problem.path[0] == "model"]:
        raise Faults([_of_option(problem) for problem in wrong])
    return spec


def _of_option(problem: Problem) -> UserError:
    """A problem of the run file that stands for a command line, at the option that has the key."""
    match problem.path:
        case ("model", "loss", "label" | "output" as key) if problem.what == "unknown key":
            return UserError("is not for this loss", where=f"--{key}", fix="leave it out")
        case ("model", "loss", "label" | "output" as key):
            return UserError(problem.what, where=f"--{key}", fix=problem.fix)
        case ("model", "loss", "kind") | ("model", "loss"):
            return UserError(problem.what, where="--loss", fix=problem.fix)
        case ("model", "metrics", int(), "name") | ("model", "metrics", int()):
            return UserError(problem.what, where="--metric", fix=problem.fix)
        case ("model", "loss" | "metrics" as section, *_, str(key)):
            fix = "write a run file with it, and evaluate its run"
            return UserError(f"needs {key}", where="--loss" if section == "loss" else "--metric", fix=fix)
        case path:
            return UserError(problem.what, where=dotted(path), fix=problem.fix)


def trained_on(run_dir: RunDir) -> str:
    """Hash of the samples that a run was trained on; empty if its plan does not say."""
    try:
        return Plan.load(run_dir.plan).data
    except (OSError, ValueError, UserError):
        return ""


@contextmanager
def scratch_run() -> Iterator[RunDir]:
    """A run directory that is removed at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="ortflow-") as folder:
        yield RunDir(Path(os.path.realpath(folder)))
