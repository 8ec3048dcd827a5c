"""Converts a model of half, bfloat16 or double precision to single precision, in which ortflow trains.

Called by `prepare`.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from ortflow.workflow.graph.ir import walk

_OTHER = {TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16", TensorProto.DOUBLE: "double"}
# Attributes that hold an element type (onnx.proto's DataType) rather than a number.
_TYPE_ATTRIBUTES = frozenset(
    {"to", "dtype", "saved_output_type", "output_datatype", "softmax_precision", "output_dtype"}
)
_LARGEST = float(np.finfo(np.float32).max)


def to_single(model: onnx.ModelProto) -> list[str]:
    """Convert every fp16, bf16 and double value to fp32, in place, if weights, inputs or outputs have such a type.

    Returns log lines. Values beyond the range of fp32 (a double mask of -1.8e308) become its largest.
    """
    kinds = {_OTHER[t.data_type] for t in model.graph.initializer if t.data_type in _OTHER and len(t.dims) > 0}
    for value in (*model.graph.input, *model.graph.output):
        kinds |= (
            {_OTHER[value.type.tensor_type.elem_type]} & set(_OTHER.values())
            if (value.type.tensor_type.elem_type in _OTHER)
            else set()
        )
    if not kinds:
        return []
    for _, tensor in walk.all_tensors(model):
        if tensor.data_type in _OTHER:
            tensor.CopyFrom(single(tensor))
    for graph in walk.all_graphs(model):
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.tensor_type.elem_type in _OTHER:
                value.type.tensor_type.elem_type = TensorProto.FLOAT
    for node in walk.all_nodes(model):
        for attribute in node.attribute:
            if attribute.name in _TYPE_ATTRIBUTES and attribute.i in _OTHER:
                attribute.i = TensorProto.FLOAT
    return [f"{' and '.join(sorted(kinds))} converted to fp32: weights, inputs, outputs and all other values"]


def single(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """The tensor converted to fp32."""
    values = numpy_helper.to_array(tensor)
    if values.dtype == np.float64:
        finite = np.isfinite(values)
        # Cast as they are they would become infinite, and softmax of a row that such a mask covers NaN.
        values = np.where(finite, np.clip(values, -_LARGEST, _LARGEST), values)
    # numpy's ascontiguousarray makes a vector of a scalar.
    return numpy_helper.from_array(values.astype(np.float32, order="C"), tensor.name)
