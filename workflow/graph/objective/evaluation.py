"""Builds the evaluation graph: forward in evaluation mode, with loss and metrics as sums and weights.

Called by `assembly` on a copy of the forward graph from which the training graph is made.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from ortflow.workflow.graph.ir.edit import Editor, make_outputs, scalar
from ortflow.workflow.graph.ir.order import prune
from ortflow.workflow.graph.objective.labels import Labels
from ortflow.workflow.graph.objective.loss import attach
from ortflow.workflow.graph.objective.metrics import attach_metrics
from ortflow.workflow.graph.objective.modes import evaluation_mode
from ortflow.workflow.graph.objective.weighted_sum import term_outputs
from ortflow.workflow.graph.types import LOSS_SUM, LOSS_WEIGHT
from ortflow.workflow.spec.losses import ClassLoss, Ctc
from ortflow.workflow.spec.metrics import MetricSection
from ortflow.workflow.spec.model import Loss, single_losses


def complete(
    graph: onnx.GraphProto, loss: Loss, metrics: Sequence[MetricSection], batch: str, padded: bool
) -> dict[str, int]:
    """Turn a forward graph, whose outputs are those of losses and metrics, into the evaluation graph, in place.

    The forward graph's outputs are kept, so that an exported model can be compared with it. Returns the number of
    classes by label, where labels are classes and it is known.
    """
    evaluation_mode(graph)
    forward = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in graph.output]
    labels = Labels(Editor(graph), padded=padded)
    targets = attach(graph, loss, batch, padded, labels=labels)
    metric_values, bounds = attach_metrics(labels, metrics, loss, {str(value.name): value for value in forward}, batch)
    names = [LOSS_SUM, LOSS_WEIGHT, *term_outputs(loss)]
    make_outputs(graph, [*(scalar(name) for name in names), *metric_values, *forward])
    prune(graph)
    for key_path, single_loss in single_losses(loss).items():
        classes = targets[key_path].classes
        if isinstance(single_loss, ClassLoss | Ctc) and classes is not None:
            bounds[single_loss.label] = min(classes, bounds.get(single_loss.label, classes))
    return bounds
