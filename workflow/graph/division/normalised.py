"""Softmax, normalisations and the cross-entropy, which compute along an axis.

Rules by which they act on divided inputs, and on shares of the tokens (`_of_tokens`).
"""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.division import sequence, spread
from ortflow.workflow.graph.division.sequence import Shares
from ortflow.workflow.graph.division.spread import Divided
from ortflow.workflow.graph.ir.edit import attributes_of


@spread.rule("Softmax", "LogSoftmax")
def _softmax(s: spread.Spread, place: int, node: onnx.NodeProto, input_cuts: spread.Given) -> Divided:
    (cut,) = input_cuts
    assert cut is not None
    if attributes_of(node).get("axis", -1) % len(s.shape(node.input[0])) == cut.axis:
        if not s.scores or node.op_type != "LogSoftmax":
            raise s.unsupported(node)
        s.plan.normal[place] = cut
    return [cut]


@spread.rule("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization")
def _layer_norm(s: spread.Spread, place: int, node: onnx.NodeProto, input_cuts: spread.Given) -> Divided:
    cut = input_cuts[0]
    if cut is None or any(input_cuts[1:]) or len(node.output) > 1:
        raise s.unsupported(node)
    if cut.axis >= attributes_of(node).get("axis", -1) % len(s.shape(node.input[0])):
        raise s.unsupported(node)
    for slot in range(1, len(node.input)):
        s.copy(place, slot)
    return [cut]


@spread.rule("SoftmaxCrossEntropyLoss")
def _entropy(s: spread.Spread, place: int, node: onnx.NodeProto, input_cuts: spread.Given) -> Divided:
    cut = input_cuts[0]
    logs = node.output[1] if len(node.output) > 1 else ""
    if not s.scores or cut is None or cut.axis != 1 or any(input_cuts[1:]) or len(node.input) > 2:
        raise s.unsupported(node)
    if logs in s.facts.readers or logs in s.facts.outputs:
        raise s.unsupported(node)
    s.plan.entropies[place] = cut
    return [None]


@sequence.rule("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization")
def _norm_of_tokens(s: sequence.Search, place: int, node: onnx.NodeProto, input_axes: sequence.Given) -> Shares:
    axes = input_axes[0]
    statistics_read = any(name in s.facts.readers or name in s.facts.outputs for name in node.output[1:])
    if not axes or any(input_axes[1:]) or statistics_read or sequence.axis_of(s, node) < axes:
        raise sequence.Whole
    s.found.copied |= {(place, slot) for slot in range(1, len(node.input)) if node.input[slot]}
    return [axes]


@sequence.rule("Softmax", "LogSoftmax", "LpNormalization")
def _along_an_axis_of_tokens(
    s: sequence.Search, place: int, node: onnx.NodeProto, input_axes: sequence.Given
) -> Shares:
    if not input_axes[0] or sequence.axis_of(s, node) < input_axes[0]:
        raise sequence.Whole
    return [input_axes[0]]
