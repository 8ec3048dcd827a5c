"""Writes weights for PyTorch: a safetensors file, or a file of `torch.save`.

Tied entries are all in both, so that `load_state_dict(strict=True)` accepts them: safetensors repeats their elements,
and `torch.save` stores them once.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import replacing
from ortflow.workflow.weights.file import read_file, write_file
from ortflow.workflow.weights.table import Array, Entry, as_dtype

PRODUCER = {"format": "pt", "producer": "ortflow"}
"""Metadata of a file; transformers reads `format`."""
UNSIGNED = ("U16", "U32", "U64")
"""safetensors' element types that PyTorch has only since 2.3."""


def check_values(entries: Sequence[Entry], tensors: Mapping[str, Array]) -> None:
    """Raise UserError if the value of an entry is not known."""
    absent = [entry.name for entry in entries if entry.value is None and entry.tensor not in tensors]
    if absent:
        rest = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise UserError(
            f"the model file has no value for {', '.join(absent[:3])}{rest}, and a state_dict without it does not load",
            fix="start the run from a file that has them (model.start_from), or export the ONNX model",
        )


def value_of(entry: Entry, tensors: Mapping[str, Array]) -> Array:
    """The elements of an entry, in the type that PyTorch has them. Raises UserError if one would become infinite."""
    if entry.value is not None:
        return entry.value
    return as_dtype(tensors[str(entry.tensor)].reshape(entry.shape), entry.dtype, entry.name)


def write_safetensors(
    path: Path, entries: Sequence[Entry], tensors: Mapping[str, Array], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file. Raises OSError, and UserError for a value that its type cannot represent."""
    by_name = {entry.name: entry for entry in entries}
    rows = [(entry.name, entry.dtype, entry.shape) for entry in entries]
    write_file(path, rows, lambda name: value_of(by_name[name], tensors), {**PRODUCER, **metadata})


def require_torch() -> None:
    """Raise UserError if PyTorch is not installed."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise UserError("--to state_dict needs PyTorch", fix="install torch, or use --to safetensors")


def write_state_dict(path: Path, entries: Sequence[Entry], tensors: Mapping[str, Array]) -> None:
    """Write a file that `torch.load(path, weights_only=True)` reads. Raises UserError without PyTorch, OSError."""
    require_torch()
    import torch

    torch_tensors: dict[str, Any] = {}
    state: OrderedDict[str, Any] = OrderedDict()
    for entry in entries:
        if entry.tensor in torch_tensors:
            state[entry.name] = torch_tensors[str(entry.tensor)]
            continue
        if entry.dtype in UNSIGNED and not hasattr(torch, "uint16"):
            kind = f"uint{entry.dtype[1:]}"
            raise UserError(
                f"{entry.name} is of {kind}, which PyTorch {torch.__version__} has not",
                fix="install torch 2.3 or later, or use --to safetensors",
            )
        # A copy: torch.from_numpy warns of an array that cannot be written to, as those of a mapped file cannot.
        array = np.array(value_of(entry, tensors))
        if entry.dtype == "BF16":  # by signed bits, which every PyTorch has
            tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(array)
        state[entry.name] = tensor
        if entry.tensor is not None:
            torch_tensors[entry.tensor] = tensor
    with replacing(path) as file:
        torch.save(state, file)


def refuse_other_files(path: Path) -> None:
    """Raise UserError if a file at `path` is not weights that ortflow has written."""
    if not os.path.lexists(path):
        return
    try:
        from_ortflow = read_file(path).metadata.get("producer") == PRODUCER["producer"]
    except (UserError, OSError):
        from_ortflow = False
    if not from_ortflow:
        raise UserError(
            f"{path} exists and is not a safetensors file that ortflow has written, so it is not replaced",
            fix="choose another path, or remove it",
        )
