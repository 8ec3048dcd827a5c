"""Compares what a tensor of a model file claims with what it contains: sizes, types, values.

Called by `read` before a tensor becomes an array. Must not allocate memory for a claim: sizes are Python integers until
the bytes have been counted.
"""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir import walk

ITEM_BYTES: dict[int, int] = {
    TensorProto.FLOAT: 4,
    TensorProto.UINT8: 1,
    TensorProto.INT8: 1,
    TensorProto.UINT16: 2,
    TensorProto.INT16: 2,
    TensorProto.INT32: 4,
    TensorProto.INT64: 8,
    TensorProto.BOOL: 1,
    TensorProto.FLOAT16: 2,
    TensorProto.DOUBLE: 8,
    TensorProto.UINT32: 4,
    TensorProto.UINT64: 8,
    TensorProto.BFLOAT16: 2,
}
"""Bytes per element, for the types that a model may contain."""

RANK = 64
"""Largest rank: no kernel supports more axes, nor does numpy."""

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)

# Field that holds the elements of a type if raw_data does not (onnx.proto, TensorProto).
_FIELDS: dict[int, str] = {
    TensorProto.FLOAT: "float_data",
    TensorProto.DOUBLE: "double_data",
    TensorProto.INT64: "int64_data",
    TensorProto.UINT32: "uint64_data",
    TensorProto.UINT64: "uint64_data",
}
_QUANTISED = ("INT2", "INT4", "FLOAT4", "FLOAT6", "FLOAT8")
_CHUNK = 1 << 22


def type_name(data_type: int) -> str:
    """`FLOAT`, `INT64`, … in onnx's spelling, or the number of a type that onnx does not know."""
    return str(TensorProto.DataType.Name(data_type)) if data_type in TensorProto.DataType.values() else str(data_type)


def claimed_bytes(tensor: onnx.TensorProto, owner: str, location: str) -> int:
    """Bytes that shape and type of `tensor` claim. Raises UserError if they are invalid or not supported."""
    if any(d < 0 for d in tensor.dims):
        raise UserError(f"{owner} claims the shape {list(tensor.dims)}", where=location, fix="export the model again")
    name = type_name(tensor.data_type)
    if any(mark in name for mark in _QUANTISED):
        raise UserError(
            f"{owner} has the quantised type {name}", where=location, fix="train the float model it was made from"
        )
    if tensor.data_type == TensorProto.STRING:
        return 0
    if tensor.data_type not in ITEM_BYTES:
        raise UserError(f"{owner} has the type {name}, which a model for training cannot have", where=location)
    check_rank(len(tensor.dims), owner, location)
    item = ITEM_BYTES[tensor.data_type]
    # If one axis has no elements, numpy still counts the others.
    if math.prod(max(d, 1) for d in tensor.dims) * item >= 1 << 63 and 0 in tensor.dims:
        raise UserError(f"{owner} claims the shape {list(tensor.dims)}", where=location, fix="export the model again")
    return int(math.prod(tensor.dims)) * item


def check_rank(rank: int, subject: str, location: str) -> None:
    """Raises UserError for a value of more than RANK axes."""
    if rank > RANK:
        raise UserError(f"{subject} has {rank} axes, more than {RANK}", where=location, fix="export the model again")


def check_content(tensor: onnx.TensorProto, owner: str, location: str) -> None:
    """Raises UserError if a tensor's data does not match its shape. External data must have been read before."""
    claimed = claimed_bytes(tensor, owner, location)
    count = math.prod(tensor.dims)
    if tensor.HasField("segment"):
        raise UserError(f"{owner} is stored in segments, which are not supported", where=location)
    if tensor.data_type == TensorProto.STRING:
        stored_size, claimed = len(tensor.string_data), count
    elif tensor.HasField("raw_data"):
        stored_size = len(tensor.raw_data)
    else:
        stored_size = len(getattr(tensor, _FIELDS.get(tensor.data_type, "int32_data"))) * ITEM_BYTES[tensor.data_type]
    if stored_size != claimed:
        unit = "strings" if tensor.data_type == TensorProto.STRING else "bytes"
        raise UserError(
            f"{owner} claims the shape {list(tensor.dims)} of {claimed} {unit} but has {stored_size}",
            where=location,
            fix="export the model again",
        )


def check_no_nan(tensor: onnx.TensorProto, owner: str, location: str) -> None:
    """Raises UserError for a float tensor of several elements with a NaN (one element may be part of a formula)."""
    if tensor.data_type in FLOATS and math.prod(tensor.dims) > 1:
        flat = numpy_helper.to_array(tensor).reshape(-1)
        bad = count_where(flat, np.isnan)
        if bad:
            raise UserError(
                f"{owner} has {bad} NaN among {flat.size} values",
                where=location,
                fix="export the model with finite weights",
            )


def count_where(flat: np.ndarray, test: np.ufunc) -> int:
    """Number of elements that satisfy `test`, computed without a mask of the full size."""
    return sum(int(np.count_nonzero(test(flat[i : i + _CHUNK]))) for i in range(0, flat.size, _CHUNK))


def check_tensors(model: onnx.ModelProto, location: str) -> None:
    """Apply `check_content` and `check_no_nan` to every tensor of the model."""
    for owner, tensor in walk.all_tensors(model):
        check_content(tensor, owner, location)
        check_no_nan(tensor, owner, location)
