"""The operators that ortflow decomposes itself into operators that have a rule.

Called by `expand`, and by `opset` for operators newer than opset 18. Listed here are operators that ONNX defines only
in prose, or whose ONNX definition overflows or is slow.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx

from ortflow.workflow.graph.decompose.activations import gelu
from ortflow.workflow.graph.decompose.determinants import determinant
from ortflow.workflow.graph.decompose.grid import grid_sample
from ortflow.workflow.graph.decompose.images import wrapped
from ortflow.workflow.graph.decompose.linear import LINEAR
from ortflow.workflow.graph.decompose.norms import NORMS
from ortflow.workflow.graph.decompose.regions import region_align
from ortflow.workflow.graph.decompose.resize import resize
from ortflow.workflow.graph.decompose.transforms import short_time_fourier
from ortflow.workflow.graph.ir.replacement import Context

Decomposition = Callable[[onnx.NodeProto, Context], list[onnx.NodeProto]]

DECOMPOSITIONS: dict[str, Decomposition] = {
    **NORMS,
    **LINEAR,
    "Det": determinant,
    "Gelu": gelu,
    "GridSample": grid_sample,
    "Resize": resize,
    "RoiAlign": region_align,
    "STFT": short_time_fourier,
}
"""Operator of ONNX's domain -> the function that writes the nodes that replace it."""

WRITTEN_OUT: dict[str, Decomposition] = {**DECOMPOSITIONS, "Pad": wrapped}
"""What `opset` decomposes where opset 18 has no form of an operator; includes Pad in mode `wrap`."""
