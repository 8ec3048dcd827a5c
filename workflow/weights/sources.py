"""Opens weights, whatever they are in: a run, a checkpoint, an ONNX model, safetensors, or a file of `torch.save`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ortflow.workflow.checkpoint.checkpoint_names import MANIFEST
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.graph_hashes import hash_of
from ortflow.workflow.system.files import read_whole
from ortflow.workflow.weights.checkpoints import is_averaged, read_checkpoint, store_at
from ortflow.workflow.weights.file import Stored, read_file
from ortflow.workflow.weights.pickled import read_pickled
from ortflow.workflow.weights.table import Array

STEP = "model.start_from.step"
INDEX = ".index.json"
"""End of the name of the list of a model's shards, as transformers writes it."""
FOLDERS = ("model.safetensors", f"model.safetensors{INDEX}", "pytorch_model.bin", f"pytorch_model.bin{INDEX}")
"""Files of weights in a folder of transformers, best first."""


@dataclass(frozen=True)
class Weights:
    """Tensors by name, each read on access."""

    description: str
    digest: str
    """Hash of the files."""
    tensors: Mapping[str, Stored]
    files: tuple[Path, ...]
    """What was read."""


def open_weights(path: Path, step: int | None = None) -> Weights:
    """The weights at a path.

    Parameters
    ----------
    path
        A run directory, a folder of checkpoints or one of them, a folder or a file of transformers, or a file:
        `.onnx`, `.safetensors`, the index of shards, or anything that `torch.save` wrote.
    step
        Step of the checkpoint; None for the newest complete one.

    Raises
    ------
    UserError
        If there are no weights that can be read.
    """
    try:
        return _open(path, step)
    except OSError as error:
        raise UserError(f"the weights cannot be read ({error.strerror})", where=str(error.filename or path)) from error


def _open(path: Path, step: int | None) -> Weights:
    if (location := store_at(path)) is not None:
        store, path_step = location
        return _of_checkpoint(store, path_step if step is None else step)
    if step is not None:
        raise UserError(f"{path} has no checkpoints", where=STEP, fix="remove the step")
    if path.is_dir():
        inside = next((path / name for name in FOLDERS if (path / name).is_file()), None)
        if inside is None:
            raise UserError(f"there are no weights in {path}", fix=f"a folder must have a run, or {', '.join(FOLDERS)}")
        path = inside
    if path.name.endswith(INDEX):
        return _of_shards(path)
    return _of_files(path.name, _tensors(path), path)


def _tensors(path: Path) -> Mapping[str, Stored]:
    if path.suffix == ".onnx":
        return _of_model(path)
    with path.open("rb") as file:
        head = file.read(9)
    # safetensors begins with the length of its header in 8 bytes and the header's brace, torch.save's zip archive with
    # PK.
    if path.suffix == ".safetensors" or (head[8:9] == b"{" and head[:2] != b"PK"):
        return read_file(path).tensors
    return read_pickled(path)


def _of_shards(path: Path) -> Weights:
    try:
        names = json.loads(read_whole(path))["weight_map"]
        files = sorted({str(name) for name in names.values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError("is not an index of shards", where=str(path), fix="download it again") from None
    outside = [name for name in files if Path(name).name != name]
    if outside:
        raise UserError(f"names {outside[0]}, which is not beside it", where=str(path), fix="download it again")
    shards = {name: _tensors(path.with_name(name)) for name in files}
    absent = [name for name, file in names.items() if name not in shards[file]]
    if absent:
        raise UserError(f"names {absent[0]}, which {names[absent[0]]} does not have", where=str(path))
    tensors = {name: shards[file][name] for name, file in names.items()}
    return _of_files(f"{len(files)} shards of {path.name}", tensors, path, *map(path.with_name, files))


def _of_model(path: Path) -> Mapping[str, Stored]:
    from onnx import numpy_helper

    from ortflow.workflow.graph.file.read import read_stored

    model, _ = read_stored(path)
    kinds = {np.dtype("<f4"): "F32", np.dtype("<f8"): "F64", np.dtype("<f2"): "F16", np.dtype("<i8"): "I64"}

    def stored(tensor: Any) -> Stored | None:
        array = numpy_helper.to_array(tensor)
        dtype = "BF16" if str(array.dtype) == "bfloat16" else kinds.get(array.dtype)
        # Only onnx's ml_dtypes has bfloat16, as a type of its own; a Stored has its bits.
        bits = array.view(np.uint16) if dtype == "BF16" else array
        return None if dtype is None else Stored(dtype, tuple(array.shape), lambda: bits)

    stored_tensors = {tensor.name: stored(tensor) for tensor in model.graph.initializer}
    return {name: entry for name, entry in stored_tensors.items() if entry is not None}


def _of_checkpoint(store: DirectoryStore, step: int | None) -> Weights:
    manifest, arrays = read_checkpoint(store, step)
    tensors = {name: Stored("F32", array.shape, partial(_same, array)) for name, array in arrays.items()}
    digest = hashlib.sha256("".join(file.hash for file in manifest.files).encode()).hexdigest()
    place = store.place(manifest.step)
    averaged = ", the averaged weights" if is_averaged(manifest) else ""
    return Weights(f"step {manifest.step} of {store.path}{averaged}", digest, tensors, (place / MANIFEST,))


def _same(array: Array) -> Array:
    return array


def _of_files(description: str, tensors: Mapping[str, Stored], *files: Path) -> Weights:
    return Weights(description, _digest(files), tensors, files)


def _digest(files: Sequence[Path]) -> str:
    return hashlib.sha256("".join(map(hash_of, files)).encode()).hexdigest()
