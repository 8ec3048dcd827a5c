"""Models under ORTModule learn as in PyTorch: 20 steps each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
import torch
from ortmodule_models import Gpt, Images
from rotation import rotating
from torch import nn

from ortflow.torch import ORTModule

STEPS = 20


class Sequences(nn.Module):
    """A bidirectional LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 8, batch_first=True, bidirectional=True), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.lstm(x)[0][:, -1])


def _loss(result: Any) -> torch.Tensor:
    if hasattr(result, "loss"):
        return result.loss  # type: ignore[no-any-return]
    if isinstance(result, tuple):
        return result[1]  # type: ignore[no-any-return]
    return result.square().mean()  # type: ignore[no-any-return]


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 61, shape)


def gpt() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    return Gpt(), lambda step: {"tokens": _tokens(2, 6 + step % 3), "targets": _tokens(2, 6 + step % 3)}


def images() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    return Images(), lambda step: {"x": torch.randn(3 + step % 2, 3, 14, 14)}


def sequences() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    return Sequences(), lambda step: {"x": torch.randn(3, 5 + step % 2, 6)}


def gpt2() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=61, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        use_cache=False,
    )  # fmt: skip

    def batch(step: int) -> dict[str, Any]:
        tokens = _tokens(2, 8)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}

    return GPT2LMHeadModel(config), batch


def bert() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return BertForSequenceClassification(config), lambda step: {
        "input_ids": _tokens(2, 8), "attention_mask": torch.ones(2, 8, dtype=torch.int64),
        "labels": torch.randint(0, 2, (2,)),
    }  # fmt: skip


def timm_resnet() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    import timm

    return timm.create_model("test_resnet", num_classes=5), lambda step: {"x": torch.randn(2, 3, 64, 64)}


def timm_vit() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    import timm

    return timm.create_model("test_vit", num_classes=5), lambda step: {"x": torch.randn(2, 3, 160, 160)}


MODELS = {make.__name__: make for make in (
    gpt, images, sequences, gpt2, bert, timm_resnet, timm_vit,
)}  # fmt: skip


@pytest.mark.parametrize("name", rotating(MODELS, ["gpt", "bert", "images"]))
def test_a_model_learns_as_in_pytorch(name: str) -> None:
    torch.manual_seed(4)
    eager, batch = MODELS[name]()
    eager.train()
    module = ORTModule(copy.deepcopy(eager))
    batches = [batch(step) for step in range(STEPS)]
    losses = [_curve(each, batches) for each in (eager, module)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3, abs=1e-4)
    for (key, mine), other in zip(module.state_dict().items(), eager.state_dict().values(), strict=True):
        if not mine.is_floating_point():
            assert torch.equal(mine, other), key


def _curve(module: nn.Module, batches: list[dict[str, Any]]) -> list[float]:
    # Without Adam: it would amplify the rounding of gradients that are zero.
    optimizer = torch.optim.SGD(module.parameters(), 0.02, momentum=0.9)
    losses = []
    for batch in batches:
        loss = _loss(module(**batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
