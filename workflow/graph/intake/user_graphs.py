"""The user's own graphs in place of generated ones: used unchanged if their inputs and outputs fit, else rejected.

Called by `assembly`. `model.path` remains the source of the parameters and of the exported model.

- `model.graphs.train`: inputs are data and label inputs and, under their names in `model.path`, the parameters and
  running statistics (fp32); outputs are `ortflow.loss_sum` and `ortflow.loss_weight` (fp32 scalars; the loss is their
  quotient), `<parameter>_grad`, the gradient of the loss sum, for each parameter to train (the others are frozen), and
  `<statistic>_new` for each running statistic.
- `model.graphs.eval`: the same inputs; outputs are `ortflow.loss_sum`, `ortflow.loss_weight`, and
  `ortflow.<metric>_sum` and `ortflow.<metric>_weight` for each of `model.metrics` that does not follow from the loss.
- `model.graphs.optimizer`: inputs `learning_rate` (fp32 [1]), `step` (int64 [1], starts at 1), `parameters.0`,
  `gradients.0` (fp32 [n]) and any number of moments `<moment>.0`; outputs `parameters.0.out` and `<moment>.0.out`. It
  updates all trained parameters as one segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import TensorProto

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.file.limits import check_constants, check_sizes
from ortflow.workflow.graph.file.read import read_model
from ortflow.workflow.graph.intake.source import Source
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import described, dims_of
from ortflow.workflow.graph.ir.functions import inline_functions
from ortflow.workflow.graph.ir.in_place import late_reader
from ortflow.workflow.graph.types import LOSS_SUM, LOSS_WEIGHT

_TRAIN, _EVAL, _OPTIMIZER = (f"model.graphs.{name}" for name in ("train", "eval", "optimizer"))


def user_train_graph(path: str, source: Source) -> tuple[onnx.ModelProto, list[str]]:
    """The user's training graph, and the parameters it has gradients of."""
    model = _read(path)
    _check_outputs(model, [LOSS_SUM, LOSS_WEIGHT, *(f"{name}_new" for name in source.roles.state)], _TRAIN)
    _check_tensors(model, source, _TRAIN)
    outputs = {value.name for value in model.graph.output}
    inputs = {value.name for value in model.graph.input}
    trained = [name for name in source.roles.trained if f"{name}_grad" in outputs]
    if not trained:
        raise UserError("the graph has no output `<parameter>_grad` of a parameter that is trained", where=_TRAIN)
    for name in trained:
        if name not in inputs:
            raise UserError(f"the graph has no input {name!r}, although it outputs its gradient", where=_TRAIN)
    return model, trained


def user_eval_graph(path: str, source: Source, outputs: Sequence[str]) -> onnx.ModelProto:
    """The user's evaluation graph; `outputs` are the names it must have."""
    model = _read(path)
    _check_outputs(model, outputs, _EVAL)
    _check_tensors(model, source, _EVAL)
    return model


def user_optimizer_graph(path: str) -> onnx.ModelProto:
    """The user's optimizer graph."""
    model = _read(path)
    values = described(model.graph)
    inputs = [value.name for value in model.graph.input]
    states = [name for name in inputs if name not in ("learning_rate", "step", "gradients.0")]
    for name in ("learning_rate", "step", "parameters.0", "gradients.0"):
        if name not in inputs:
            raise UserError(f"the graph has no input {name!r}", where=_OPTIMIZER, fix="docs/models.md lists them")
        element_type = TensorProto.INT64 if name == "step" else TensorProto.FLOAT
        if values[name].type.tensor_type.elem_type != element_type:
            raise UserError(
                f"input {name!r} is not of type {TensorProto.DataType.Name(element_type)}", where=_OPTIMIZER
            )
    for name in states:
        if not name.endswith(".0"):
            raise UserError(
                f"input {name!r} is not a buffer of segment 0", where=_OPTIMIZER, fix="name a moment `<moment>.0`"
            )
    _check_outputs(model, [f"{name}.out" for name in states], _OPTIMIZER)
    inlined = onnx.ModelProto()
    inlined.CopyFrom(model)
    inline_functions(inlined)
    late = late_reader(inlined.graph)
    if late is not None:
        reader, buffer = late
        raise UserError(
            f"{walk.called(reader)} may read {buffer!r} after {buffer + '.out'!r} has been written to the same memory",
            where=_OPTIMIZER,
            fix=f"compute {buffer + '.out'!r} from what this node computes, or read {buffer + '.out'!r} there",
        )
    return model


def _read(path: str) -> onnx.ModelProto:
    model = read_model(Path(path))
    for check in (check_sizes, check_constants):
        check(model, path)
    return model


def _check_outputs(model: onnx.ModelProto, names: Sequence[str], location: str) -> None:
    output_names = {value.name for value in model.graph.output}
    missing = [name for name in names if name not in output_names]
    if missing:
        raise UserError(f"the graph has no output {missing[0]!r}", where=location, fix="docs/models.md lists them")


def _check_tensors(model: onnx.ModelProto, source: Source, location: str) -> None:
    """Check that parameters are fp32 inputs of the shape they have in the model."""
    stored_names = {tensor.name for tensor in model.graph.initializer} & set(source.tensors)
    if stored_names:
        raise UserError(
            f"the graph contains the parameter {min(stored_names)!r} itself",
            where=location,
            fix="make it an input of the graph",
        )
    for value in model.graph.input:
        if value.name not in source.tensors:
            continue
        shape = source.tensors[value.name].shape
        if value.type.tensor_type.elem_type != TensorProto.FLOAT or dims_of(value) != shape:
            raise UserError(
                f"input {value.name!r} is not fp32 of the shape {list(shape)} that the parameter has in the model",
                where=location,
            )
