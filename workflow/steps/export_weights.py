"""The weights of a checkpoint under PyTorch's names: `ortflow export --to`. One process, no MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from typing_extensions import assert_never

from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.file.paths import moved
from ortflow.workflow.spec.model import Lora
from ortflow.workflow.spec.run import trainer_run
from ortflow.workflow.steps.identity import COPIED, recorded_identity, refuse_other_runs
from ortflow.workflow.weights.checkpoints import is_averaged, read_checkpoint
from ortflow.workflow.weights.kept import read_kept
from ortflow.workflow.weights.lora import A, B, adapted, merged
from ortflow.workflow.weights.table import Array, Entry
from ortflow.workflow.weights.writing import (
    check_values,
    refuse_other_files,
    require_torch,
    write_safetensors,
    write_state_dict,
)

Form = Literal["state_dict", "safetensors", "lora"]
DEFAULTS: Mapping[str, str] = {
    "state_dict": "export/state_dict.pt",
    "safetensors": "export/model.safetensors",
    "lora": "export/adapter_model.safetensors",
}
"""Files of a form, relative to the run directory."""


@dataclass(frozen=True)
class Weights:
    """A file of weights."""

    path: Path
    step: int
    entries: int
    named: bool
    """Whether the model file says PyTorch's names; otherwise they are those of the ONNX file."""
    averaged: bool
    """Whether they are the average of `train.average`."""


def export_weights(run_dir: RunDir, step: int | None, form: Form, path: Path | None) -> Weights:
    """Write the weights of a checkpoint, the newest complete one if `step` is None.

    Raises UserError if the run has no such checkpoint, or if an entry of the module's `state_dict` has no value.
    """
    spec = trainer_run(moved(load_run_file(run_dir.run_file, others=False), run_dir.root), "ortflow export")
    store = DirectoryStore(run_dir.root / spec.checkpoint.directory)
    if (run := recorded_identity(run_dir, spec)) is not None:
        refuse_other_runs(store, run, COPIED)
    lora = None if spec.model is None else spec.model.lora
    out = path or run_dir.root / DEFAULTS[form]
    if form == "state_dict":
        require_torch()
        if path is not None and path.exists():
            raise UserError(f"{path} exists, so it is not replaced", fix="choose another path, or remove it")
    else:
        refuse_other_files(out)
    manifest, tensors = read_checkpoint(store, step)
    table = read_kept(run_dir.graphs)
    if form == "lora":
        entries, metadata = _adapters(tensors, table, lora)
    else:
        tensors = tensors if lora is None else merged(tensors, lora)
        entries, metadata = table if table is not None else unnamed(tensors), {}
    check_values(entries, tensors)
    match form:
        case "state_dict":
            write_state_dict(out, entries, tensors)
        case "safetensors" | "lora":
            write_safetensors(out, entries, tensors, metadata)
        case _:
            assert_never(form)
    return Weights(out, manifest.step, len(entries), table is not None, is_averaged(manifest))


def _adapters(
    tensors: Mapping[str, Array], table: Sequence[Entry] | None, lora: Lora | None
) -> tuple[list[Entry], dict[str, str]]:
    """The adapters alone, under the names that peft gives them. Raises UserError if the run has none."""
    if lora is None:
        raise UserError("the run has no adapters", where="model.lora", fix="use --to safetensors")
    names = {entry.tensor: entry.name for entry in reversed(table or ())}

    def entry(weight: str, end: str) -> Entry:
        layer = f"base_model.model.{names.get(weight, weight).removesuffix('.weight')}"
        return Entry(f"{layer}{end}.weight", "F32", tensors[weight + end].shape, weight + end)

    rows = [entry(weight, end) for weight in adapted(tensors) for end in (A, B)]
    return rows, {"rank": str(lora.rank), "alpha": f"{lora.alpha:g}"}


def unnamed(tensors: Mapping[str, Array]) -> list[Entry]:
    """The entries of a model file without a table: its tensors, under its own names."""
    return [Entry(name, "F32", array.shape, name) for name, array in tensors.items()]
