"""What is said about the dropouts of a model. Called by `inspect` on a prepared model."""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import constants_of


def dropout_notes(graph: onnx.GraphProto) -> list[str]:
    """Lines that say how many dropouts there are and who draws their masks in training."""
    constants = constants_of(graph)
    total, drawn = 0, list[onnx.NodeProto]()
    for node in graph.node:
        if node.op_type != "Dropout" or node.domain:
            continue
        ratio = node.input[1] if len(node.input) > 1 else ""
        if ratio and ratio not in constants:
            drawn.append(node)
        elif not ratio or float(constants[ratio].reshape(-1)[0]) > 0:
            total += 1
    notes = []
    if total:
        notes.append(
            f"{total} Dropout node{'s' if total > 1 else ''}: with ortflow's kernels both passes compute the masks "
            "from seed, node and element"
        )
    if drawn:
        rest = f" and {len(drawn) - 1} more" if len(drawn) > 1 else ""
        notes.append(
            f"the masks of {walk.called(drawn[0])}{rest} are drawn by ONNX Runtime, because the ratio varies; on GPUs "
            "steps are not captured"
        )
    return notes
