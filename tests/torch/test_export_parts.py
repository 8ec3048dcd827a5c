"""Exported transformers divided over ranks: loss, gradients and evaluation of the parts are the undivided graph's."""

from __future__ import annotations

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
import onnx
from divided import CHANNEL, divide_all, divide_tokens, finished, off, run, run_parts, training
from kernels import needs_kernels
from workshop import CASES, Workshop

from ortflow.workflow.graph.autodiff.expand import make_differentiable
from ortflow.workflow.graph.division.divide import divide
from ortflow.workflow.graph.intake.source import Source, read_source
from ortflow.workflow.graph.ir.edit import make_outputs, scalar
from ortflow.workflow.graph.ir.order import prune
from ortflow.workflow.graph.objective import evaluation
from ortflow.workflow.graph.objective.loss import attach
from ortflow.workflow.graph.objective.modes import train_mode
from ortflow.workflow.graph.types import LOSS_SUM, LOSS_WEIGHT
from ortflow.workflow.spec.metrics import MetricSection
from ortflow.workflow.spec.model import ModelSection

pytestmark = needs_kernels
EXPORTS = [("for_training", 18), ("torchscript", 17)]
LAYERS = {"gpt2": 4, "bert": 4, "llama": 4, "t5": 10}


def prepared_of(
    workshop: Workshop, name: str, exporter: tuple[str, int]
) -> tuple[Source, onnx.ModelProto, onnx.ModelProto]:
    """An export, its forward graph, and that with its loss in training mode."""
    case = CASES[name]
    path = workshop.model(name, *exporter)
    source = read_source(ModelSection.model_validate({"path": str(path), "loss": case.loss.model_dump()}))
    assert case.loss.output is not None
    forward = source.forward([case.loss.output])
    prepared = onnx.ModelProto()
    prepared.CopyFrom(forward)
    train_mode(prepared.graph, source.roles.frozen)
    attach(prepared.graph, case.loss, "input_ids", False)
    make_outputs(prepared.graph, [scalar(LOSS_SUM), scalar(LOSS_WEIGHT)])
    prune(prepared.graph)
    prepared, _ = make_differentiable(prepared, source.roles.trained, LOSS_SUM)
    return source, forward, prepared


@pytest.mark.parametrize("exporter", EXPORTS, ids=lambda each: each[0])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_exported_transformers(workshop: Workshop, name: str, exporter: tuple[str, int], parts: int) -> None:
    case = CASES[name]
    source, forward, prepared = prepared_of(workshop, name, exporter)
    trained = source.roles.trained
    shapes = {each: array.shape for each, array in source.tensors.items()}
    (batch,) = case.batches(1)
    values = {**source.tensors, **batch}

    divided = divide_all(prepared, shapes, trained, parts)

    graphs = [training(each.model, trained, kernels=True) for each in divided]
    found = run_parts(graphs, divided, values)
    differences = off(found, run(training(prepared, trained, kernels=True), values))
    assert len(differences) > len(trained)
    assert max(differences.values()) < 1e-5, max(differences, key=lambda each: differences[each])
    notes = divided[0].notes
    assert notes[0].startswith(f"{LAYERS[name]} layers divided over {parts} ranks")
    assert notes[1].startswith("vocabulary divided")

    whole = onnx.ModelProto()
    whole.CopyFrom(forward)
    evaluation.complete(whole.graph, case.loss, [MetricSection(name="accuracy")], "input_ids", False)
    pairs = [divide(whole, shapes, (), LOSS_SUM, part, parts, CHANNEL, like=each) for part, each in enumerate(divided)]
    assert [each.regions for each in pairs] == [each.regions for each in divided]
    found = run_parts([finished(each.model) for each in pairs], pairs, values)
    differences = off(found, run(whole, values))
    assert max(differences.values()) < 1e-5, differences


@pytest.mark.parametrize("exporter", EXPORTS, ids=lambda each: each[0])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("parts", [2, 4])
def test_tokens_of_exported_transformers(workshop: Workshop, name: str, exporter: tuple[str, int], parts: int) -> None:
    source, _, prepared = prepared_of(workshop, name, exporter)
    trained = source.roles.trained
    shapes = {each: array.shape for each, array in source.tensors.items()}
    (batch,) = CASES[name].batches(1)
    values = {**source.tensors, **batch}
    divided = divide_tokens(prepared, shapes, trained, parts)
    # Behind each layer and each table of tokens.
    sums = LAYERS[name] + (2 if name == "t5" else 1)
    assert divided[0].notes[-1].startswith(f"{sums} sums scattered over the tokens: ")
    graphs = [training(each.model, trained, kernels=True) for each in divided]
    differences = off(run_parts(graphs, divided, values), run(training(prepared, trained, kernels=True), values))
    assert len(differences) > len(trained)
    assert max(differences.values()) < 1e-5, max(differences, key=lambda each: differences[each])


def test_relative_positions_are_divided_by_heads(workshop: Workshop) -> None:
    case = CASES["t5"]
    path = workshop.model("t5", "for_training", 18)
    source = read_source(ModelSection.model_validate({"path": str(path), "loss": case.loss.model_dump()}))
    forward = source.forward(["logits"])
    attach(forward.graph, case.loss, "input_ids", False)
    make_outputs(forward.graph, [scalar(LOSS_SUM), scalar(LOSS_WEIGHT)])
    prune(forward.graph)
    shapes = {each: array.shape for each, array in source.tensors.items()}
    regions = divide(forward, shapes, source.roles.trained, LOSS_SUM, 1, 2, CHANNEL).regions
    tables = [each for name, each in regions.items() if "relative_attention_bias" in name]
    assert [(each.axis, each.ranges) for each in tables] == [(1, ((2, 4),))] * 2
