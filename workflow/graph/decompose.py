"""The operators that ortflow writes out itself, by operators that have a gradient.

Called by `expand`, and by `opset` for operators newer than its dialect. An operator stands here where ONNX defines it
in words, or where ONNX's definition overflows or is slow.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx

from ortflow.workflow.graph.decompose_activations import ACTIVATIONS
from ortflow.workflow.graph.decompose_derivatives import DERIVATIVES, by_derivative
from ortflow.workflow.graph.decompose_grid import grid_sample
from ortflow.workflow.graph.decompose_images import IMAGES, padded
from ortflow.workflow.graph.decompose_linear import LINEAR
from ortflow.workflow.graph.decompose_norms import NORMS
from ortflow.workflow.graph.decompose_recurrent import rnn
from ortflow.workflow.graph.decompose_reductions import REDUCTIONS
from ortflow.workflow.graph.decompose_resize import resize
from ortflow.workflow.graph.writer import Context

Decomposition = Callable[[onnx.NodeProto, Context], list[onnx.NodeProto]]

DECOMPOSITIONS: dict[str, Decomposition] = {
    **ACTIVATIONS,
    **dict.fromkeys(DERIVATIVES, by_derivative),
    **NORMS,
    **REDUCTIONS,
    **LINEAR,
    **IMAGES,
    "GridSample": grid_sample,
    "Resize": resize,
    "RNN": rnn,
}
"""Operator of ONNX's domain -> the nodes that stand for one of it."""

WRITTEN_OUT: dict[str, Decomposition] = {**DECOMPOSITIONS, "Pad": padded}
"""What `opset` writes out where opset 18 has no form of an operator: wrapping pads, too."""
