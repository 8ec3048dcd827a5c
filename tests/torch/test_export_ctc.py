"""The composed CTC loss is PyTorch's: losses and gradients in double precision, and as exported."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import ortflow
from ortflow.exporter.ctc import ctc_loss

TARGETS = torch.tensor([[1, 2, 2, 3], [4, 4, -7, -7], [1, -7, -7, -7], [-7, -7, -7, -7], [2, 2, 2, 2]])
LENGTHS = torch.tensor([4, 2, 1, 0, 4])
INPUTS = torch.tensor([9, 7, 1, 5, 5])
"""The last has too few steps for its repeated labels: an infinite loss."""
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


@pytest.mark.parametrize("reduction", list(REDUCTIONS))
@pytest.mark.parametrize("blank", [0, 5, 2])
@pytest.mark.parametrize("joined", [False, True])
def test_losses_and_gradients(reduction: str, blank: int, joined: bool) -> None:
    """Also with the blank among the targets, which PyTorch's documentation forbids and its loss computes."""
    torch.manual_seed(1)
    logits = torch.randn(9, 5, 6, dtype=torch.float64)
    targets = TARGETS[torch.arange(4) < LENGTHS.unsqueeze(1)] if joined else TARGETS.clamp(min=0)
    given = []
    for loss in (F.ctc_loss, lambda *args, reduction, **rest: ctc_loss(*args, reduction=REDUCTIONS[reduction], **rest)):
        x = logits.clone().requires_grad_()
        lengths = (INPUTS, LENGTHS)
        value = loss(x.log_softmax(2), targets, *lengths, blank=blank, reduction=reduction, zero_infinity=True)
        value.sum().backward()
        given.append((value.detach(), x.grad))
    for mine, theirs in zip(*given, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_without_a_batch_and_without_a_way() -> None:
    log_probs = torch.randn(6, 4, dtype=torch.float64).log_softmax(1)
    args = (log_probs, torch.tensor([1, 1, 2]), torch.tensor(6), torch.tensor(3))
    torch.testing.assert_close(ctc_loss(*args, 0, 0), F.ctc_loss(*args, reduction="none"))
    short = (log_probs, torch.tensor([1, 1, 2]), (3,), (3,))
    assert ctc_loss(*short).item() == F.ctc_loss(*short).item() == torch.inf


class Recogniser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 6)
        self.loss = nn.CTCLoss(zero_infinity=True)

    def forward(self, x, targets, inputs, lengths) -> dict[str, torch.Tensor]:
        log_probs = self.head(self.rnn(x)[0]).log_softmax(2)
        return {"loss": self.loss(log_probs.transpose(0, 1), targets, inputs, lengths), "log_probs": log_probs}


def test_export_is_compared_with_pytorchs_own(tmp_path: Path) -> None:
    """Outputs and gradients, by export_for_training itself."""
    torch.manual_seed(1)
    example = {"x": torch.randn(5, 9, 4), "targets": TARGETS.clamp(min=0), "inputs": INPUTS, "lengths": LENGTHS}
    ortflow.export_for_training(Recogniser(), example, tmp_path / "ctc.onnx")
