"""Puts nodes into the forms whose gradients ONNX Runtime has: with what the backward pass needs as extra outputs.

Called by `build` on the training graph, after the modes are switched and the loss is attached, right before it is
differentiated. Changes no value that the graph computes.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph import walk
from ortflow.workflow.graph.edit import MICROSOFT, Editor, attributes_of, sort_nodes

_STASHED = {"LayerNormalization": 3, "SimplifiedLayerNormalization": 2, "SoftmaxCrossEntropyLoss": 2, "Dropout": 2}
"""Operator -> outputs its gradient reads; GradientGraphBuilder fails with `i < node_->OutputDefs().size()` without."""
_GATES = {"LSTM": 4, "GRU": 3}
_OUTPUTS = {"LSTM": 3, "GRU": 2}
_STASHED_RECURRENT = {"LSTM": 2, "GRU": 1}


def add_stashes(graph: onnx.GraphProto) -> None:
    """Give each node the outputs that its gradient reads, in place."""
    edit = Editor(graph)
    for node in list(graph.node):
        if node.op_type in _GATES and node.domain == "":
            _recurrent(edit, node)
            continue
        if node.op_type == "BatchNormalization" and node.domain == "" and attributes_of(node).get("training_mode", 0):
            node.op_type, node.domain = "BatchNormInternal", MICROSOFT
            node.output.extend([edit.fresh("stash"), edit.fresh("stash")])
        if node.op_type == "LayerNormalization" and len(node.input) < 3:
            # Its gradient writes the bias's too.
            node.input.append(edit.node("ConstantOfShape", edit.node("Shape", node.input[1])))
        for place in range(1, _STASHED.get(node.op_type, 0)):
            if place == len(node.output):
                node.output.append(edit.fresh("stash"))
            elif not node.output[place]:
                node.output[place] = edit.fresh("stash")
    sort_nodes(graph)


def _recurrent(edit: Editor, node: onnx.NodeProto) -> None:
    """An LSTM or GRU as ONNX Runtime can train it: forward only, with its initial state, one node a direction."""
    kind = node.op_type
    data, weight, recurrence, bias, lengths, hidden, cell, peephole = [*node.input, *[""] * 8][:8]
    attributes = attributes_of(node)
    direction = attributes.pop("direction", b"forward").decode()
    layout = attributes.pop("layout", 0)
    if lengths or peephole or layout:
        what = "sequence lengths" if lengths else "peepholes" if peephole else "layout 1"
        raise UserError(
            f"{walk.called(node)} uses {what}, which ONNX Runtime cannot train", fix="export the model without"
        )
    size = int(attributes["hidden_size"])
    directions = 2 if direction == "bidirectional" else 1
    bias = bias or edit.constant([[0.0] * (2 * _GATES[kind] * size)] * directions)
    state = [hidden, cell][: _OUTPUTS[kind] - 1]
    if not all(state):
        rows = edit.node("Slice", edit.node("Shape", data), edit.integers(1), edit.integers(2))
        shape = edit.node("Concat", edit.integers(directions), rows, edit.integers(size), axis=0)
        state = [name or edit.node("Expand", edit.constant(0.0), shape) for name in state]
    wanted = [*node.output, *[""] * 3][: _OUTPUTS[kind]]
    parts: list[list[str]] = []
    for place in range(directions):
        own = [_half(edit, name, place) if directions == 2 else name for name in (weight, recurrence, bias, *state)]
        backwards = direction == "reverse" or place == 1
        inputs = [_flip(edit, data) if backwards else data, *own[:3], "", *own[3:]]
        made = [edit.fresh(kind) if place == 0 or name else "" for place, name in enumerate(wanted)]
        stashed = [edit.fresh("stash") for _ in range(_STASHED_RECURRENT[kind])]
        edit.nodes(f"{kind}Training", inputs, [*made, *stashed], MICROSOFT, **attributes)
        edit.graph.node[-1].name = f"{node.name}/{'backward' if backwards else 'forward'}"
        if backwards and wanted[0]:
            made[0] = _flip(edit, made[0])
        parts.append(made)
    for place, name in enumerate(wanted):
        if name and directions == 2:
            edit.node("Concat", parts[0][place], parts[1][place], output=name, axis=1 if place == 0 else 0)
        elif name:
            edit.node("Identity", parts[0][place], output=name)
    edit.graph.node.remove(node)


def _half(edit: Editor, value: str, place: int) -> str:
    """One direction's part of a weight or state: the first axis runs over the directions."""
    return edit.node("Slice", value, edit.integers(place), edit.integers(place + 1), edit.integers(0))


def _flip(edit: Editor, value: str) -> str:
    """The sequence backwards in time: time is the first axis."""
    last, first = edit.integers(-1), edit.integers(-(2**63) + 1)
    return edit.node("Slice", value, last, first, edit.integers(0), edit.integers(-1))
