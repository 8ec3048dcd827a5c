"""The labels of losses and metrics: inputs of the graph, and which rows of a padded batch count.

Called by `loss` and `metrics`.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import TensorProto, helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir.edit import Editor, described, dims_of
from ortflow.workflow.graph.types import VALID

Dims = tuple[int | str | None, ...]


class Labels:
    """The label inputs of a graph, each added once, and the mask of its rows.

    Parameters
    ----------
    edit
        Of the graph.
    padded
        Whether only the first `ortflow.valid` rows count. The graph gets that input.
    """

    def __init__(self, edit: Editor, *, padded: bool) -> None:
        self.edit, self.padded = edit, padded
        self._inputs: dict[str, tuple[onnx.ValueInfoProto, dict[int, str]]] = {}
        if padded:
            edit.graph.input.append(helper.make_tensor_value_info(VALID, TensorProto.INT64, [1]))

    def input(self, name: str, data_type: int, dims: Dims, location: str = "model.loss.label") -> str:
        """The label as this type. Adds the input unless the graph has it, and unless another loss has added it.

        Raises UserError if the graph's own input does not fit, or if losses need different shapes of it.
        """
        if name not in self._inputs:
            value = self._first(name, data_type, dims, location)
            label_input = next(value_info for value_info in self.edit.graph.input if value_info.name == name)
            self._inputs[name] = label_input, {data_type: value}
            return value
        label_input, casts = self._inputs[name]
        shape = dims_of(label_input)
        if shape is not None and len(shape) != len(dims):
            raise UserError(
                f"label {name!r} has the shape {text(shape)} for one loss or metric, and {text(dims)} for another",
                where=location,
                fix="name another label",
            )
        if data_type not in casts:
            element_type = label_input.type.tensor_type.elem_type
            casts[data_type] = name if element_type == data_type else self.edit.cast(name, data_type)
        return casts[data_type]

    def _first(self, name: str, data_type: int, dims: Dims, location: str) -> str:
        graph = self.edit.graph
        descriptions = described(graph)
        if name in {value.name for value in graph.input}:
            return _own_label(self.edit, descriptions[name], data_type, dims, location)
        if name in descriptions or any(name in node.output for node in graph.node):
            raise UserError(f"the model already has a value {name!r}", where=location, fix="rename the label")
        graph.input.append(helper.make_tensor_value_info(name, data_type, list(dims)))
        return name

    def valid_rows(self, value: str, rank: int) -> str:
        """Bool [batch, 1, ...] of `rank` axes: which rows of the batch are not padding."""
        edit = self.edit
        zero, one = edit.constant(0, "int64"), edit.constant(1, "int64")
        rows = edit("Range", zero, size(edit, value, 0), one)
        return edit("Reshape", edit("Less", rows, VALID), edit.ints(-1, *[1] * (rank - 1)))

    def count(self, value: str, output: str, share: int | str | None = None) -> None:
        """Write the number of elements of `value` in the rows that count, divided by `share`, as fp32 scalar.

        `share` is a number or an int64 scalar that divides the elements of a row.
        """
        edit = self.edit
        count = edit("Size", value)
        if share is not None and share != 1:
            count = edit("Div", count, share if isinstance(share, str) else edit.constant(share, "int64"))
        if self.padded:
            row = edit("Div", count, size(edit, value, 0))
            count = edit("Reshape", edit("Mul", row, VALID), edit.constant([], "int64"))
        edit("Cast", count, output=output, to=TensorProto.FLOAT)


def _own_label(edit: Editor, label_input: onnx.ValueInfoProto, data_type: int, dims: Dims, location: str) -> str:
    """A label input of the model that only losses and metrics read."""
    name = label_input.name
    if any(name in node.input for node in edit.graph.node):
        raise UserError(f"the model reads its input {name!r} itself", where=location, fix="rename the label")
    shape = dims_of(label_input)
    if shape is not None and len(shape) != len(dims):
        raise UserError(
            f"the model's input {name!r} has the shape {text(shape)} and the loss needs {text(dims)}",
            where=location,
            fix="rename the label",
        )
    kinds = [TensorProto.INT64, TensorProto.INT32]
    if data_type == TensorProto.FLOAT:
        kinds += [TensorProto.FLOAT, TensorProto.BOOL, TensorProto.UINT8]
    actual = label_input.type.tensor_type.elem_type
    if actual not in kinds:
        raise UserError(
            f"the model's input {name!r} is of type {TensorProto.DataType.Name(actual)} and the loss needs"
            f" {TensorProto.DataType.Name(data_type)}",
            where=location,
            fix="rename the label",
        )
    return name if actual == data_type else edit.cast(name, data_type)


def size(edit: Editor, value: str, axis: int) -> str:
    """Length of an axis, int64 scalar."""
    return edit("Gather", edit("Shape", value), edit.constant(axis, "int64"))


def text(dims: Sequence[int | str | None]) -> str:
    """A shape as messages write it."""
    return f"[{', '.join('?' if d is None else str(d) for d in dims)}]"
