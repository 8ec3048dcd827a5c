"""Exports that would train something else are recognised, right ones not accused, and what cannot train is named."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
import torch
from flat import graphs_of
from reference import OPTIMIZER
from torch import nn
from workshop import Workshop

import ortflow
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.inspect import findings
from ortflow.workflow.spec.model import Regression

MERGED = "merged weights of equal value"
FOLDED = "folded weights into them"
FOLDED_NORM = "BatchNormalization is folded"


@pytest.mark.parametrize(
    ("name", "exporter", "signs"),
    [
        ("gpt2", "dynamo-default", {MERGED}),
        ("bert", "dynamo-default", {MERGED, FOLDED}),
        ("llama", "dynamo-default", {FOLDED}),
        ("lstm", "dynamo-default", {FOLDED}),
        ("resnet", "dynamo-default", {FOLDED_NORM}),
        ("resnet", "torchscript-default", {FOLDED_NORM}),
    ],
)
def test_wrong_export_is_recognised(name: str, exporter: str, signs: set[str], workshop: Workshop) -> None:
    found = findings(workshop.model(name, exporter, 18)).signs
    assert {sign for sign in (MERGED, FOLDED, FOLDED_NORM) if any(sign in sentence for sentence in found)} == signs
    assert all(sentence.endswith("export the model with ortflow.export_for_training") for sentence in found)


HOW = (("for_training", 18), ("torchscript", 17))
RIGHT = [(name, how, opset) for name in ("gpt2", "bert", "vit", "resnet", "lstm") for how, opset in HOW]


@pytest.mark.parametrize(("name", "exporter", "opset"), [*RIGHT, ("gpt2", "dynamo", 18), ("resnet", "dynamo", 18)])
def test_right_export_is_not_accused(name: str, exporter: str, opset: int, workshop: Workshop) -> None:
    assert findings(workshop.model(name, exporter, opset)).signs == []


class Atan(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.atan(super().forward(x)))


class Sampled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = super().forward(x).reshape(-1, 2, 2, 2).tanh()
        return nn.functional.grid_sample(x.reshape(-1, 2, 2, 2), grid, align_corners=False).reshape(-1, 8)


@pytest.mark.parametrize(("module", "operator"), [(Atan(8, 8), "Atan"), (Sampled(8, 8), "GridSample")])
def test_operator_without_a_gradient_is_named(module: nn.Module, operator: str, tmp_path: Path) -> None:
    ortflow.export_for_training(module, torch.zeros(2, 8), tmp_path / "model.onnx")
    with pytest.raises(UserError, match=rf"node '\w+' \({operator}\) has no gradient") as caught:
        graphs_of(tmp_path / "model.onnx", Regression(kind="mse"), OPTIMIZER, tmp_path / "graphs")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "graphs" / "graphs.json").exists()
