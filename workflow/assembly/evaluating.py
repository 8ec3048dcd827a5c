"""The evaluation and the inference graph of a run. Called by `build`, and by `variants` for parts of a model."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.export.inference import infer_graph
from ortflow.workflow.graph.intake.source import Source
from ortflow.workflow.graph.intake.user_graphs import user_eval_graph
from ortflow.workflow.graph.ir.edit import used
from ortflow.workflow.graph.objective import evaluation
from ortflow.workflow.graph.objective.compared import metric_outputs
from ortflow.workflow.graph.types import SEED
from ortflow.workflow.spec.run import TrainerRunSpec


def batch_input(graph: onnx.GraphProto, source: Source) -> str:
    """A data input that the loss depends on: its first axis is the batch."""
    read = used(graph)
    names = [str(v.name) for v in graph.input if v.name in read and v.name not in {SEED, *source.tensors}]
    if not names:
        raise UserError("the loss depends on no input of the model", where="model.loss", fix="name another output")
    return min(names, key=lambda name: name in source.labels)


def eval_graph(
    outputs: Sequence[str], spec: TrainerRunSpec, source: Source, batch: str
) -> tuple[onnx.ModelProto, dict[str, int]]:
    """The evaluation graph of the losses' outputs, and the number of classes by label where it is known."""
    section = spec.onnx_model
    all_outputs = {str(value.name): value for value in source.skeleton.graph.output}
    model = source.evaluated([*outputs, *metric_outputs(section.metrics, section.loss, all_outputs)])
    padded = spec.data.last_batch == "pad"
    bounds = evaluation.complete(model.graph, section.loss, section.metrics, batch, padded)
    if section.graphs.eval:
        names = [value.name for value in model.graph.output if value.name.startswith("ortflow.")]
        model = user_eval_graph(section.graphs.eval, source, names)
    return model, bounds


def inference_graph(spec: TrainerRunSpec, source: Source) -> onnx.ModelProto | None:
    """The inference graph; None if the model does not permit one and none is requested."""
    try:
        return infer_graph(source.inference, source.labels)
    except UserError:
        if spec.export.enabled:
            raise
        return None
