"""export_for_training writes only files that compute the module's outputs and gradients."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
import numpy as np
import onnx
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import ortflow
import ortflow.exporter.comparison
import ortflow.exporter.difference
import ortflow.exporter.file_gradients
import ortflow.exporter.stops
import ortflow.exporter.trace
from ortflow.workflow.errors import UserError

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 5)


class Reversed(TwoLayers):
    class Turn(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            return -gradient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.Turn.apply(self.first(x)))


class Smoothed(TwoLayers):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.second(self.first(x))
        return {"loss": F.cross_entropy(logits, torch.arange(4) % 5, label_smoothing=0.1), "logits": logits}


GRADIENTS = r".*'first.weight' is 200\.0% off.*'first.bias' is 200\.0% off.*change"


def test_other_gradients_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"would not compute what Reversed computes: {GRADIENTS}") as caught:
        ortflow.export_for_training(Reversed(), X, tmp_path / "deep" / "model.onnx")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_other_outputs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PyTorch's own translation, which drops label smoothing."""
    monkeypatch.setattr(ortflow.exporter.trace, "translations", dict)
    with pytest.raises(UserError, match=r"output 'loss' is [\d.]+% off; change"):
        ortflow.export_for_training(Smoothed(), X, tmp_path / "model.onnx", dynamic_shapes={})
    assert list(tmp_path.iterdir()) == []


def test_a_difference_at_zeros_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost epsilon shows only at a row of zeros, and there as NaN."""

    class Norm(TwoLayers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = F.linear(x, self.first.weight)
            return self.second(hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-8))

    ortflow.export_for_training(Norm(), torch.zeros(2, 3), tmp_path / "model.onnx")
    (tmp_path / "model.onnx").unlink()
    monkeypatch.setattr("ortflow.exporter.optimize.near_identity", lambda tensor: False)
    with pytest.raises(UserError, match="output 'output' is not finite"):
        ortflow.export_for_training(Norm(), torch.zeros(2, 3), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


class Everything(nn.Module):
    """Modules that are random, degenerate or normalised over the batch, and still right."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(7, 8, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.recurrent = nn.GRU(8, 8, 2, dropout=0.5, batch_first=True)
        self.norm, self.planes = nn.BatchNorm1d(8), nn.Dropout1d(0.4)
        self.mean, self.spread = nn.Linear(8, 4), nn.Linear(8, 4)
        self.fixed = nn.Linear(4, 4).requires_grad_(False)
        self.zero = nn.Parameter(torch.zeros(4))
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens: torch.Tensor):
        x = self.recurrent(self.layer(self.embed(tokens)))[0]
        x = self.planes(self.norm(x.transpose(1, 2)))
        x = x.mean(2).relu()
        drawn = self.mean(x) + torch.randn_like(self.mean(x)) * self.spread(x).exp()
        scores = F.gumbel_softmax(self.fixed(drawn)) * self.zero
        return scores, torch.argmax(drawn, 1), drawn * torch.bernoulli(torch.full_like(drawn, 0.7))


def test_what_is_right_passes_and_the_module_stays_as_it_was(tmp_path: Path) -> None:
    module = Everything()
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    random = torch.get_rng_state()
    ortflow.export_for_training(module, torch.arange(15).reshape(3, 5) % 7, tmp_path / "model.onnx")
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    assert all(part.training for part in module.modules())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_module_that_overflows_in_double_precision_is_compared_in_single(tmp_path: Path) -> None:
    class Overflowing(TwoLayers):
        sign = 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.Turn.apply(self.first(x), self.sign))

        class Turn(torch.autograd.Function):
            @staticmethod
            def forward(context, x, sign):
                context.sign = sign
                return x + (float("nan") if x.dtype == torch.float64 else 0)

            @staticmethod
            def backward(context, gradient):
                return gradient * context.sign, None

    ortflow.export_for_training(Overflowing(), X, tmp_path / "model.onnx")
    Overflowing.sign = -1
    with pytest.raises(UserError, match=r"'first.weight' is 200\.0% off"):
        ortflow.export_for_training(Overflowing(), X, tmp_path / "other.onnx")


