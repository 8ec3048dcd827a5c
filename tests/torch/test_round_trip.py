"""The exported model is the module with the trained weights: same outputs, and its weights load back by name."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
import numpy as np
import onnx
import torch
from flat import FlatRun
from onnx import numpy_helper
from reference import OPTIMIZER
from workshop import CASES, Workshop

from ortflow.workflow.graph.export.inference import export_inference
from ortflow.workflow.onnx_runtime import onnxruntime as ort


@pytest.mark.parametrize("name", ["gpt2", "resnet", "efficientnet", "lstm"])
def test_exported_model_and_module_agree(name: str, workshop: Workshop, tmp_path: Path) -> None:
    case, graphs = CASES[name], workshop.graphs(name, "for_training", 18)
    run = FlatRun(graphs, OPTIMIZER)
    for batch in case.batches(3):
        run.step(batch)
    path = tmp_path / "trained.onnx"
    export_inference(graphs.infer, {entry.name: run.view("parameters", entry.name) for entry in graphs.index}, path)

    module, untrained = case.module().eval(), case.module().eval()
    weights = {t.name: torch.tensor(numpy_helper.to_array(t)) for t in onnx.load(path).graph.initializer}
    missing = set(module.load_state_dict(weights, strict=False).missing_keys)
    assert not missing & {parameter for parameter, _ in module.named_parameters()}

    example = case.example()
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {n: tensor.numpy() for n, tensor in example.items()})
    with torch.no_grad():
        expected, before = (getattr(out, "logits", out) for out in (module(**example), untrained(**example)))
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
    assert not np.allclose(output, before, rtol=1e-4, atol=1e-4)
