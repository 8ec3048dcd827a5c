"""The modules that ortmodule.py trains, and a batch of each: full size on a GPU, small on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from ortmodule_models import Gpt

Case = tuple[nn.Module, tuple[Tensor, ...]]
Build = Callable[[int, str], Case]
VOCABULARY = 4096
"""Tokens are drawn below it."""


class WithLoss(nn.Module):
    """Logits of a model, and their mean cross-entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(inputs)
        return logits, nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


class OfTransformers(nn.Module):
    """Logits and loss of a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        result = self.model(input_ids=tokens, labels=labels)
        return result.logits, result.loss


class Recurrent(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.tokens(tokens))[0])
        return logits


def _tokens(batch: int, length: int, device: str) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), device=device)


def _images(batch: int, size: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, size, size, device=device), torch.randint(0, 1000, (batch,), device=device)


def gpt(batch: int, device: str) -> Case:
    """GPT-2 with 124M parameters and 1,024 tokens; 3M and 128 on a CPU."""
    small = device == "cpu"
    module = Gpt(VOCABULARY, 192, 4, 6, 128) if small else Gpt(50304, 768, 12, 12, 1024)
    tokens = _tokens(batch, 128 if small else 1024, device)
    return module, (tokens, tokens.roll(-1, 1))


def bert(batch: int, device: str) -> Case:
    """transformers' BertForMaskedLM: base with 512 tokens; four layers and 128 on a CPU. Without dropout."""
    from transformers import BertConfig, BertForMaskedLM

    small = device == "cpu"
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 6,
        "intermediate_size": 768,
    }  # fmt: skip
    config = BertConfig(**(sizes if small else {}), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    tokens = _tokens(batch, 128 if small else 512, device)
    return OfTransformers(BertForMaskedLM(config)), (tokens, tokens)


def llama(batch: int, device: str) -> Case:
    """transformers' LlamaForCausalLM: TinyLlama's 1.1B parameters and 2,048 tokens; 4M and 128 on a CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = device == "cpu"
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6}
    full = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
    heads = {"num_key_value_heads": 2 if small else 4, "vocab_size": VOCABULARY if small else 32000}
    config = LlamaConfig(**(sizes if small else full), **heads, max_position_embeddings=2048, use_cache=False)
    tokens = _tokens(batch, 128 if small else 2048, device)
    return OfTransformers(LlamaForCausalLM(config)), (tokens, tokens)


def resnet(batch: int, device: str) -> Case:
    """torchvision's resnet50 with 224 pixels, channels last; resnet18 with 64 on a CPU."""
    import torchvision

    if device == "cpu":
        return WithLoss(torchvision.models.resnet18()), _images(batch, 64, device)
    images, labels = _images(batch, 224, device)
    module = WithLoss(torchvision.models.resnet50()).to(memory_format=torch.channels_last)
    return module, (images.to(memory_format=torch.channels_last), labels)


def vit(batch: int, device: str) -> Case:
    """timm's ViT-B/16 with 224 pixels; four layers of width 192 with 64 on a CPU."""
    from timm.models.vision_transformer import VisionTransformer

    if device == "cpu":
        model = VisionTransformer(64, 8, embed_dim=192, depth=4, num_heads=6)
        return WithLoss(model), _images(batch, 64, device)
    return WithLoss(VisionTransformer()), _images(batch, 224, device)


def lstm(batch: int, device: str) -> Case:
    """Two LSTM layers over 64 tokens: width 1,024; 192 on a CPU."""
    tokens = _tokens(batch, 64, device)
    return WithLoss(Recurrent(192 if device == "cpu" else 1024)), (tokens, tokens.roll(-1, 1))


CASES: dict[str, Build] = {"gpt": gpt, "bert": bert, "resnet": resnet, "vit": vit, "llama": llama, "lstm": lstm}
BATCH = {
    "cpu": {"gpt": 4, "bert": 4, "resnet": 8, "vit": 8, "llama": 4, "lstm": 8},
    "cuda": {"gpt": 8, "bert": 16, "resnet": 64, "vit": 64, "llama": 4, "lstm": 64},
}
"""Device -> case -> samples of a micro-batch."""
