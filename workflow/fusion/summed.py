"""Sums a gradient over its rows inside the node that computes it, for the gradient of a bias. Pure.

In x + f(norm(x)) the gradient of x is also that of the bias that was added last to make x, summed over the rows. The
gradient of the norm has it in registers, so that it is not read again; so has the gradient of an activation that of the
bias before it. Called by step `configure`: for norms in half precision, on the fp32 graph with our operators, and for
groups of elementwise nodes when these are fused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import TensorProto, helper

from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir.edit import attributes_of, dims_of
from ortflow.workflow.graph.ir.replacement import set_attribute
from ortflow.workflow.graph.ir.rewriter import Dims, Rewriter, width_of

_OUTPUTS = {"LayerNormalizationGrad": 3, "RMSNormalizationGrad": 2}
"""Gradient of a norm -> number of its outputs without the sums, which follow them."""


def sum_in_norms(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which the node of a norm's gradient also computes its sum over all axes but the last."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    rewriter = Rewriter(copy.graph, CUDA_DOMAIN)
    for sums in rewriter.nodes("ColumnSums", CUDA_DOMAIN):
        gradient, dims = rewriter.maker(sums.input[0]), rewriter.dims(sums.input[0])
        if gradient is None or dims is None or attributes_of(sums).get("axes", -1) not in (-1, len(dims) - 1):
            continue
        # One that has its sums already has one output more.
        fits = gradient.domain == CUDA_DOMAIN and len(gradient.output) == _OUTPUTS.get(gradient.op_type)
        if fits and gradient.output[0] == sums.input[0]:
            # Saves 138 us of sums and 62 us of gaps between kernels a step (GPT-2, micro-batch 8, H200;
            # docs/benchmarks.md).
            rewriter.drop(gradient, sums)
            attributes = {**attributes_of(gradient), "sums": 1}
            rewriter.add(gradient.op_type, gradient.input, [*gradient.output, sums.output[0]], **attributes)
    rewriter.finish()
    return copy


def sums_of_rows(
    nodes: Sequence[onnx.NodeProto], descriptions: Mapping[str, onnx.ValueInfoProto]
) -> dict[str, onnx.NodeProto]:
    """The first ColumnSums of each value over all its axes but the last; `descriptions` are the described values."""
    sums: dict[str, onnx.NodeProto] = {}
    for node in nodes:
        if node.op_type == "ColumnSums" and node.domain == CUDA_DOMAIN and node.input[0] in descriptions:
            dims = dims_of(descriptions[node.input[0]])
            if dims is not None and attributes_of(node).get("axes", -1) in (-1, len(dims) - 1):
                sums.setdefault(str(node.input[0]), node)
    return sums


def summed_output(
    group_dims: Dims,
    inputs: Sequence[str],
    outputs: Sequence[str],
    bits: Mapping[str, int],
    descriptions: Mapping[str, onnx.ValueInfoProto],
    sums: Mapping[str, onnx.NodeProto],
) -> int | None:
    """The number of an output of a group that is summed over its rows; None if there is none, or the group cannot.

    The output has as many rows as the group in every run, because it depends on every input that may have rows; `bits`
    has that by the names that a fused node's attributes have.
    """
    width = width_of(group_dims)
    if not width or len(group_dims) < 2:
        return None
    rows = 0
    for place, name in enumerate(inputs):
        dims = dims_of(descriptions[name]) if name in descriptions else None
        if dims is None or (dims and dims[-1] not in (1, width)):
            return None
        rows |= (len(dims) > 1) << place
    for place, name in enumerate(outputs):
        fits = name in sums and width_of(dims_of(descriptions[name])) == width
        if fits and rows and bits[f"inputs_of_{place}"] & rows == rows:
            return place
    return None


def sum_in_parts(graph: onnx.GraphProto, value: str, sums: Mapping[str, onnx.NodeProto]) -> str:
    """Let the ColumnSums of a value sum the parts that a group has summed of it; returns their name."""
    part = f"{value}/sums"
    graph.value_info.append(helper.make_tensor_value_info(part, TensorProto.FLOAT, None))
    sums[value].input[0] = part
    set_attribute(sums[value], "axes", 1)
    return part
