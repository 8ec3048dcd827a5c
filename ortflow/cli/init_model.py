"""The commented run file of a model and a set. Called by `ortflow init model.onnx --data SET`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.locations import url_of

if TYPE_CHECKING:
    from ortflow.workflow.planning.first_run import Guess

FLOATS = {"float": "float32", "double": "float64"}
"""ONNX's names of element types, and numpy's."""


def run_file_of_model(model: Path, data: Path, file: Path) -> str:
    """The text of a run file that is valid and trains the model on the set.

    Raises UserError if the model cannot be trained, if its inputs or its label are not found in the set, or if the run
    does not fit in memory.
    """
    from ortflow.workflow.graph.intake.inspect import findings
    from ortflow.workflow.planning.first_run import micro_batch
    from ortflow.workflow.planning.guessed_set import guess_for
    from ortflow.workflow.system.host_memory import available

    report = findings(model)
    inputs, outputs = ([_array(value) for value in values] for values in (report.inputs, report.outputs))
    dataset, guess = guess_for(data, inputs, outputs)
    sizes = [value.shape[0] for value in report.inputs if value.shape]
    fixed = next((size for size in sizes if isinstance(size, int)), None)
    trial = micro_batch(len(dataset), fixed, 0, 0.0, 1)
    parts = _memory(_text(guess, report, model, data, file, trial), file)
    rest = sum(parts.values()) - parts.get("activations", 0) - parts.get("batch", 0)
    varying = (parts.get("activations", 0) + parts.get("batch", 0)) / trial
    size = micro_batch(len(dataset), fixed, rest, varying, available())
    return _text(guess, report, model, data, file, size)


def _array(value: Any) -> Any:
    from ortflow.workflow.planning.first_run import Array

    shape = tuple(size if isinstance(size, int) else None for size in (value.shape or [None])[1:])
    return Array(value.name, FLOATS.get(value.dtype, value.dtype), shape)


def _memory(text: str, file: Path) -> dict[str, int]:
    """Predicted bytes by part. Building the graphs also shows that the run file works."""
    from ortflow.workflow.planning.forecast import forecast
    from ortflow.workflow.spec.file.load import load_run_text
    from ortflow.workflow.spec.file.paths import resolve_paths
    from ortflow.workflow.spec.run import trainer_run

    return dict(forecast(trainer_run(resolve_paths(load_run_text(text, file.name), file), "ortflow init")).parts)


def _text(guess: Guess, report: Any, model: Path, data: Path, file: Path, size: int) -> str:
    folder = file.absolute().parent
    lines = "\n".join(f"    {_yaml(key)}: {_yaml(value)}" for key, value in guess.loss.items())
    mapped = "".join(f"      {_yaml(name)}: {_value(column)}\n" for name, column in guess.columns.items())
    columns = f"    columns:                   # input: column\n{mapped}" if mapped else ""
    preparation = dict(guess.preparation)
    if "text" in preparation:
        tokenizer = os.path.relpath(preparation["text"]["tokenizer"], folder)
        preparation["text"] = {**preparation["text"], "tokenizer": tokenizer}
    columns += "".join(f"    {key}: {_value(value)}\n" for key, value in preparation.items() if key != "fields")
    if rules := guess.preparation.get("fields"):
        columns += "    fields:\n" + "".join(f"      - {_value(rule)}\n" for rule in rules)
    unused = f"    # Columns that fill no input: {', '.join(guess.unused)}\n" if guess.unused else ""
    signs = report.export_warnings
    accepted = (
        f"  # {signs[0]}: better export it again with ortflow.export_for_training.\n  accept_inference_export: true\n"
        if signs
        else ""
    )
    labels = f"  labels: {_yaml(list(guess.labels))}\n" if guess.labels else ""
    metrics = f"  metrics: {_yaml(list(guess.metrics))}\n" if guess.metrics else ""
    return f"""\
# Trains {model.name}: `ortflow run {file.name}` here, `ortflow submit -b slurm {file.name}` on a cluster.
# The values are guesses from the model and the set; docs/run-file.md lists every key.
name: {_yaml(_name(model))}

model:
  path: {_yaml(os.path.relpath(model, folder))}
{accepted}{labels}  loss:                        # {guess.reasons.get("loss", "")}
{lines}
{metrics}  # start_from: weights.safetensors   # docs/weights.md

data:
  train:
    path: {_yaml(url_of(str(data)) or os.path.relpath(data, folder))}
{columns}{unused}  # eval: {{fraction: 0.1}}      # a share of the samples, or the path of others, for train.evaluation
  micro_batch: {size:<16}# samples that are computed at once; fits in half of this machine's free memory
  last_batch: {"pad" if _is_fixed(report) and guess.loss["kind"] != "output" else "drop"}

train:
  epochs: 3
  optimizer:
    name: adamw
    lr: 1.0e-3                 # `ortflow find-lr {file.name}` measures it
    weight_decay: 0.01
  clip_norm: 1.0
  # schedule: {{name: cosine, warmup_steps: 100}}
  # evaluation: {{every_steps: 100}}

resources:
  ranks_per_node: 1

checkpoint:
  every_seconds: 300
"""


def _is_fixed(report: Any) -> bool:
    return any(value.shape and isinstance(value.shape[0], int) for value in report.inputs)


def _name(model: Path) -> str:
    letters = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in model.stem.lower())
    return letters.strip("-") or "model"


def _yaml(value: Any) -> str:
    import yaml

    if isinstance(value, list):
        return json.dumps(value)
    # PyYAML folds at 80 columns, and ends a document that is a plain scalar with a line `...`.
    return yaml.safe_dump(value, width=10**6).removesuffix("\n").removesuffix("\n...")


def _value(value: Any) -> str:
    """On one line."""
    import yaml

    if isinstance(value, str):
        return _yaml(value)
    return yaml.safe_dump(value, width=10**6, default_flow_style=True, sort_keys=False).removesuffix("\n")


def refuse_options(typed: Any) -> None:
    """Raise UserError for options of programs."""
    options = [f"--{name}" for name, value in vars(typed).items() if value is not None and name != "arguments"]
    if options:
        raise UserError(f"{options[0]} is for programs", fix="change the run file instead")
