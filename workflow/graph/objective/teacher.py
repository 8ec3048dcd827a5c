"""The teacher of a distillation: another model, merged into the graph as constants, whose logits are the targets.

Called by `by_class`. The teacher reads the inputs of the trained model that have its inputs' names; further ones become
inputs of the graph, like labels. It is in evaluation mode, no parameter of the run, and in no checkpoint or export.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, compose, helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.file.limits import check_constants, check_sizes
from ortflow.workflow.graph.file.read import read_model
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.edit import Editor, described, dims_of, make_outputs, rename_values
from ortflow.workflow.graph.ir.order import prune
from ortflow.workflow.graph.ir.stops import stop
from ortflow.workflow.graph.normalize.prepare import prepare
from ortflow.workflow.graph.objective.labels import Dims, text
from ortflow.workflow.graph.objective.logits import read_logits
from ortflow.workflow.graph.objective.modes import evaluation_mode
from ortflow.workflow.spec.losses import Divergence

LARGEST = 3 << 29
"""Bytes of a teacher's weights: the graph that contains them is one protobuf message, of less than 2 GiB."""


def teacher_logits(edit: Editor, loss: Divergence, output: str, dims: Dims, location: str) -> str:
    """Merge the teacher of a loss into the graph; returns its logits, of the shape `dims`.

    `output` is the trained model's. Raises UserError if the teacher does not fit.
    """
    assert loss.teacher is not None
    path = f"{location}.teacher"
    try:
        model = read_model(Path(loss.teacher))
        for check in (check_sizes, check_constants):
            check(model, loss.teacher)
        model, _ = prepare(model, loss.teacher)
    except UserError as error:
        raise UserError(f"{loss.teacher}: {error.what}", where=path, fix=error.fix) from error
    size = sum(_bytes(tensor) for tensor in model.graph.initializer)
    if size > LARGEST:
        raise UserError(
            f"{loss.teacher} has {size / 2**30:.1f} GiB of weights, and a teacher may have {LARGEST / 2**30:.1f}",
            where=path,
            fix="store its outputs as a column of the data, and name that as the label of kl_div",
        )
    value = _logits(model, loss, output, dims, location)
    prune(model.graph)
    return _merge(edit, model, value, path, location)


def _logits(model: onnx.ModelProto, loss: Divergence, output: str, dims: Dims, location: str) -> str:
    """The teacher's logits, made its only output, in evaluation mode."""
    graph, outputs = model.graph, {str(value.name): value for value in model.graph.output}
    name = loss.teacher_output or (next(iter(outputs)) if len(outputs) == 1 else output)
    if name not in outputs:
        problem = f"has no output {name!r}" if loss.teacher_output else f"has {len(outputs)} outputs"
        raise UserError(
            f"{loss.teacher} {problem} ({', '.join(outputs)})",
            where=f"{location}.teacher_output",
            fix="name the one with the logits",
        )
    logits_dims = dims_of(outputs[name])
    if (
        logits_dims is None
        or len(logits_dims) != len(dims)
        or any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(logits_dims, dims, strict=True))
    ):
        shape = "an unknown shape" if logits_dims is None else f"the shape {text(logits_dims)}"
        raise UserError(
            f"output {name!r} of {loss.teacher} has {shape}, and that of the trained model {text(dims)}",
            where=f"{location}.teacher",
            fix="use a teacher with the same classes",
        )
    make_outputs(graph, [outputs[name]])
    evaluation_mode(graph)
    prune(graph)
    shapes.infer(model)
    # The teacher has no label: its probabilities are those of its own last Softmax.
    value = read_logits(Editor(graph), loss, name)
    make_outputs(graph, [helper.make_tensor_value_info(value, TensorProto.FLOAT, [None] * len(dims))])
    return value


def _merge(edit: Editor, model: onnx.ModelProto, value: str, path: str, location: str) -> str:
    """Add the teacher's nodes to the graph; returns the name of `value` there, through which no gradient passes."""
    prefix = f"{edit.fresh('teacher')}/"
    descriptions, names = described(edit.graph), {}
    inputs = {str(value.name) for value in edit.graph.input}
    graph = compose.add_prefix(model, prefix).graph
    for teacher_input in model.graph.input:
        name, kind = str(teacher_input.name), teacher_input.type.tensor_type.elem_type
        names[prefix + name] = name
        if name not in inputs:
            if name in descriptions or any(name in node.output for node in edit.graph.node):
                raise UserError(
                    f"its input {name!r} is the name of an inner value of the trained model", where=path,
                    fix="rename the input",
                )  # fmt: skip
            edit.graph.input.append(onnx.ValueInfoProto.FromString(teacher_input.SerializeToString()))
            continue
        other, own_dims, model_dims = (
            descriptions[name].type.tensor_type.elem_type,
            dims_of(teacher_input),
            dims_of(descriptions[name]),
        )
        if other != kind:
            names[prefix + name] = edit.cast(name, kind)
        if own_dims is not None and model_dims is not None and len(own_dims) != len(model_dims):
            raise UserError(
                f"its input {name!r} has the shape {text(own_dims)}, and that of the trained model {text(model_dims)}",
                where=path,
                fix="rename the input, and give it a column of its own under data.train.columns",
            )
    edit.graph.initializer.extend(graph.initializer)
    for node in graph.node:
        rename_values(node, names)
        edit.graph.node.append(node)
    result = edit.fresh("teacher_logits")
    merged = names.get(prefix + value, prefix + value)
    edit.graph.node.append(stop(merged, result, f"{prefix}stop"))
    return result


def _bytes(tensor: onnx.TensorProto) -> int:
    return len(tensor.raw_data) or tensor.ByteSize()
