"""The samples of the guide to ORTModule with DDP, samplers and debug options, with their import lines changed.

The samples' device is a GPU and their backend NCCL; here they are the CPU and Gloo.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ortflow.torch import DebugOptions, LogLevel, ORTModule
from ortflow.torch.optim import FusedAdam
from ortflow.torch.optim.fp16_optimizer import FP16_Optimizer
from ortflow.torch.samplers import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", world_size=1, rank=0)
    yield
    dist.destroy_process_group()


def build_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))


class Trainer:
    """The sample's trainer."""

    def __init__(self, model: torch.nn.Module, train_dataset: Any, rank: str, world_size: int, fused: bool) -> None:
        self.rank = rank
        self.model: Any = DistributedDataParallel(ORTModule(model.to(rank)))
        self.sampler: Any = DistributedSampler(train_dataset, num_replicas=world_size, rank=0, shuffle=True)
        self.dataloader: Any = DataLoader(train_dataset, batch_size=8, sampler=self.sampler)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if fused:
            self.optimizer = FP16_Optimizer(FusedAdam(self.model.parameters(), lr=1e-2))
        self.criterion = torch.nn.CrossEntropyLoss()

    def train_epoch(self, epoch: int) -> float:
        self.model.train()
        self.sampler.set_epoch(epoch)
        total_loss = 0.0
        for data, target in self.dataloader:
            self.optimizer.zero_grad()
            output = self.model(data.to(self.rank))
            loss = self.criterion(output, target.to(self.rank))
            loss.backward()
            self.optimizer.step()
            total_loss += loss.item()
        total_loss_tensor = torch.tensor(total_loss)
        dist.all_reduce(total_loss_tensor, op=dist.ReduceOp.SUM)
        return total_loss_tensor.item() / len(self.dataloader)


def save_checkpoint(model: Any, optimizer: Any, epoch: int, path: Path) -> None:
    """The sample's."""
    if dist.get_rank() == 0:
        checkpoint = {
            "epoch": epoch,
            "model_state_dict": model.module.state_dict(),
            "optimizer_state_dict": optimizer.state_dict(),
        }
        torch.save(checkpoint, path)


def load_checkpoint(model: Any, optimizer: Any, path: Path) -> int:
    """The sample's."""
    checkpoint = torch.load(path, map_location="cpu")
    model.module.load_state_dict(checkpoint["model_state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
    return int(checkpoint["epoch"])


@pytest.mark.parametrize("fused", [False, True], ids=["AdamW", "FusedAdam"])
def test_the_trainer_and_its_checkpoints(group: None, tmp_path: Path, fused: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 6, generator=generator)
    data = TensorDataset(x, x[:, :3].argmax(1))
    trainer = Trainer(build_model(), data, "cpu", 1, fused)
    losses = [trainer.train_epoch(epoch) for epoch in range(2)]
    save_checkpoint(trainer.model, trainer.optimizer, 2, tmp_path / "checkpoint.pt")
    losses += [trainer.train_epoch(epoch) for epoch in range(2, 4)]
    assert losses[-1] < 0.8 * losses[0]
    # The keys are those of the model itself.
    assert list(trainer.model.module.state_dict()) == list(build_model().state_dict())
    again = Trainer(build_model(), data, "cpu", 1, fused)
    epoch = load_checkpoint(again.model, again.optimizer, tmp_path / "checkpoint.pt")
    assert [again.train_epoch(number) for number in range(epoch, 4)] == losses[2:]


def test_variable_lengths(group: None) -> None:
    dataset = [{"input_ids": list(range(1 + place * 7 % 13))} for place in range(23)]

    def complexity_fn(sample: dict[str, list[int]]) -> int:
        return len(sample["input_ids"])

    def batch_fn(indices: list[int]) -> list[list[int]]:
        return [indices[first : first + 4] for first in range(0, len(indices), 4)]

    sampler = LoadBalancingDistributedSampler(dataset, complexity_fn=complexity_fn)
    batch_sampler = LoadBalancingDistributedBatchSampler(sampler, batch_fn=batch_fn)
    loader: Any = DataLoader(dataset, batch_sampler=batch_sampler, collate_fn=list)  # type: ignore[arg-type]
    for epoch in range(3):
        batch_sampler.set_epoch(epoch)
        assert sum(len(batch) for batch in loader) == 23


def test_debug_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(tmp_path))
    options = DebugOptions(save_onnx=True, log_level=LogLevel.INFO, onnx_prefix="pipeline_model")
    ORTModule(build_model(), options)(torch.ones(2, 6)).sum().backward()
    assert [path for path in tmp_path.iterdir() if path.name.startswith("pipeline_model")]
