"""Reads a model file, which is untrusted, into a ModelProto that the rest of the package can rely on.

Called by `inspect`, `assembly` and the command line. Must not read outside the model's folder, allocate memory for what
the file only claims, or raise anything but UserError.
"""

from __future__ import annotations

import itertools
import operator
import stat
from pathlib import Path

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.file.external import Stored, check_memory, load_external_data
from ortflow.workflow.graph.file.marks import forget_marks
from ortflow.workflow.graph.file.structure import check_structure, check_valid
from ortflow.workflow.graph.file.tensors import check_tensors
from ortflow.workflow.system.files import read_whole

_NO_ONNX = "is not an ONNX model, or only the beginning of one"
_LARGEST = 1 << 31
"""Limit of protobuf, in bytes."""
_EXPORT = "give the .onnx file that the exporter wrote"


def read_model(path: Path) -> onnx.ModelProto:
    """Return the model in `path` with its external data inlined and its nodes sorted.

    Raises UserError, one sentence with the file and the defect, if the file does not exist, is not ONNX or is
    truncated;
    if data lies outside the folder or is shorter than claimed; for cycles, duplicate names, sparse, quantised or NaN
    weights, and operators that ONNX Runtime does not have.
    """
    return read_stored(path)[0]


def read_stored(path: Path) -> tuple[onnx.ModelProto, dict[str, Stored]]:
    """As `read_model`, and where the tensors lie that were in other files, by name."""
    location = str(path)
    model = _parse(_bytes(path), location)
    if not _is_text(model):
        raise UserError(f"{_NO_ONNX}: a name in it is not text", where=location, fix=_EXPORT)
    check_structure(model, location)
    forget_marks(model)
    stored = load_external_data(model, path.parent, location)
    check_tensors(model, location)
    check_valid(model, location)
    return model, stored


def _bytes(path: Path) -> bytes:
    location = str(path)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UserError("is not a file", where=location, fix=_EXPORT)
        if status.st_size > _LARGEST:
            raise UserError("is larger than 2 GiB, which no ONNX file is", where=location, fix=_EXPORT)
        check_memory(status.st_size, location)
        return read_whole(path, _LARGEST)
    except FileNotFoundError:
        raise UserError("there is no such model file", where=location, fix="check the path") from None
    except OSError as error:
        raise UserError(f"the model file cannot be read: {error.strerror}", where=location) from None


def _parse(data: bytes, location: str) -> onnx.ModelProto:
    if not data:
        raise UserError("the model file is empty", where=location, fix=_EXPORT)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError:
        raise UserError(_NO_ONNX, where=location, fix=_EXPORT) from None
    if not model.HasField("graph") or model.ir_version < 3 or not model.opset_import:
        raise UserError(_NO_ONNX, where=location, fix=_EXPORT)
    return model


def _is_repeated(field: FieldDescriptor) -> bool:
    # Newer versions of protobuf warn of `label`, and older ones have no `is_repeated`.
    return bool(field.is_repeated) if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED


def _is_text(message: Message) -> bool:
    """Whether every string of the message is valid UTF-8; protobuf returns others as bytes, or not at all."""
    if isinstance(message, onnx.NodeProto):
        return _is_text_of_node(message)
    # Most fields of most messages are not set, and ListFields leaves those out.
    try:
        fields = message.ListFields()
    except UnicodeDecodeError:
        return False
    for field, value in fields:
        if field.type not in (field.TYPE_STRING, field.TYPE_MESSAGE):
            continue
        values = [value] if isinstance(value, Message | str | bytes) else value
        if not all(_is_text(inner) if isinstance(inner, Message) else isinstance(inner, str) for inner in values):
            return False
    return True


_STRINGS = [f.name for f in onnx.NodeProto.DESCRIPTOR.fields if f.type == f.TYPE_STRING and not _is_repeated(f)]
_LISTS = [f.name for f in onnx.NodeProto.DESCRIPTOR.fields if f.type == f.TYPE_STRING and _is_repeated(f)]
_MESSAGES = [f.name for f in onnx.NodeProto.DESCRIPTOR.fields if f.type == f.TYPE_MESSAGE]
_strings, _lists, _messages = (operator.attrgetter(*names) for names in (_STRINGS, _LISTS, _MESSAGES))


def _is_text_of_node(node: onnx.NodeProto) -> bool:
    """As `_is_text`, which takes ten times as long for most of 50,000 nodes."""
    try:
        "".join(itertools.chain(_strings(node), *_lists(node)))
    except (TypeError, UnicodeDecodeError):
        return False
    return all(_is_text(inner) for messages in _messages(node) if messages for inner in messages)
