"""Dropouts of an exported module against PyTorch's gradients, with the masks that ortflow's kernels draw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
import numpy as np
import onnx
import torch
from graph_build_models import built, run_graph, tensors_of
from kernels import LIBRARY, needs_kernels, off
from philox import kept
from torch import Tensor, nn
from torch.nn import functional

import ortflow
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.types import LOSS_SUM, SEED
from ortflow.workflow.kernels.dropout import attributes

RATIOS = 0.1, 0.25, 0.5
CLASSES, TOKENS, WIDTH, HEADS, ROWS = 7, 6, 16, 2, 3


class Block(nn.Module):
    """Attention with dropout of its weights, and of what both halves add to the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.head = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.drops = nn.ModuleList(nn.Dropout(ratio) for ratio in RATIOS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).view(-1, TOKENS, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        weights = self.drops[0](torch.softmax(q @ k.transpose(2, 3) / 2.0, -1))
        x = x + self.drops[1](self.out((weights @ v).transpose(1, 2).reshape(-1, TOKENS, WIDTH)))
        x = x + self.drops[2](self.down(functional.gelu(self.up(self.norms[1](x)))))
        return self.head(x)


class Given(nn.Module):
    """A dropout whose mask is given."""

    def __init__(self, mask: Tensor, ratio: float) -> None:
        super().__init__()
        self.mask, self.ratio = mask, ratio

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask / (1 - self.ratio)


def with_masks(module: Block, seed: int, shapes: Sequence[tuple[int, ...]]) -> None:
    """Let the module drop what ortflow drops: its dropouts are numbered in the order of the graph."""
    for number, (ratio, shape) in enumerate(zip(RATIOS, shapes, strict=True)):
        mask = kept(seed, number, int(attributes(ratio)["dropped"]), shape)
        module.drops[number] = Given(torch.from_numpy(mask), ratio)


@needs_kernels
@pytest.mark.parametrize("seed", [4, 2**31 - 5])
def test_gradients_are_pytorch_s_with_the_same_masks(tmp_path: Path, seed: int) -> None:
    torch.manual_seed(0)
    module, x = Block().train(), torch.randn(ROWS, TOKENS, WIDTH)
    labels = torch.randint(0, CLASSES, (ROWS, TOKENS))
    ortflow.export_for_training(module, x, tmp_path / "m.onnx", input_names=["x"])
    graphs = built(tmp_path / "m.onnx")
    feeds = {**tensors_of(graphs), "x": x.numpy(), "labels": labels.numpy(), SEED: np.array([seed])}
    found = run_graph(Form.KERNELS.of(graphs.train), feeds, kernels=LIBRARY.path)
    drawn = [node for node in onnx.load(Form.KERNELS.of(graphs.train)).graph.node if node.op_type == "Dropout"]
    assert {node.domain for node in drawn} == {"ortflow"}
    rows = (ROWS, TOKENS, WIDTH)
    with_masks(module, seed, [(ROWS, HEADS, TOKENS, TOKENS), rows, rows])
    exact = module.double()
    loss = functional.cross_entropy(exact(x.double()).flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    assert off(found[LOSS_SUM], loss.detach().numpy()) < 1e-6
    for name, parameter in exact.named_parameters():
        assert parameter.grad is not None
        assert off(found[f"{name}_grad"], parameter.grad.numpy()) < 2e-5, name
