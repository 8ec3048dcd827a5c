"""Training graphs of exporters with our operators for GPUs: which are used, and that gradients are the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
import numpy as np
import onnx
from cuda_composed import composed
from flat import graphs_of
from graph_build_models import run_graph
from reference import OPTIMIZER
from safetensors.numpy import load_file
from workshop import CASES, Workshop

from ortflow.workflow.assembly import targets
from ortflow.workflow.cuda.place import place
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.domains import CUDA_DOMAIN

PLACED = {
    "gpt2": {"LayerNormalization": 5, "CrossEntropy": 1, "Softmax": 2, "TableGrad": 1},
    "llama": {"RMSNormalization": 5, "CrossEntropy": 1, "Softmax": 2, "TableGrad": 1, "Rotary": 4, "RotaryGrad": 4},
    "bert": {"LayerNormalization": 6, "CrossEntropy": 1, "Softmax": 2, "TableGrad": 2},
    "t5": {"RMSNormalization": 12, "CrossEntropy": 1, "Softmax": 6},
    "vit": {"LayerNormalization": 5, "CrossEntropy": 1, "Softmax": 2},
}
"""Case -> how often operators stand there; what has gradients, as often with Grad."""


@pytest.mark.parametrize(
    ("name", "exporter"),
    [(name, exporter) for name in PLACED for exporter in ("for_training", "torchscript", "dynamo")
     if (name, exporter) != ("t5", "dynamo")],
)  # fmt: skip
def test_models_compute_the_same(
    name: str, exporter: str, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[onnx.ModelProto] = []

    def differentiate_and_keep(model: onnx.ModelProto, parameters: Sequence[str], loss: str) -> Any:
        found = differentiate(model, parameters, loss)
        kept.append(onnx.ModelProto.FromString(found[0].SerializeToString()))
        return found

    monkeypatch.setattr(targets, "differentiate", differentiate_and_keep)
    case, opset = CASES[name], 17 if exporter == "torchscript" else 18
    graphs = graphs_of(workshop.model(name, exporter, opset), case.loss, OPTIMIZER, tmp_path, labels=case.labels)
    (model,) = kept
    feeds = {**load_file(graphs.initial), **next(case.batches(1))}
    feeds["ortflow.loss_grad"] = np.array(1, np.float32)
    placed = place(model)
    expected, found = run_graph(compose(model), feeds), run_graph(composed(compose(placed)), feeds)
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        # Some gradients are 0 up to rounding, for example those of keys' biases.
        largest = max(1, np.abs(array).max())
        np.testing.assert_allclose(found[key], array, rtol=1e-5, atol=1e-5 * largest, err_msg=key)
    count = Counter(node.op_type for node in placed.graph.node if node.domain == CUDA_DOMAIN)
    wanted = PLACED[name]
    assert {key: count[key] for key in wanted} == wanted, count
    for operator in ("LayerNormalization", "RMSNormalization", "CrossEntropy", "Softmax"):
        assert count[f"{operator}Grad"] == count[operator], operator