def test_the_padding_row_of_a_table_has_no_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Padded(TwoLayers):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 3, padding_idx=-2)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(self.table(tokens))) @ self.second.weight @ self.first.weight

    tokens = torch.tensor([[7, 1], [0, 7], [3, 7]])
    ortflow.export_for_training(Padded(), tokens, tmp_path / "model.onnx")
    choices = [node for node in onnx.load(tmp_path / "model.onnx").graph.node if node.op_type == "Where"]
    assert len(choices) == 1
    monkeypatch.setattr(ortflow.exporter.trace, "keeps_stops", lambda: False)
    with pytest.raises(UserError, match=r"gradient of 'table.weight' is"):
        ortflow.export_for_training(Padded(), tokens, tmp_path / "other.onnx")
    # As with PyTorch before 2.8.
    monkeypatch.setattr(ortflow.exporter.stops, "keeps_stops", lambda: False)
    with pytest.warns(UserWarning, match=r"'table' has padding_idx=7, which PyTorch .* cannot export"):
        ortflow.export_for_training(Padded(), tokens, tmp_path / "other.onnx")


def test_what_a_forward_keeps_for_the_next_outside_of_buffers_is_refused(tmp_path: Path) -> None:
    class Recurrent(TwoLayers):
        def __init__(self) -> None:
            super().__init__()
            self.before: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            before = torch.zeros_like(hidden) if self.before is None else self.before
            self.before = hidden
            return self.second(hidden + before)

    module = Recurrent()
    with pytest.raises(UserError, match=r"output 'output' of a second step is [\d.]+% off"):
        ortflow.export_for_training(module, X, tmp_path / "model.onnx")
    assert module.before is None


def test_a_kink_at_the_example_is_not_a_difference(tmp_path: Path) -> None:
    class Kinks(TwoLayers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x) * 0
            return self.second(hidden.amax(1, keepdim=True) + hidden.abs() + hidden.clamp(0, 1) + self.first(x))

    ortflow.export_for_training(Kinks(), X, tmp_path / "model.onnx")


