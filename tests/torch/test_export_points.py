"""export_for_training compares at zeros, ties, negative zeros, equal rows and padding, too."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import ortflow
import ortflow.exporter.comparison
from ortflow.exporter.points import POINTS, coarse
from ortflow.exporter.rounding import other_rounding
from ortflow.workflow.errors import UserError

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 1], [2, 3, 4, 5]])


class OtherOnlyAt(nn.Module):
    """A linear layer, and a term that its export alone has: as if a translation were wrong where it is not 0."""

    def __init__(self, term: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.term, self.layer = term, nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y + self.term(x) if torch.onnx.is_in_onnx_export() else y


class OtherAtPadding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table, self.layer = nn.Embedding(9, 6, padding_idx=8), nn.Linear(6, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y = self.layer(self.table(tokens))
        return y + (tokens == 8).unsqueeze(-1) if torch.onnx.is_in_onnx_export() else y


TERMS = {
    "with inputs and biases of zero": lambda x: (x == 0).all(1, keepdim=True).float(),
    "with equal elements": lambda x: (x[:, :1] == x[:, 1:]).any(1, keepdim=True) * (x != 0).any(1, keepdim=True),
    "with equal rows": lambda x: (x == x.flip(0)).all() * (x != 0).any(1, keepdim=True),
    "with padding": lambda x: (x[:, 3:] == 0).all(1, keepdim=True) * (x != 0).any(1, keepdim=True),
}


@pytest.mark.rotates
@pytest.mark.parametrize("point", TERMS)
def test_what_is_wrong_only_there_is_refused(point: str, tmp_path: Path) -> None:
    assert set(TERMS) == set(POINTS)
    expected = f"would not compute what OtherOnlyAt computes: output 'output' is .* {re.escape(point)}"
    with pytest.raises(UserError, match=expected):
        ortflow.export_for_training(OtherOnlyAt(TERMS[point]), X, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_at_negative_zero_is_refused(tmp_path: Path) -> None:
    module = OtherOnlyAt(lambda x: ((x == 0) & (torch.atan2(x, -torch.ones_like(x)) < 0)).any(1, keepdim=True))
    with pytest.raises(UserError, match="with equal elements"):
        ortflow.export_for_training(module, X, tmp_path / "model.onnx")


def test_what_is_wrong_for_the_number_of_padding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"output 'output' is .* with padding"):
        ortflow.export_for_training(OtherAtPadding(), TOKENS, tmp_path / "model.onnx")


class Layers(nn.Module):
    """A function of a linear layer without bias: zeros stay zeros."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.function, self.layer = function, nn.Linear(6, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x))


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6, 6) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(x * self.weight + self.bias).abs()


def test_where_pytorch_itself_gives_nan_nothing_is_compared(tmp_path: Path) -> None:
    module = Layers(lambda y: y.pow(2).sum(1).sqrt())
    module(torch.zeros(2, 6)).sum().backward()
    assert module.layer.weight.grad is not None
    assert module.layer.weight.grad.isnan().all()
    ortflow.export_for_training(module, X, tmp_path / "model.onnx")


CHOICES = {
    "topk": lambda y: y.topk(3).values * y[:, :3],
    "smallest": lambda y: y.topk(3, 0, largest=False).values,
    "sort": lambda y: y.sort().values[:, :3] * y[:, :3],
    "descending": lambda y: y.sort(0, descending=True).values[:2],
    "quantile": lambda y: torch.quantile(y[:, :4], 0.3, dim=-1),
    "quantile of a batch": lambda y: torch.quantile(y[:2], 0.3, dim=0),
}


@pytest.mark.rotates
@pytest.mark.parametrize("name", CHOICES)
def test_the_choice_between_equal_elements_may_be_another(name: str, tmp_path: Path) -> None:
    """PyTorch's own follows no order."""
    module = Layers(CHOICES[name])
    ortflow.export_for_training(module, X, tmp_path / "model.onnx")


def test_a_difference_by_rounding_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a spectrum is 0, PyTorch's is 0 and the file's is rounding, of any direction."""
    module, x = Spectrum(), torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(1))
    ortflow.export_for_training(module, x, tmp_path / "model.onnx")
    monkeypatch.setattr(ortflow.exporter.comparison, "_ROUNDINGS", 0)
    with pytest.raises(UserError, match=r"the gradient of 'weight' is .* off with equal"):
        ortflow.export_for_training(module, x, tmp_path / "model.onnx")


def test_exact_results_stay_in_another_rounding() -> None:
    a, b = coarse(X), coarse(X.flip(0))
    assert a.unique().numel() < 12
    assert bool((torch.signbit(a) & (a == 0)).any())
    product = a @ b.T
    with other_rounding(0):
        assert torch.equal(a @ b.T, product)
        moved = a.exp()
    assert not torch.equal(moved, a.exp())
    assert torch.allclose(moved, a.exp(), rtol=1e-5)


class Losses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.mean, self.spread = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.GaussianNLLLoss(full=True)(self.mean(x), x[:, :3], F.softplus(self.spread(x)))


def test_the_gaussian_loss_has_no_branch(tmp_path: Path) -> None:
    ortflow.export_for_training(Losses(), X, tmp_path / "model.onnx")
