"""What is said about the dropouts of a model. Called by `inspect` on a prepared model."""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import constants_of


def dropout_notes(graph: onnx.GraphProto) -> list[str]:
    """Lines that say how many dropouts there are and who draws their masks in training."""
    constants = constants_of(graph)
    own, others = 0, list[onnx.NodeProto]()
    for node in graph.node:
        if node.op_type != "Dropout" or node.domain:
            continue
        ratio = node.input[1] if len(node.input) > 1 else ""
        if ratio and ratio not in constants:
            others.append(node)
        elif not ratio or float(constants[ratio].reshape(-1)[0]) > 0:
            own += 1
    notes = []
    if own:
        notes.append(
            f"{own} Dropout node{'s' if own > 1 else ''}: with ortflow's kernels both passes compute the masks from "
            "seed, node and element"
        )
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        notes.append(
            f"the masks of {walk.called(others[0])}{more} are drawn by ONNX Runtime, because the ratio varies; on GPUs "
            "steps are not captured"
        )
    return notes
