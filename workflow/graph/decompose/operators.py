"""The operators that ortflow writes out itself, by operators that have a rule.

Called by `expand`, and by `opset` for operators newer than its dialect. An operator stands here where ONNX defines it
in words, or where ONNX's definition overflows or is slow.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx

from ortflow.workflow.graph.decompose.activations import gelu
from ortflow.workflow.graph.decompose.grid import grid_sample
from ortflow.workflow.graph.decompose.images import wrapped
from ortflow.workflow.graph.decompose.linear import LINEAR
from ortflow.workflow.graph.decompose.norms import NORMS
from ortflow.workflow.graph.decompose.resize import resize
from ortflow.workflow.graph.ir.replacement import Context

Decomposition = Callable[[onnx.NodeProto, Context], list[onnx.NodeProto]]

DECOMPOSITIONS: dict[str, Decomposition] = {
    **NORMS,
    **LINEAR,
    "Gelu": gelu,
    "GridSample": grid_sample,
    "Resize": resize,
}
"""Operator of ONNX's domain -> the nodes that stand for one of it."""

WRITTEN_OUT: dict[str, Decomposition] = {**DECOMPOSITIONS, "Pad": wrapped}
"""What `opset` writes out where opset 18 has no form of an operator: wrapping pads, too."""
