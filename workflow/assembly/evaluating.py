"""The evaluation and the inference graph of a run. Called by `build`, and by `variants` for parts of a model."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from ortflow.workflow.assembly.targets import EVALUATION, EXPORT, Build
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.intake.source import Source
from ortflow.workflow.graph.intake.user_graphs import user_eval_graph
from ortflow.workflow.graph.ir.edit import used
from ortflow.workflow.graph.ir.passes import Watch, unwatched
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
    outputs: Sequence[str], spec: TrainerRunSpec, source: Source, batch: str, watch: Watch = unwatched
) -> tuple[onnx.ModelProto, dict[str, int]]:
    """The evaluation graph of the losses' outputs, and the number of classes by label where it is known."""
    section = spec.onnx_model
    all_outputs = {str(value.name): value for value in source.skeleton.graph.output}
    model = source.evaluated([*outputs, *metric_outputs(section.metrics, section.loss, all_outputs)])
    build = Build(spec, source, batch)
    model = EVALUATION.run(model, build, watch)
    if section.graphs.eval:
        names = [value.name for value in model.graph.output if value.name.startswith("ortflow.")]
        model = user_eval_graph(section.graphs.eval, source, names)
        watch("evaluation/own-graph", model)
    return model, build.classes


def inference_graph(spec: TrainerRunSpec, source: Source, watch: Watch = unwatched) -> onnx.ModelProto | None:
    """The inference graph; None if the model does not permit one and none is requested."""
    try:
        return EXPORT.run(source.inference, source.labels, watch)
    except UserError:
        if spec.export.enabled:
            raise
        return None
