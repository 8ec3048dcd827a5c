"""Recurrent networks, and a plain perceptron."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from case import Batch, Case
from torch import nn

from ortflow.workflow.spec.model import BinaryCrossEntropy, CrossEntropy, Regression

VOCABULARY = 23
TIME = 8


class Tagger(nn.Module):
    """Embedding, a recurrent layer, a class for every token."""

    def __init__(self, layer: type[nn.RNNBase], *, layers: int, bidirectional: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.recurrent = layer(12, 16, num_layers=layers, bidirectional=bidirectional, batch_first=True)
        self.head = nn.Linear(32 if bidirectional else 16, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(self.embed(tokens))[0])


def lstm() -> nn.Module:
    """Two layers of LSTM."""
    return Tagger(nn.LSTM, layers=2, bidirectional=False)


def gru() -> nn.Module:
    """Two layers of GRU."""
    return Tagger(nn.GRU, layers=2, bidirectional=False)


def rnn() -> nn.Module:
    """A plain recurrent layer in both directions."""
    return Tagger(nn.RNN, layers=1, bidirectional=True)


def mlp() -> nn.Module:
    """A perceptron with layer normalisation."""
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))


def _tags(generator: np.random.Generator, size: int) -> Batch:
    tokens = generator.integers(0, VOCABULARY, (2, size, TIME))
    return {"tokens": tokens[0], "labels": tokens[1]}


def _points(generator: np.random.Generator, size: int) -> Batch:
    points = generator.standard_normal((size, 8), dtype=np.float32)
    return {"input": points[:, :6], "labels": points[:, 6:]}


def _choices(generator: np.random.Generator, size: int) -> Batch:
    batch = _points(generator, size)
    return {**batch, "labels": (batch["labels"] > 0).astype(np.float32)}


def cases() -> Iterator[Case]:
    """Each recurrent layer, and the perceptron under each elementwise loss."""
    for build in (lstm, gru, rnn):
        yield Case(build.__name__, build, _tags, CrossEntropy(kind="cross_entropy"))
    yield Case("mlp-mse", mlp, _points, Regression(kind="mse"))
    yield Case("mlp-l1", mlp, _points, Regression(kind="l1"))
    yield Case("mlp-bce", mlp, _choices, BinaryCrossEntropy(kind="bce_with_logits"))
