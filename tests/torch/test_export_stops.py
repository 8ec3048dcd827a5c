"""Where forward stops gradients, the exported file does too: detach(), .data, no_grad()."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
import onnx
import torch
from following import distances
from module_models import Call, module_case
from torch import nn
from torch.nn import functional

import ortflow
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir.stops import stops_gradient


def straight_through(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = x @ w
    return hidden + (hidden.round() - hidden).detach()


def fixed_copy(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A parameter, detached and not; and the data of a value."""
    hidden = functional.silu(x @ w)
    return hidden @ w.detach().T + (hidden * hidden.data) @ w.T


def without_gradients(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A normalisation by statistics computed without gradients; an integer and a float derived from them."""
    hidden = x @ w
    with torch.no_grad():
        largest, place = hidden.max(-1, keepdim=True)
        spread = hidden.std(-1, keepdim=True) + 1.0
    return hidden / spread + largest * torch.gather(hidden, -1, place)


def nested(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.enable_grad():
        inner = (x @ w).tanh()
    with torch.no_grad():
        half = w * 0.5
        with torch.enable_grad():
            outer = inner * (x @ w)
    return outer @ half.T


class Cycles(nn.Module):
    """The first cycles without gradients, the last with them: a hierarchical reasoning model, a fixed point."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x)
        for cycle in range(3):
            with torch.set_grad_enabled(cycle == 2):
                state = self.norm(self.drop(self.layer(state).relu()) + x)
        return state


class Codebook(nn.Module):
    """Vector quantisation: nearest code, straight-through, and both of its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(9, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        apart = (x.detach().unsqueeze(1) - self.codes.weight.detach()).pow(2).sum(-1)
        code = self.codes(apart.argmin(1))
        commitment = (x - code.detach()).pow(2).mean(1, keepdim=True) + (code - x.detach()).pow(2).mean(1, keepdim=True)
        return x + (code - x).detach() + commitment


CASES = [
    module_case("straight-through", lambda: Call(straight_through, (6, 5)), 6),
    module_case("detached", lambda: Call(fixed_copy, (6, 5)), 6),
    module_case("no_grad", lambda: Call(without_gradients, (6, 5)), 6),
    module_case("nested", lambda: Call(nested, (6, 6)), 6),
    module_case("cycles", Cycles, 6),
    module_case("codebook", Codebook, 6),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_stop_where_pytorch_stops_them(case: Any, tmp_path: Path) -> None:
    assert [distance for distance in distances(case, tmp_path) if distance.wrong] == []
    assert any(stops_gradient(node) for node in onnx.load(tmp_path / "model.onnx").graph.node)


class Swish(torch.autograd.Function):
    """Forward without gradients, and a backward that is its derivative."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x)
        return x * torch.sigmoid(x.detach())

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = context.saved_tensors
        s = torch.sigmoid(x)
        return gradient * s * (1 + x * (1 - s))


class Plain(nn.Module):
    """Parts without gradients that depend on no parameter, and a custom function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.register_buffer("rates", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            angles = (x.sum(1, keepdim=True) * self.rates).cos().detach()
        return Swish.apply(self.layer(x)) * angles


def test_nothing_is_marked_without_a_gradient_to_stop(tmp_path: Path) -> None:
    module, apply = Plain(), torch.autograd.Function.apply
    ortflow.export_for_training(module, torch.randn(2, 3), tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    assert not any(stops_gradient(node) for node in model.graph.node)
    assert [entry.domain for entry in model.opset_import] == [""]
    assert "forward" not in vars(module)
    assert torch.autograd.Function.apply == apply


def test_a_function_with_another_gradient_is_refused_beside_a_stop(tmp_path: Path) -> None:
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient / 2

    class Both(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.layer(x)
            return Halved.apply(hidden) * hidden.detach()

    sentence = r"'layer.weight' is 100.0% off.*torch\.autograd\.Function"
    with pytest.raises(UserError, match=sentence):
        ortflow.export_for_training(Both(), torch.randn(2, 3), tmp_path / "model.onnx")


def test_stops_and_constants_are_on_the_device_of_the_module() -> None:
    """On a GPU that the test does not need: PyTorch's fake tensors have its name."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ortflow.exporter.stops import stops_noted
    from ortflow.exporter.trace import exportable

    class Tables(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Embedding(7, 4, padding_idx=0, device="cuda")
            self.second = torch.nn.Embedding(7, 4, scale_grad_by_freq=True, device="cuda")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.first(x) + self.second(x)
            return torch.roll(found * found.detach(), 1, 1)

    with FakeTensorMode(allow_non_fake_inputs=True):
        module = Tables()
        with exportable(module), stops_noted(module):
            x = torch.zeros(2, 3, dtype=torch.int64, device="cuda")
            program = torch.export.export(module, (x,), strict=False)
    (result,) = next(node for node in program.graph.nodes if node.op == "output").args[0]
    assert result.meta["val"].device.type == "cuda"
