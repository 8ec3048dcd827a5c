"""Builds the evaluation graph: forward in evaluation mode, with loss and metrics as sums and weights.

Called by `assembly` on a copy of the forward graph from which the training graph is made.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from ortflow.workflow.graph.ir.edit import Editor, make_outputs, scalar
from ortflow.workflow.graph.ir.order import prune
from ortflow.workflow.graph.objective.loss import attach
from ortflow.workflow.graph.objective.metrics import attach_metrics
from ortflow.workflow.graph.objective.modes import evaluation_mode
from ortflow.workflow.graph.objective.target import Target
from ortflow.workflow.graph.types import LOSS_SUM, LOSS_WEIGHT
from ortflow.workflow.spec.metrics import Metric
from ortflow.workflow.spec.model import Loss


def complete(graph: onnx.GraphProto, loss: Loss, metrics: Sequence[Metric], batch: str, padded: bool) -> Target:
    """Turn a forward graph, whose only output is the loss's, into the evaluation graph, in place.

    The forward graph's output is kept, so that an exported model can be compared with it.
    """
    evaluation_mode(graph)
    forward = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in graph.output]
    target = attach(graph, loss, batch, padded)
    names = [LOSS_SUM, LOSS_WEIGHT, *attach_metrics(Editor(graph), metrics, loss, target)]
    make_outputs(graph, [*(scalar(name) for name in names), *forward])
    prune(graph)
    return target
