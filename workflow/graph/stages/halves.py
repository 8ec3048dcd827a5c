"""Divides the graph of a stage's two passes into a forward and a backward graph. Pure.

A value of the forward pass that the backward graph needs is an output of the former and an input of the latter: a saved
activation. Weights and received values are inputs of both and are not saved. Nodes that only reshape a saved value are
computed again, so that no value is kept twice; so are nodes that depend on weights alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import onnx
from onnx import helper

from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.graph.domains import CPU_DOMAIN
from ortflow.workflow.graph.ir import shapes, walk
from ortflow.workflow.graph.ir.edit import replace
from ortflow.workflow.graph.ir.order import needed_by, prune
from ortflow.workflow.graph.memory.element_types import element_types
from ortflow.workflow.graph.stages.cut import DRAWING, HEAVY

_VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators whose result has the elements of their first input."""
_CHEAP = frozenset({"Not", "Shape", "Size"})
"""Operators that are computed again if their input is available anyway."""


def halves(
    model: onnx.ModelProto, forward: Sequence[str], weights: Collection[str], changing: Collection[str]
) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Split a graph into the forward and the backward graph.

    Parameters
    ----------
    model
        Both passes, sorted. The forward pass is everything that `forward` depends on.
    forward
        Outputs of the forward graph, apart from saved activations.
    weights
        Inputs that have the same values in both passes of all micro-batches of a step.
    changing
        Inputs that may have changed when the backward graph runs (running statistics): they are saved.
    """
    graph = model.graph
    first = needed_by(graph.node, forward)
    ahead = [node for place, node in enumerate(graph.node) if place in first]
    behind = [node for place, node in enumerate(graph.node) if place not in first]
    results = [value for value in graph.output if value.name not in forward]
    backward_inputs = set[str]().union({value.name for value in results}, *map(walk.inputs, behind))
    saved, again = _saved(model, ahead, backward_inputs, {value.name for value in graph.input}, weights)
    copies = {
        name: f"{name}.saved" for name in changing if name in backward_inputs | set().union(*map(walk.inputs, again))
    }
    types = _types(model, [*saved, *copies])

    front = _empty(model, "forward")
    replace(front.graph.node, [*ahead, *(helper.make_node("Identity", [v], [c], c) for v, c in copies.items())])
    front.graph.output.extend(value for value in graph.output if value.name in forward)
    saved_only = [name for name in saved if name not in forward]
    front.graph.output.extend(
        helper.make_value_info(copies.get(name, name), types[name]) for name in [*saved_only, *copies]
    )

    back = _empty(model, "backward")
    replace(back.graph.node, [*again, *behind])
    for node in back.graph.node:
        node.input[:] = [copies.get(name, name) for name in node.input]
    back.graph.input.extend(helper.make_value_info(copies.get(name, name), types[name]) for name in [*saved, *copies])
    back.graph.output.extend(results)
    for part in (front, back):
        prune(part.graph)
        read = set[str]().union({v.name for v in part.graph.output}, *map(walk.inputs, part.graph.node))
        replace(part.graph.input, [value for value in part.graph.input if value.name in read])
    return front, back


def _saved(
    model: onnx.ModelProto,
    ahead: Sequence[onnx.NodeProto],
    backward_inputs: Collection[str],
    inputs: Collection[str],
    weights: Collection[str],
) -> tuple[list[str], list[onnx.NodeProto]]:
    """Values to save, in the order of computation, and the nodes that are computed again, sorted."""
    makers = {name: place for place, node in enumerate(ahead) for name in node.output if name}
    constant = set(weights) | {tensor.name for tensor in model.graph.initializer}
    light = set()
    for place, node in enumerate(ahead):
        if not node.domain and node.op_type not in HEAVY | DRAWING and walk.inputs(node) <= constant:
            constant.update(node.output)
            light.add(place)
    saved: set[str] = set()
    again: set[int] = set()
    waiting = list(backward_inputs)
    while waiting:
        name = waiting.pop()
        if name not in makers or name in saved or makers[name] in again:
            continue
        place = makers[name]
        node = ahead[place]
        if place in light or (node.op_type in _VIEWS and not node.domain):
            again.add(place)
            waiting += walk.inputs(node)
        else:
            saved.add(name)
    present = saved | set(inputs) | {name for place in again for name in ahead[place].output}
    for name in sorted(saved, key=makers.__getitem__):
        node = ahead[makers[name]]
        if node.op_type in _CHEAP and not node.domain and walk.inputs(node) <= present - {name}:
            saved.discard(name)
            again.add(makers[name])
    return sorted(saved, key=lambda name: (makers[name], name)), [ahead[place] for place in sorted(again)]


def _types(model: onnx.ModelProto, names: Sequence[str]) -> Mapping[str, onnx.TypeProto]:
    graph = model.graph
    types = {value.name: value.type for part in (graph.value_info, graph.input, graph.output) for value in part}
    if any(name not in types for name in names):
        kinds = element_types(model)
        plain_types = {name: helper.make_tensor_type_proto(kind, None) for name, kind in kinds.items() if kind}
        types = {**plain_types, **shapes.value_types(model), **types}
    # The operators of the CPU library support fp32 only (library.c).
    kernel_outputs = {name for node in graph.node if node.domain == CPU_DOMAIN for name in node.output}
    fp32 = helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None)
    types = {**{name: fp32 for name in names if name in kernel_outputs}, **types}
    unknown = [name for name in names if name not in types]
    if unknown:
        raise OrtflowError(f"the type of {', '.join(unknown)}, which the backward pass needs, is not known")
    return types


def _empty(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """A model with the inputs and constants of another, and without nodes and outputs."""
    part = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    part.graph.name = f"{model.graph.name}.{name}"
    part.graph.input.extend(model.graph.input)
    part.graph.initializer.extend(model.graph.initializer)
    part.graph.value_info.extend(model.graph.value_info)
    return part
