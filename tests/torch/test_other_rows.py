"""Samples that read others of their micro-batch, by an input's index, train like PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
import numpy as np
import torch
import yaml
from caches import cache_without_gradients
from torch import nn
from torch.nn import functional as F  # noqa: N812

import ortflow
from ortflow.workflow.data.write import record_batch, write_set

BATCH, STEPS, RATE = 8, 5, 0.1


class Pairs(nn.Module):
    """Logits, and those of another sample of the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        z = self.layer(x)
        return z + 0.5 * z[other]


def test_the_run_follows_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the gradient took two samples, whose indices point behind them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_without_gradients(tmp_path / "cache")))
    random = np.random.default_rng(0)
    rows = BATCH * STEPS
    columns = {
        "x": random.standard_normal((rows, 6), dtype=np.float32),
        "other": random.integers(3, BATCH, rows),
        "labels": random.integers(0, 3, rows),
    }
    module = Pairs()
    example = {"x": torch.from_numpy(columns["x"][:4]), "other": torch.tensor([1, 0, 3, 2])}
    ortflow.export_for_training(module, example, tmp_path / "model.onnx")
    write_set(tmp_path / "train.arrow", [record_batch(columns)])
    spec = {
        "name": "pairs",
        "run_dir": str(tmp_path / "run"),
        "model": {"path": "model.onnx", "loss": "cross_entropy"},
        "data": {"train": "train.arrow", "shuffle": False, "micro_batch": BATCH},
        "train": {"steps": STEPS, "optimizer": {"name": "sgd", "lr": RATE}},
        "monitor": {"tensorboard": False},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(spec))
    done = subprocess.run(
        [sys.executable, "-m", "ortflow", "run", str(tmp_path / "run.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in (tmp_path / "run/events/rank-0000.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events].count("gradient_check") == 1
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=RATE), []
    for step in range(STEPS):
        x, other, labels = (torch.from_numpy(column[step * BATCH :][:BATCH]) for column in columns.values())
        loss = F.cross_entropy(module(x, other), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [event["loss"] for event in events if event["event"] == "step"] == pytest.approx(losses, abs=1e-6)
