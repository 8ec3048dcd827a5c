"""The inputs of the training and evaluation graphs that a batch provides, their bounds, and a check of the batch sizes.

Called by `assembly`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx
from onnx import TensorProto, helper

from ortflow.workflow.data.inputs import BatchInput
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir.edit import dims_of, used
from ortflow.workflow.graph.types import SEED, VALID
from ortflow.workflow.spec.data import DataSection


def batch_inputs(
    graphs: Sequence[onnx.GraphProto], tensors: Collection[str], data: Collection[str]
) -> tuple[BatchInput, ...]:
    """The inputs that a node of the graphs reads: `data` (names of the model's own) first, then the labels."""
    inputs_by_name: dict[str, BatchInput] = {}
    for graph in graphs:
        read = used(graph)
        for value in graph.input:
            if value.name in tensors or value.name in (SEED, VALID) or value.name not in read:
                continue
            data_input = _described(value, value.name in data)
            if inputs_by_name.setdefault(value.name, data_input) != data_input:
                raise UserError(
                    f"input {value.name!r} has one type or shape in the training and another in the evaluation graph",
                    where="model.graphs",
                )
    return tuple(sorted(inputs_by_name.values(), key=lambda i: i.role == "label"))


def _described(value: onnx.ValueInfoProto, is_data: bool) -> BatchInput:
    element = value.type.tensor_type.elem_type
    dims = dims_of(value)
    if element in (TensorProto.UNDEFINED, TensorProto.STRING) or dims is None:
        problem = "of strings" if element == TensorProto.STRING else "without a known type and rank"
        raise UserError(
            f"input {value.name!r} is {problem}", where="model.path", fix="give the model tensors of numbers"
        )
    if not dims:
        raise UserError(
            f"input {value.name!r} is a scalar and has no axis for the samples",
            where="model.path",
            fix="export the model with its value as a constant",
        )
    shape = tuple(d if isinstance(d, int) else None for d in dims)
    dtype = helper.tensor_dtype_to_np_dtype(element).name
    return BatchInput(value.name, dtype, shape, "data" if is_data else "label")


def check_batches(inputs: Sequence[BatchInput], data: DataSection) -> None:
    """Raises UserError if the graph has a fixed batch size and the run file sets another."""
    sizes = [("data.micro_batch", data.micro_batch)]
    if data.eval is not None and data.eval_micro_batch is not None:
        sizes.append(("data.eval_micro_batch", data.eval_micro_batch))
    for data_input in inputs:
        fixed = data_input.shape[0]
        if fixed is None:
            continue
        for key_path, size in sizes:
            if size != fixed:
                raise UserError(
                    f"the model's input {data_input.name!r} has a fixed batch of {fixed}, which is not {size}",
                    where=key_path,
                    fix=f"set it to {fixed}, or export the model with a dynamic first axis",
                )
        if data.last_batch == "keep":
            raise UserError(
                f"the model's input {data_input.name!r} has a fixed batch of {fixed}, so no smaller last batch can be "
                "kept",
                where="data.last_batch",
                fix="use `drop` or `pad`",
            )
