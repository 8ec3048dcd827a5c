"""Outputs and gradients of an exported file, computed with the training graph of a run.

Called by `ortflow.exporter.file_check`. Imports ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.expand import make_differentiable
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.ir.edit import Editor, make_outputs, replace
from ortflow.workflow.graph.ir.order import prune
from ortflow.workflow.graph.normalize.fusions import avoid_wrong_forms
from ortflow.workflow.graph.normalize.prepare import prepare
from ortflow.workflow.graph.objective.modes import evaluation_mode, train_mode
from ortflow.workflow.graph.optimize import rewrites

Arrays = Mapping[str, np.ndarray]
_TOTAL = "ortflow.total"


def training_graph(
    model: onnx.ModelProto, parameters: Sequence[str], frozen: Collection[str], weights: Mapping[str, str]
) -> tuple[onnx.ModelProto, list[str]]:
    """The training graph of a file for the sum over `weights` of output times its weights, and what it trains.

    `parameters` are inputs of `model`. `weights`: output -> the name of a further fp32 input, of the output's shape.
    The graph's outputs are those of the file, and `<parameter>_grad`. Raises UserError.
    """
    prepared, _ = prepare(model)
    avoid_wrong_forms(prepared)
    graph = prepared.graph
    train_mode(graph, frozen)
    edit = Editor(graph)
    outputs = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in graph.output]
    terms = [edit.total(edit("Mul", name, by), edit.fresh("term")) for name, by in weights.items()]
    total = terms[0]
    for term in terms[1:]:
        total = edit("Add", total, term)
    edit("Identity", total, output=_TOTAL)
    graph.input.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in weights.values())
    make_outputs(graph, [helper.make_tensor_value_info(_TOTAL, TensorProto.FLOAT, []), *outputs])
    prune(graph)
    prepared, _ = make_differentiable(prepared, parameters, _TOTAL)
    rewrites.before(prepared.graph)
    derived, trained = differentiate(prepared, parameters, _TOTAL)
    rewrites.after(derived.graph)
    return compose(derived), trained


def evaluation_graph(model: onnx.ModelProto) -> onnx.ModelProto:
    """The evaluation graph of the file. Raises UserError if ortflow cannot run it."""
    prepared, _ = prepare(model)
    avoid_wrong_forms(prepared)
    evaluation_mode(prepared.graph)
    prune(prepared.graph)
    return prepared


def run(model: onnx.ModelProto, feed: Arrays) -> dict[str, np.ndarray]:
    """Every output of a graph. Raises RuntimeError if ONNX Runtime cannot load or run it."""
    from ortflow.workflow.onnx_runtime import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    # The graph is in single precision, whatever the types of the file's inputs.
    read = {v.name: helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type) for v in model.graph.input}
    names = [value.name for value in model.graph.output]
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        inputs = {name: array.astype(read[name], copy=False) for name, array in feed.items() if name in read}
        values: list[Any] = session.run(names, inputs)
    except Exception as error:
        raise RuntimeError(str(error).splitlines()[0]) from error
    return dict(zip(names, values, strict=True))


def without_values(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """A copy of a model with these fp32 initializers as inputs: small, whatever the size of the weights."""
    copy, input_names = onnx.ModelProto(), set(names)
    copy.CopyFrom(onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import))
    copy.functions.extend(model.functions)
    graph = copy.graph
    graph.name = model.graph.name
    for field in ("node", "input", "output", "value_info"):
        getattr(graph, field).extend(getattr(model.graph, field))
    for tensor in model.graph.initializer:
        if tensor.name in input_names:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        else:
            graph.initializer.append(tensor)
    replace(graph.value_info, [value for value in graph.value_info if value.name not in input_names])
    return copy
