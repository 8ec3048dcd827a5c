"""LSTMs with a projection are exported as LSTMs without one, and train as in PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
import numpy as np
import torch
from following import distances
from module_models import module_case
from torch import nn

import ortflow
from ortflow.workflow.errors import UserError
from ortflow.workflow.onnx_runtime import onnxruntime as ort

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


class Projected(nn.Module):
    """The outputs of every step and the last states."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, proj_size=3, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs, (hidden, cells) = self.lstm(x)
        states = torch.cat([*hidden, *cells], -1)
        return torch.cat([outputs.flatten(1), states], -1)


@pytest.mark.parametrize("options", [{"bidirectional": True, "num_layers": 2}, {"bias": False}], ids=str)
def test_projected_lstm_follows_pytorch(options: dict, tmp_path: Path) -> None:
    case = module_case("projected", lambda: Projected(batch_first=True, **options), 5, 4)
    assert [distance for distance in distances(case, tmp_path) if distance.wrong] == []


def test_every_form_of_input(tmp_path: Path) -> None:
    """Time first, without a batch, dropout between layers."""
    forward = nn.LSTM.forward
    for place, (options, x) in enumerate(
        [
            ({}, torch.randn(5, 2, 4)),
            ({"batch_first": True}, torch.randn(5, 4)),
            ({"num_layers": 2, "dropout": 0.0, "bidirectional": True}, torch.randn(5, 4)),
        ]
    ):
        torch.manual_seed(place)
        module, path = nn.LSTM(4, 6, proj_size=3, **options), tmp_path / f"{place}.onnx"
        ortflow.export_for_training(module, x, path, dynamic_shapes={})
        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        outputs, states = module(x)
        for actual, expected in zip(session.run(None, {"input": x.numpy()}), (outputs, *states), strict=True):
            np.testing.assert_allclose(actual, expected.detach().numpy(), atol=1e-6)
    assert nn.LSTM.forward is forward


def test_a_given_state_is_refused_in_one_sentence(tmp_path: Path) -> None:
    class Given(Projected):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x, (x.new_ones(1, x.shape[1], 3), x.new_ones(1, x.shape[1], 6)))[0]

    sentence = r"LSTM with proj_size .*test_export_recurrent.py line \d+.*proj_size=0"
    with pytest.raises(UserError, match=sentence) as caught:
        ortflow.export_for_training(Given(), torch.randn(5, 2, 4), tmp_path / "model.onnx", dynamic_shapes={})
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
