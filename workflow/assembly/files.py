"""Writes the files of `build` into the run directory, graphs.json last."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ortflow.workflow.checkpoint.tensors import header_of
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.export.model_file import write_array
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.ir.edit import replace
from ortflow.workflow.graph.types import (
    LOSS_SCALE,
    SEED,
    GraphSet,
)
from ortflow.workflow.parallel.division import NAME
from ortflow.workflow.run.rundir import replacing, sync_directory, write_atomically
from ortflow.workflow.system.disk_space import OutOfDisk, is_full
from ortflow.workflow.weights.kept import RECORD


def write_files(result: GraphSet, files: Mapping[str, bytes], tensors: Mapping[str, np.ndarray]) -> None:
    """Write everything into the set's folder, graphs.json last."""
    root = result.root
    if root.is_symlink():
        raise UserError(
            f"{root} is a link, and files behind links are not replaced", where="run_dir", fix="replace it by a folder"
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_division(root)
        further_forms = [form for form in Form if form is not Form.PLAIN]
        forms = (form.of(graph) for form in further_forms for graph in (result.train, result.optimizer))
        for graph in (result.infer, result.optimizer, result.state_dict, root / RECORD, *forms):
            # Files of an earlier attempt.
            graph.unlink(missing_ok=True)
        for name, data in files.items():
            (root / name).parent.mkdir(exist_ok=True)
            write_atomically(root / name, data)
        write_tensors(result.initial, tensors)
        sync_directory(root)
        result.save()
    except OSError as error:
        if is_full(error):
            size = sum(map(len, files.values())) + sum(array.nbytes for array in tensors.values())
            raise OutOfDisk(root, size) from error
        # If a temporary file is moved to its destination, the destination is named.
        place = getattr(error, "filename2", None) or getattr(error, "filename", None) or root
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot write {place}: {reason}", where="run_dir") from None


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write fp32 tensors as a safetensors file, one at a time: its own library copies all of them first."""
    places, end = dict[str, Any](), 0
    for name, array in tensors.items():
        start, end = end, end + array.nbytes
        places[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [start, end]}
    with replacing(path) as file:
        file.write(header_of(places))
        for array in tensors.values():
            write_array(file, array)


def _remove_division(root: Path) -> None:
    """Remove the files of a division that an earlier attempt left there."""
    (root / NAME).unlink(missing_ok=True)
    for folder in root.glob("part-[0-9]*"):
        shutil.rmtree(folder)


def serialized(model: onnx.ModelProto, inputs: Sequence[onnx.ValueInfoProto]) -> bytes:
    """The model with these inputs, as in `give_inputs`."""
    give_inputs(model, inputs)
    return bytes(model.SerializeToString(deterministic=True))


def give_inputs(model: onnx.ModelProto, inputs: Sequence[onnx.ValueInfoProto]) -> None:
    """Give the model exactly these inputs, in this order, including inputs that it does not read; then those that only
    this form of it has: the seed of its dropouts, and the loss scale.
    """
    names = {value.name for value in inputs}
    added = [value for value in model.graph.input if value.name in (SEED, LOSS_SCALE) and value.name not in names]
    replace(model.graph.input, [*inputs, *added])
