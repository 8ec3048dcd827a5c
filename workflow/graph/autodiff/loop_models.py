"""The body of a Loop or Scan as a model of its own, which `expand` decomposes and the rule for loops differentiates."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.autodiff.subgraph_models import model_of
from ortflow.workflow.graph.ir import shapes, walk
from ortflow.workflow.graph.ir.replacement import Context, attribute

LOOPS = ("Loop", "Scan")
_FLOATING = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(frozen=True)
class Form:
    """Where a loop node and its body have states, which an iteration gets from the one before, and slices."""

    states: int
    """Number of states."""
    inputs: int
    """Place of the first state among the node's inputs and among the body's: after count and condition of a Loop."""
    outputs: int
    """Place of the first state among the body's outputs: after the condition of a Loop."""
    slices: int
    """Number of scan inputs, which follow the states; a Loop has none."""

    @property
    def first_slice(self) -> int:
        """Place of the first scan input among the node's inputs and among the body's."""
        return self.inputs + self.states


@dataclass(frozen=True)
class Body:
    """A loop's body with what may be differentiated in it."""

    graph: onnx.GraphProto
    """The body itself, the node's attribute."""
    model: onnx.ModelProto
    """A copy whose further inputs are the values that the body captures; small constants are initializers."""
    form: Form
    captured: frozenset[str]
    variables: list[str]
    """Floating-point inputs of the body, and captured values that carry a gradient."""
    results: list[int]
    """Places of the body's floating-point outputs."""


def is_loop(node: onnx.NodeProto) -> bool:
    """Whether a node is ONNX's Loop or Scan."""
    return bool(node.op_type in LOOPS and node.domain == "")


def form_of(node: onnx.NodeProto) -> Form:
    """Where the node has its states."""
    if node.op_type == "Loop":
        return Form(max(len(node.input) - 2, 0), 2, 1, 0)
    slices = int(attribute(node, "num_scan_inputs", 0))
    return Form(len(node.input) - slices, 0, 0, slices)


def body_of(node: onnx.NodeProto, context: Context, path: Collection[str]) -> Body:
    """The body of a Loop or Scan; `path` are the values between trained parameters and the loss."""
    graph: onnx.GraphProto = attribute(node, "body", None)
    form = form_of(node)
    captured = frozenset(walk.captured(graph))
    model = _model_of(graph, node, form, captured, captured.intersection(path), context)
    floats = [value.name for value in model.graph.input if value.type.tensor_type.elem_type in _FLOATING]
    inputs = {value.name for value in graph.input}
    variables = [name for name in floats if name in inputs or name in path]
    types = shapes.value_types(model)
    results = [
        place
        for place, value in enumerate(graph.output)
        if (shapes.element_type(types, value.name) or value.type.tensor_type.elem_type) in _FLOATING
    ]
    return Body(graph, model, form, captured, variables, results)


def _model_of(
    graph: onnx.GraphProto,
    node: onnx.NodeProto,
    form: Form,
    captured: Collection[str],
    variables: Collection[str],
    context: Context,
) -> onnx.ModelProto:
    copy = onnx.GraphProto()
    copy.CopyFrom(graph)
    for place, value in enumerate(copy.input):
        _describe(value, node, form, place, context)
    for value in copy.output:
        if value.type.WhichOneof("value") in (None, "tensor_type"):
            value.type.CopyFrom(helper.make_tensor_type_proto(value.type.tensor_type.elem_type, None))
    model = model_of(copy, captured, variables, context)
    _forget_changing_sizes(model, form)
    return model


def _describe(value: onnx.ValueInfoProto, node: onnx.NodeProto, form: Form, place: int, context: Context) -> None:
    """Give an input of the body the type of what the node passes to it, in place, as far as that is known."""
    if place < form.inputs:
        kind = (TensorProto.INT64, TensorProto.BOOL)[place]
        value.type.CopyFrom(helper.make_tensor_type_proto(kind, []))
        return
    outer = node.input[place] if place < len(node.input) else ""
    kind = shapes.element_type(context.types, outer)
    dims = shapes.named_shape(context.types, outer)
    if not kind or dims is None:
        return
    if place >= form.first_slice:
        axes = attribute(node, "scan_input_axes", [0] * form.slices)
        axis = axes[place - form.first_slice] % len(dims)
        dims = [*dims[:axis], *dims[axis + 1 :]]
    value.type.CopyFrom(helper.make_tensor_type_proto(kind, list(dims)))


def _forget_changing_sizes(model: onnx.ModelProto, form: Form) -> None:
    """Leave a size of a state unknown, in place, unless every iteration passes on the same."""
    states = model.graph.input[form.inputs : form.first_slice]
    try:
        for _ in range(sum(len(value.type.tensor_type.shape.dim) for value in states) + 1):
            types, changed = shapes.value_types(model), False
            for value, result in zip(states, model.graph.output[form.outputs :], strict=False):
                changed |= _forget(value, shapes.named_shape(types, result.name))
            if not changed:
                break
    except UserError:
        for value in states:
            _forget(value, None)
    shapes.infer(model)


def _forget(value: onnx.ValueInfoProto, after: list[int | str | None] | None) -> bool:
    """Whether a known size of a state differs, or may, after an iteration; it is unknown then."""
    dims = value.type.tensor_type.shape.dim
    changed = False
    for place, dim in enumerate(dims):
        before = dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
        size = after[place] if after is not None and len(after) == len(dims) else None
        if before is not None and before != size:
            dim.Clear()
            changed = True
    return changed
