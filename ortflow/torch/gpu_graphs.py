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
from ortflow.workflow.fusion.rounded import reading_rounded
from ortflow.workflow.graph.attention.find import attend
from ortflow.workflow.graph.attention.packed_heads import unpack_heads
from ortflow.workflow.graph.ir import shared_entropy
from ortflow.workflow.graph.ir.edit import make_outputs
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


def reading_halves(
    joint: onnx.ModelProto, parameters: Collection[str], precision: str
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """The graph with fp32 parameters in the type of autocast as inputs, and whose they are; see `reading_rounded`."""
    if precision not in HALF:
        return joint, {}
    # A buffer of another type, or a conversion to the other half type, stays in the graph: copies have one type.
    single = {v.name for v in joint.graph.input if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT}
    return reading_rounded(joint, single.intersection(parameters), [HALVES[precision]])


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
