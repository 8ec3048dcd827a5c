"""Writes the files of `build` into the run directory, graphs.json last."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from safetensors import SafetensorError
from safetensors.numpy import save_file

from ortflow.workflow.disk_space import FULL, OutOfDisk, is_full
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir.edit import replace
from ortflow.workflow.graph.types import GraphSet, fused_of, half_of, on_cuda_of, placed_of, with_kernels_of
from ortflow.workflow.parallel.division import NAME
from ortflow.workflow.rundir import sync_directory, write_atomically


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
        forms = (
            form(graph)
            for form in (with_kernels_of, on_cuda_of, placed_of, fused_of, half_of)
            for graph in (result.train, result.optimizer)
        )
        for graph in (result.infer, result.optimizer, *forms):
            # Files of an earlier attempt.
            graph.unlink(missing_ok=True)
        for name, data in files.items():
            (root / name).parent.mkdir(exist_ok=True)
            write_atomically(root / name, data)
        temporary = root / f".{result.initial.name}"
        temporary.unlink(missing_ok=True)
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        # safetensors creates files that only the owner can read; apply the user's umask instead.
        temporary.chmod(stat.S_IMODE(mode))
        os.replace(temporary, result.initial)
        sync_directory(root)
        result.save()
    except (OSError, SafetensorError) as error:
        # safetensors reports the system's error only as text.
        if is_full(error) or any(f"os error {code}" in str(error) for code in FULL):
            needed = sum(map(len, files.values())) + sum(array.nbytes for array in tensors.values())
            raise OutOfDisk(root, needed) from error
        # If a temporary file is moved to its destination, the destination is named.
        place = getattr(error, "filename2", None) or getattr(error, "filename", None) or root
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot write {place}: {reason}", where="run_dir") from None


def _remove_division(root: Path) -> None:
    """Remove the files of a division that an earlier attempt left there."""
    (root / NAME).unlink(missing_ok=True)
    for folder in root.glob("part-[0-9]*"):
        shutil.rmtree(folder)


def serialized(model: onnx.ModelProto, inputs: Sequence[onnx.ValueInfoProto]) -> bytes:
    """The model with exactly these inputs, in this order, including inputs that it does not read."""
    replace(model.graph.input, inputs)
    return bytes(model.SerializeToString(deterministic=True))
