"""What the exporter's optimizer must not remove: small constants, factors near 1, each dropout mask."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
import numpy as np
import onnx
import torch
from torch import nn

import ortflow
from ortflow.workflow.onnx_runtime import onnxruntime as ort

EPSILONS = (1e-3, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-12, 1e-20, 1e-30, 2e-38, 1e-38)


class Constants(nn.Module):
    """Every way in which a number close to a neutral one enters a formula."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = x * self.weight
        values = {}
        for i, e in enumerate(EPSILONS[:-1]):  # ONNX Runtime computes no roots and logarithms of subnormal numbers
            values[f"log_{i}"] = (y + e).log()
            values[f"rms_norm_{i}"] = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + e)
        for i, e in enumerate(EPSILONS):
            values |= {
                f"add_{i}": y + e,
                f"add_tensor_{i}": torch.tensor(e) + y,
                f"sub_{i}": y - e,
                f"from_{i}": e - y,
                f"div_{i}": e / (y + e),
                f"clamp_{i}": y.clamp(min=e),
                f"maximum_{i}": torch.maximum(y, torch.tensor(e)),
            }
        for i, e in enumerate((1e-4, 1e-5, 1e-6, -1e-6, 2e-7)):
            values |= {f"factor_{i}": y * (1 + e), f"divisor_{i}": y / (1 + e), f"power_{i}": y.abs().pow(1 + e)}
        return values


@pytest.fixture(scope="module")
def constants(tmp_path_factory: pytest.TempPathFactory) -> ort.InferenceSession:
    path = tmp_path_factory.mktemp("constants") / "model.onnx"
    ortflow.export_for_training(Constants(), torch.ones(2, 3), path)
    options = ort.SessionOptions()
    # The file unchanged, without ONNX Runtime's optimisations.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(str(path), options)


@pytest.mark.parametrize("value", [0.0, 1.0, 3e-7])
def test_small_constants_and_factors_near_one_stay(constants: ort.InferenceSession, value: float) -> None:
    x = torch.full((4, 3), value)
    expected = Constants()(x)
    names = [output.name for output in constants.get_outputs()]
    actual = dict(zip(names, constants.run(names, {"x": x.numpy()}), strict=True))
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        reference = tensor.detach().numpy()
        # Sums and products round once or twice; the rest is the difference between the two libraries.
        rtol, atol = (2e-6, 1.2e-7) if name.startswith(("log", "power", "rms")) else (1.2e-7, 1e-45)
        np.testing.assert_allclose(actual[name], reference, rtol=rtol, atol=atol, err_msg=name)


def test_exact_zeros_and_ones_still_go(tmp_path: Path) -> None:
    class Neutral(Constants):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight + 0.0) * 1.0 - 0.0

    ortflow.export_for_training(Neutral(), torch.ones(2, 3), tmp_path / "model.onnx")
    assert [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node] == ["Mul"]


def test_two_dropouts_of_one_value_draw_two_masks(tmp_path: Path) -> None:
    class Twice(Constants):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * self.weight
            drop = nn.functional.dropout
            return drop(y) * drop(y) + torch.rand_like(y) - torch.rand_like(y) + torch.bernoulli(y) * torch.bernoulli(y)

    ortflow.export_for_training(Twice(), torch.ones(2, 3), tmp_path / "model.onnx")
    nodes = onnx.load(tmp_path / "model.onnx").graph.node
    kinds = [node.op_type for node in nodes if not node.name.startswith("evaluation/")]
    assert kinds.count("Dropout") == 2
    assert kinds.count("RandomUniformLike") == kinds.count("Bernoulli") == 2
    assert not [node.name for node in nodes for attribute in node.attribute if attribute.name == "seed"]
