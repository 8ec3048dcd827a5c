"""The graphs of a call for GPUs: in fp32, or in half precision under `torch.autocast`. Called by `graphs`; pure.

As `ortflow.workflow.assembly.stage_forms` makes those of a pipeline's stages: both passes get ortflow's operators
before they are divided, and elementwise nodes are fused afterwards.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx

from ortflow.workflow.assembly import stage_forms
from ortflow.workflow.fusion.halved import in_half
from ortflow.workflow.graph.attention.find import attend
from ortflow.workflow.graph.ir import shared_entropy
from ortflow.workflow.graph.ir.order import sort_nodes
from ortflow.workflow.graph.optimize.fixed_shapes import fix_shapes

HALF = ("bf16", "fp16")


def prepared(model: onnx.ModelProto, wanted: Collection[str], precision: str) -> onnx.ModelProto:
    """The forward graph before it is differentiated: in half precision with attention as one node."""
    if precision not in HALF:
        return model
    attended, _ = attend(model, wanted)
    shared_entropy.shared(attended)
    return attended


def placed(both: onnx.ModelProto, reached: Collection[str], precision: str) -> onnx.ModelProto:
    """The graph of both passes with ortflow's operators, sorted."""
    if precision not in HALF:
        return stage_forms.placed(both)
    halves = in_half(both, reached, precision)
    sort_nodes(halves.graph)
    return halves


def finished(model: onnx.ModelProto) -> onnx.ModelProto:
    """One of the two graphs with fused elementwise nodes, as it is opened."""
    fused = stage_forms.fused(model)
    fix_shapes(fused.graph)
    return fused