class DropsRows(nn.Module):
    """Operations that the module skips in evaluation mode but the file cannot."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.empty(len(x), 1).bernoulli_(0.5) if self.training else x


def test_single_precision_of_a_double_input(tmp_path: Path) -> None:
    class Double(TwoLayers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x.float()))

    ortflow.export_for_training(Double(), X.double(), tmp_path / "model.onnx")


def test_without_gradients_outputs_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise UserError("node 'n' has no gradient here")

    monkeypatch.setattr(ortflow.exporter.file_gradients, "training_graph", refused)
    with pytest.warns(UserWarning, match="not compared with PyTorch.*node 'n' has no gradient"):
        ortflow.export_for_training(Reversed(), X, tmp_path / "model.onnx")
    parts = (nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.9), nn.Dropout(0.4), DropsRows())
    with pytest.warns(UserWarning, match="gradients were not compared"):
        ortflow.export_for_training(nn.Sequential(*parts), X, tmp_path / "model.onnx")
    monkeypatch.setattr(ortflow.exporter.trace, "translations", dict)
    with pytest.raises(UserError, match=r"output 'loss' is [\d.]+% off; change"):
        ortflow.export_for_training(Smoothed(), X, tmp_path / "other.onnx", dynamic_shapes={})
    assert [child.name for child in tmp_path.iterdir()] == ["model.onnx"]


def test_without_onnx_runtime_nothing_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.warns(UserWarning, match="not compared with PyTorch.*onnxruntime"):
        ortflow.export_for_training(Reversed(), X, tmp_path / "model.onnx")


def test_zeros_without_a_gradient_are_left_for_values_beside_them(tmp_path: Path) -> None:
    class Length(TwoLayers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.first.weight).pow(2).sum(1).sqrt()

    class Turned(Length):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + Reversed.Turn.apply(F.linear(x, self.first.weight)).sum(1)

    ortflow.export_for_training(Length(), torch.zeros(2, 3), tmp_path / "model.onnx")
    with pytest.raises(UserError, match="would not compute what Turned computes"):
        ortflow.export_for_training(Turned(), torch.zeros(2, 3), tmp_path / "model.onnx")


def test_a_module_without_finite_results_is_not_compared(tmp_path: Path) -> None:
    class Infinite(TwoLayers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x)) / (x * 0).sum()

    with pytest.warns(UserWarning, match="module's own results .* not finite"):
        ortflow.export_for_training(Infinite(), X, tmp_path / "model.onnx")


def test_rounding_decides_how_far_off_is_far() -> None:
    double = np.full(100, 1.0)
    fault = ortflow.exporter.difference.difference
    assert fault([double + 1e-4, double, double], 1e-3, 0.0) == ""
    assert fault([double + 1e-2, double, double], 1e-3, 0.0) == "1.0% off"
    assert fault([double + 1e-2, double + 1e-3, double], 1e-3, 0.0) == ""
    assert fault([double[:3], double, double], 1e-3, 0.0) == "of shape [3], not [100]"
    assert fault([double * np.nan, double, double], 1e-3, 0.0) == "not finite"
    assert fault([double, double * 0, double * 0], 1e-3, 1e-3) == "of norm 10, not 0"
    assert fault([double * 1e-6, double * 0, double * 0], 1e-3, 1e-3) == ""


@pytest.mark.parametrize(
    ("names", "refused"),
    [([["a"], ["b", "c"], ["c", "d"], ["a"]], False), ([["a", "b"], ["b"], ["c", "b"], ["b", "a"]], True)],
)
def test_only_what_differs_everywhere_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[list[str]], refused: bool
) -> None:
    """Near the kinks of a deep network some gradient differs at every place, but not always the same."""
    places = iter(names)

    def faults(*_: object) -> dict[str, str]:
        return {f"the gradient of '{name}'": "1.0% off" for name in next(places)}

    monkeypatch.setattr(ortflow.exporter.comparison.Comparison, "faults", faults)
    out = tmp_path / "model.onnx"
    if refused:
        with pytest.raises(UserError, match=r"gradient of 'b' is 1.0% off.*change"):
            ortflow.export_for_training(TwoLayersInTurn(), X, out)
    else:
        ortflow.export_for_training(TwoLayersInTurn(), X, out)
        assert out.exists()


class TwoLayersInTurn(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Recording(TwoLayers):
    """Installs its hooks at its first call, as transformers' models do to record hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.installed = False
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.recorded: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.installed:
            for layer in self.layers:
                layer.register_forward_hook(lambda module, args, output: self.recorded.append(output))
            self.installed = True
        self.recorded.clear()
        for layer in self.layers:
            x = layer(x).tanh()
        # A hook that is there twice records the first layers alone.
        return self.second(self.first(torch.stack(self.recorded[:3]).sum(0)))


def test_hooks_of_the_first_call_are_there_once(tmp_path: Path) -> None:
    module = Recording()
    ortflow.export_for_training(module, X, tmp_path / "model.onnx")
    names = {tensor.name for tensor in onnx.load(tmp_path / "model.onnx").graph.initializer}
    assert {f"layers.{place}.weight" for place in range(3)} <= names
    assert not module.installed
    assert [len(layer._forward_hooks) for layer in module.layers] == [0, 0, 0]


@pytest.mark.parametrize("size", [1.0, 1e-5, 1e-9])
def test_results_of_any_size_are_compared(size: float, tmp_path: Path) -> None:
    """A model of small weights has outputs of 1e-9: they are no remainder of rounding."""

    class Small(TwoLayers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factor = 0.9 if torch.onnx.is_in_onnx_export() else 1.0
            return self.second(torch.tanh(self.first(x)) * factor) * size

    with pytest.raises(UserError, match=r"output 'output' is [\d.]+% off"):
        ortflow.export_for_training(Small(), X, tmp_path / "model.onnx")
