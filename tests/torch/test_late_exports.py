"""Models whose export used to fail after the last step: LeViT, and CLIP with its scalar parameter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
import numpy as np
import onnx
import torch
from case import Batch
from flat import FlatRun, graphs_of
from reference import OPTIMIZER
from torch import nn

import ortflow
from ortflow.workflow.device.cpu import CpuDevice, HostBuffer
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.onnx_runtime import onnxruntime as ort
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.model import CrossEntropy, Loss, OutputLoss
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.export.inference import export_checked

SEED = 3


class Logits(nn.Module):
    """A model of transformers whose only output is its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.model(input).logits


class ClipLoss(nn.Module):
    """CLIP with its own loss over the pairs of a batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        made = self.model(input_ids=tokens, pixel_values=pixels, return_loss=True)
        return {"loss": made.loss, "image_embeds": made.image_embeds}


def levit() -> nn.Module:
    from transformers import LevitConfig, LevitForImageClassification

    config = LevitConfig(
        image_size=32, hidden_sizes=[16, 24, 32], num_attention_heads=[2, 2, 2], depths=[1, 1, 1], key_dim=[8, 8, 8],
        num_labels=10,
    )  # fmt: skip
    return Logits(LevitForImageClassification(config))


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    shared = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**shared, "vocab_size": 50, "max_position_embeddings": 8, "eos_token_id": 49, "bos_token_id": 48}
    vision = {**shared, "image_size": 16, "patch_size": 8}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=16, attn_implementation="eager")
    return ClipLoss(CLIPModel(config))


def images(size: int) -> Callable[[np.random.Generator], Batch]:
    def draw(random: np.random.Generator) -> Batch:
        pixels = random.standard_normal((4, 3, size, size), np.float32)
        return {"input": pixels, "labels": random.integers(0, 10, 4)}

    return draw


def pairs(random: np.random.Generator) -> Batch:
    tokens = random.integers(0, 48, (4, 8))
    tokens[:, -1] = 49
    return {"tokens": tokens, "pixels": random.standard_normal((4, 3, 16, 16), np.float32)}


def trained(
    build: Callable[[], nn.Module], loss: Loss, draw: Callable[[np.random.Generator], Batch], folder: Path, steps: int
) -> tuple[GraphSet, FlatRun, list[MicroBatch]]:
    torch.manual_seed(SEED)
    random = np.random.default_rng(SEED)
    example = {name: torch.from_numpy(array[:3]) for name, array in draw(random).items() if name != "labels"}
    path = folder / "model.onnx"
    ortflow.export_for_training(build(), tuple(example.values()), path, input_names=list(example))
    graphs = graphs_of(path, loss, OPTIMIZER, folder / "graphs")
    run = FlatRun(graphs, OPTIMIZER)
    for _ in range(steps):
        run.step(draw(random))
    batch = draw(random)
    return graphs, run, [MicroBatch(batch, 4)]


@pytest.mark.parametrize(
    ("build", "loss", "draw"),
    [
        pytest.param(levit, CrossEntropy(kind="cross_entropy"), images(32), id="levit"),
        pytest.param(clip, OutputLoss(kind="output", output="loss"), pairs, id="clip"),
    ],
)
def test_the_trained_model_is_exported(
    build: Callable[[], nn.Module], loss: Loss, draw: Callable[[np.random.Generator], Batch], tmp_path: Path
) -> None:
    graphs, run, samples = trained(build, loss, draw, tmp_path, 3)
    out = tmp_path / "out.onnx"
    sessions = Sessions(CpuDevice(), 2, "fatal")
    difference = export_checked(graphs, HostBuffer(run.buffers["parameters"]), sessions, out, samples, None)
    assert difference is not None
    model = onnx.load(out)
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    assert all(shapes[entry.name] == entry.tensor.shape for entry in graphs.index if entry.name in shapes)
    ort.InferenceSession(str(out), providers=["CPUExecutionProvider"])
