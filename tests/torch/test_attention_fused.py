"""Attention of the exporters as one node: found, and with the same loss and gradients as the nodes it replaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
import numpy as np
import onnx
from composed_attention import compose_attention
from flat import graphs_of
from reference import OPTIMIZER, torch_gradients
from safetensors.numpy import load_file
from workshop import CASES, Workshop

from ortflow.workflow.assembly import targets
from ortflow.workflow.graph.attention.find import OPERATOR, attend
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.types import LOSS_SUM, LOSS_WEIGHT
from ortflow.workflow.onnx_runtime import onnxruntime as ort

FUSED = {"gpt2": [1, 1], "llama": [1, 1], "bert": [0, 0], "vit": [0, 0], "whisper": [0, 0, 0, 0, 1, 1]}
"""Case -> its attentions, all of which are found: 1 for each that is causal."""
EXPORTS = [
    *((name, exporter, opset) for name in ("gpt2", "llama", "bert", "vit")
      for exporter, opset in (("for_training", 18), ("torchscript", 17), ("dynamo", 18), ("dynamo", 23))),
    *(("gpt2", "torchscript-default", 17), ("bert", "torchscript-default", 17)),
    *(("whisper", "for_training", 18), ("whisper", "torchscript", 17)),
]  # fmt: skip


def forward_of(
    name: str, exporter: str, opset: int, workshop: Workshop, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[onnx.ModelProto, list[str], dict[str, np.ndarray]]:
    """The graph that `build` differentiates, its parameters, and the weights."""
    kept: list[tuple[onnx.ModelProto, list[str]]] = []

    def differentiate_and_keep(model: onnx.ModelProto, parameters: Sequence[str], loss: str) -> Any:
        kept.append((model, list(parameters)))
        return differentiate(model, parameters, loss)

    monkeypatch.setattr(targets, "differentiate", differentiate_and_keep)
    case = CASES[name]
    graphs = graphs_of(workshop.model(name, exporter, opset), case.loss, OPTIMIZER, folder, labels=case.labels)
    return *kept[0], load_file(graphs.initial)


def gradients(
    forward: onnx.ModelProto, parameters: Sequence[str], feeds: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The loss, its weight and every gradient."""
    model, _ = differentiate(forward, parameters, LOSS_SUM)
    model = compose(compose_attention(model))
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    read = {value.name for value in session.get_inputs()}
    outputs = [value.name for value in session.get_outputs()]
    return dict(zip(outputs, session.run(outputs, {n: v for n, v in feeds.items() if n in read}), strict=True))


@pytest.mark.parametrize(("name", "exporter", "opset"), EXPORTS)
def test_all_attention_is_found(
    name: str, exporter: str, opset: int, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, parameters, weights = forward_of(name, exporter, opset, workshop, tmp_path, monkeypatch)
    fused, notes = attend(forward, parameters)
    assert not notes
    found = [node for node in fused.graph.node if node.op_type == OPERATOR]
    assert sorted(attributes_of(node)["causal"] for node in found) == FUSED[name]
    assert not any(node.op_type == "Softmax" for node in fused.graph.node)

    case = CASES[name]
    batch = next(case.batches(1))
    feeds = {**weights, **batch}
    expected, actual = (gradients(model, parameters, feeds) for model in (forward, fused))
    assert expected.keys() == actual.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(actual[key], value, rtol=1e-5, atol=1e-5 * max(1, np.abs(value).max()), err_msg=key)
    if exporter == "for_training":
        for key, value in torch_gradients(case).items():
            gradient = actual[f"{key}_grad"] / actual[LOSS_WEIGHT]
            np.testing.assert_allclose(gradient, value, rtol=0, atol=1e-6, err_msg=key)


def test_attention_with_a_learned_bias_is_unchanged(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, parameters, _ = forward_of("t5", "for_training", 18, workshop, tmp_path, monkeypatch)
    fused, notes = attend(forward, parameters)
    assert len(notes) == 4
    assert all("has a gradient" in note for note in notes)
    # The decoder attends to the encoder's tokens without a bias.
    assert sum(node.op_type == OPERATOR for node in fused.graph.node) == 2
