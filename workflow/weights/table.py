"""The table of PyTorch's names: each entry of a module's `state_dict`, and the tensor of the ONNX file that it became.

`export_for_training` writes it into the model's metadata; a run keeps it in its graphs. Pure.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ortflow.workflow.errors import UserError

PROPERTY = "ortflow.state_dict"
"""Property of the model."""
LARGEST_VALUES = 8 << 20
"""Bytes of values in a table, which every reader of the model loads."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Entry:
    """An entry of a `state_dict`."""

    name: str
    dtype: str
    """Of PyTorch's tensor, as safetensors names it: `F32`, `I64`."""
    shape: tuple[int, ...]
    tensor: str | None = None
    """The tensor of the file with its value. Tied entries have the same."""
    value: Array | None = None
    """Its value, if training does not change it."""
    is_constant: bool = False
    """Whether the graph reads that value."""


def to_json(entries: Iterable[Entry]) -> str:
    """The table as the property's text."""
    return json.dumps([_row(entry) for entry in entries], separators=(",", ":"))


def from_json(text: str) -> list[Entry]:
    """The table in a property. Raises UserError if it is damaged."""
    try:
        return [_entry(row) for row in json.loads(text)]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise UserError(f"the model's property {PROPERTY!r} is damaged", fix="export the model again") from None


def _row(entry: Entry) -> dict[str, Any]:
    row: dict[str, Any] = {"name": entry.name, "dtype": entry.dtype, "shape": list(entry.shape)}
    if entry.tensor is not None:
        row["tensor"] = entry.tensor
    if entry.is_constant:
        row["constant"] = True
    if entry.value is not None:
        row["value"] = base64.b64encode(np.ascontiguousarray(entry.value).tobytes()).decode()
    return row


def _entry(row: Mapping[str, Any]) -> Entry:
    shape = tuple(int(size) for size in row["shape"])
    name, dtype = str(row["name"]), str(row["dtype"])
    kind = STORED[dtype]
    if any(size < 0 for size in shape):
        raise ValueError(name)
    value = None
    if "value" in row:
        value = np.frombuffer(base64.b64decode(row["value"], validate=True), kind).reshape(shape)
    tensor = row.get("tensor")
    return Entry(name, dtype, shape, None if tensor is None else str(tensor), value, bool(row.get("constant")))


STORED: Mapping[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
    "U8": "|u1", "U16": "<u2", "U32": "<u4", "U64": "<u8", "BOOL": "|b1", "C64": "<c8",
}  # fmt: skip
"""safetensors' element types, and numpy's for their bytes; numpy has no bfloat16."""


def as_float32(array: Array, dtype: str) -> npt.NDArray[np.float32]:
    """Floating-point elements in single precision; `dtype` is safetensors'. Exact except for F64, which is rounded."""
    if dtype == "BF16":
        bits: Array = array.astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
    # numpy warns of a double that is infinite in single precision.
    with np.errstate(over="ignore"):
        return np.asarray(array, dtype=np.float32)


def as_dtype(array: Array, dtype: str, name: str) -> Array:
    """Elements of single precision, or integers, as safetensors' element type `dtype` stores them.

    Raises UserError, with the tensor's name, for a finite value that would become infinite.
    """
    if dtype == "BF16":
        # numpy's ascontiguousarray makes a vector of a scalar.
        single = np.asarray(array, np.float32, order="C")
        bits = single.view(np.uint32)
        # To the nearest, and to an even last bit between two, as PyTorch rounds.
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
        # Rounding may carry the bits of a NaN into the exponent and the sign: its sign and one bit are kept.
        stored = np.where(np.isnan(single), bits >> 16 | 0x40, rounded).astype(np.uint16)
        _refuse_overflow(single, (stored & 0x7FFF) != 0x7F80, dtype, name)
        return stored
    if np.issubdtype(array.dtype, np.floating) and dtype[0] in "IU":
        # astype cuts the fraction off: 2.9999998 would become 2.
        array = np.rint(array)
    with np.errstate(over="ignore"):
        converted = array.astype(STORED[dtype], copy=False)
    if dtype == "F16":
        _refuse_overflow(array, ~np.isinf(converted), dtype, name)
    return converted


def _refuse_overflow(array: Array, fits: npt.NDArray[np.bool_], dtype: str, name: str) -> None:
    beyond = ~fits & np.isfinite(array)
    if beyond.any():
        raise UserError(
            f"{name} holds {array[beyond][0]:g}, which {_WORDS[dtype]} cannot represent: its largest number is "
            f"{_LARGEST[dtype]:g}",
            fix="export the module in single precision (module.float()), or write the ONNX model",
        )


_WORDS = {"F16": "fp16", "BF16": "bf16"}
_LARGEST = {"F16": 65504.0, "BF16": 3.3895314e38}
