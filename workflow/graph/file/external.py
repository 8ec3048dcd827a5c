"""Reads weights that a model file stores in other files, only from inside the model's folder.

Called by `read`. The file is untrusted: it must not make ortflow open a path outside the folder (by `..`, an absolute
path or a symbolic link), read anything but a regular file, or allocate memory for bytes that do not exist.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import onnx
import psutil
from onnx import TensorProto

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.file.tensors import claimed_bytes
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.system import host_memory

_AGAIN = "export the model again, with its data file beside it"


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies."""

    file: Path
    offset: int
    length: int
    """Bytes."""


def load_external_data(model: onnx.ModelProto, folder: Path, model_path: str) -> dict[str, Stored]:
    """Read every external tensor into the model, in place; `folder` contains the model file.

    Returns where the tensors were, by name. Raises UserError, before anything is read, if a file is missing, outside
    the folder, or shorter than claimed.
    """
    claims = [
        (owner, tensor, *_claim(tensor, owner, folder, model_path))
        for owner, tensor in walk.all_tensors(model)
        if tensor.data_location == TensorProto.EXTERNAL
    ]
    if not claims:
        return {}
    total: dict[Path, int] = {}
    for _, _, file, _, length in claims:
        total[file] = total.get(file, 0) + length
    for file, length in total.items():
        size = file.stat().st_size
        if length > size:
            raise UserError(
                f"its tensors claim {length} bytes of {file.name!r}, which has {size}", where=model_path, fix=_AGAIN
            )
    check_memory(sum(total.values()), model_path)
    for owner, tensor, file, offset, length in claims:
        data = _read(file, offset, length)
        if len(data) != length:
            raise UserError(f"{owner}: {file.name!r} ended while it was read", where=model_path, fix=_AGAIN)
        tensor.raw_data = data
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
    return {tensor.name: Stored(file, offset, length) for _, tensor, file, offset, length in claims}


def check_memory(size: int, model_path: str) -> None:
    """Raises UserError if the tensors do not fit into the machine's free memory."""
    # Not what `host_memory.available` says: files that a set's readers have cached make room for weights.
    free_bytes = min(psutil.virtual_memory().available, host_memory.total())
    if size > free_bytes:
        raise UserError(
            f"its weights take {size / 2**30:.1f} GiB and this machine has {free_bytes / 2**30:.1f} GiB of memory free",
            where=model_path,
            fix="use a machine with more memory",
        )


def _claim(tensor: onnx.TensorProto, owner: str, folder: Path, model_path: str) -> tuple[Path, int, int]:
    """File, offset and length that an external tensor names, checked against the file's size."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    file = _inside(entries.get("location", ""), owner, folder, model_path)
    offset, length = (_number(entries, key, owner, model_path) for key in ("offset", "length"))
    claimed = claimed_bytes(tensor, owner, model_path)
    offset = offset or 0
    if length is not None and length != claimed:
        raise UserError(
            f"{owner} has the shape {list(tensor.dims)} of {claimed} bytes but names {length} bytes of {file.name!r}",
            where=model_path,
            fix=_AGAIN,
        )
    size = file.stat().st_size
    if offset + claimed > size:
        raise UserError(
            f"{owner} is at bytes {offset} to {offset + claimed} of {file.name!r}, which has {size}",
            where=model_path,
            fix=_AGAIN,
        )
    return file, offset, claimed


def _inside(location: str, owner: str, folder: Path, model_path: str) -> Path:
    """The file that `location` names. Raises UserError unless it is a regular file inside `folder`."""
    refusal = UserError(
        f"{owner} keeps its data in {walk.quoted(location)}, which is not inside the model's folder",
        where=model_path,
        fix="put the data file beside the model and save the model with its bare name",
    )
    parts = location.replace("\\", "/").split("/")
    # onnx's loader refuses such paths, but a session of ONNX Runtime that is given the model's path follows them.
    if not location or "\0" in location or os.path.isabs(location) or ".." in parts:
        raise refusal
    root = os.path.realpath(folder)
    path = Path(os.path.realpath(os.path.join(root, location)))
    if os.path.commonpath([root, path]) != root:
        raise refusal
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise UserError(
            f"{owner} keeps its data in {walk.quoted(location)}, which cannot be read: {error.strerror}",
            where=model_path,
            fix="put the data file beside the model",
        ) from None
    if not stat.S_ISREG(mode):
        raise UserError(
            f"{owner} keeps its data in {walk.quoted(location)}, which is not a regular file", where=model_path
        )
    return path


def _number(entries: dict[str, str], key: str, owner: str, model_path: str) -> int | None:
    text = entries.get(key)
    if text is None:
        return None
    # For thousands of digits, int() raises ValueError; no file is that long.
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise UserError(f"{owner} gives {walk.quoted(text)} as the {key} of its data", where=model_path, fix=_AGAIN)
    return int(text)


def _read(file: Path, offset: int, length: int) -> bytes:
    with file.open("rb") as stream:
        stream.seek(offset)
        return stream.read(length)
