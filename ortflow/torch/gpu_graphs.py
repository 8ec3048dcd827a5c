"""The graphs of a call for GPUs: in fp32, or in half precision under `torch.autocast`. Called by `graphs`; pure.

As `ortflow.workflow.assembly.stage_forms` makes those of a pipeline's stages: both passes get ortflow's operators
before they are divided, and elementwise nodes are fused afterwards.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx

from ortflow.workflow.assembly import stage_forms
from ortflow.workflow.fusion import halved
from ortflow.workflow.fusion.half import HALVES
from ortflow.workflow.graph.attention.find import attend
from ortflow.workflow.graph.attention.packed_heads import unpack_heads
from ortflow.workflow.graph.ir import shared_entropy
from ortflow.workflow.graph.ir.edit import attributes_of, make_outputs, rename_values, replace
from ortflow.workflow.graph.ir.order import prune, sort_nodes
from ortflow.workflow.graph.optimize.fixed_shapes import fix_shapes

HALF = ("bf16", "fp16")


def prepared(model: onnx.ModelProto, variables: Collection[str], precision: str) -> onnx.ModelProto:
    """The forward graph before it is differentiated: in half precision with attention as one node."""
    if precision not in HALF:
        return model
    attended, _ = attend(unpack_heads(model), variables)
    shared_entropy.shared(attended)
    return attended


def placed(joint: onnx.ModelProto, reached: Collection[str], precision: str) -> onnx.ModelProto:
    """The graph of both passes with ortflow's operators, sorted."""
    if precision not in HALF:
        return stage_forms.placed(joint)
    halves = halved.in_half(joint, reached, precision)
    sort_nodes(halves.graph)
    return halves


def weights_in_half(graph: onnx.GraphProto, parameters: Collection[str]) -> dict[str, str]:
    """Make conversions of fp32 parameters to half precision inputs, in place.

    Returns the input's name -> the parameter's.
    """
    inputs = {value.name: value for value in graph.input if value.name in parameters}
    outputs = {value.name for value in graph.output}
    sources: dict[str, str] = {}
    names: dict[str, str] = {}
    for node in graph.node:
        parameter = inputs.get(node.input[0]) if node.op_type == "Cast" and not node.domain else None
        if parameter is None or parameter.type.tensor_type.elem_type != onnx.TensorProto.FLOAT:
            continue
        kind = attributes_of(node)["to"]
        if kind not in HALVES.values() or node.output[0] in outputs:
            continue
        half = f"{parameter.name}/half"
        if half not in sources:
            value = onnx.ValueInfoProto.FromString(parameter.SerializeToString())
            value.name, value.type.tensor_type.elem_type = half, kind
            graph.input.append(value)
        sources[half], names[node.output[0]] = parameter.name, half
    replace(graph.node, [node for node in graph.node if node.output[0] not in names])
    replace(graph.value_info, [value for value in graph.value_info if value.name not in names])
    for node in graph.node:
        rename_values(node, names)
    return sources


def in_half(graph: onnx.GraphProto, outputs: Collection[str]) -> dict[str, str]:
    """Give values as they are stored instead of outputs that are only conversions of them to fp32, in place.

    Returns the output's name -> that of the value.
    """
    casts = {node.output[0]: node for node in graph.node if node.op_type == "Cast" and node.output[0] in outputs}
    values_by_name = {value.name: value for value in (*graph.value_info, *graph.output)}
    sources: dict[str, str] = {}
    for name, node in casts.items():
        source = values_by_name.get(node.input[0])
        if source is None or source.type.tensor_type.elem_type not in HALVES.values():
            continue
        sources[name] = source.name
        output_names = {value.name for value in graph.output}
        values = [output for output in graph.output if output.name != name]
        make_outputs(graph, values if source.name in output_names else [*values, source])
    prune(graph)
    return sources


def finished(model: onnx.ModelProto) -> onnx.ModelProto:
    """One of the two graphs with fused elementwise nodes, as it is opened."""
    fused = stage_forms.fused(model)
    fix_shapes(fused.graph)
    return fused
