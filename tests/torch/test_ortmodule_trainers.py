"""ORTModule in transformers' Trainer, Accelerate and Lightning: three steps as without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from torch import nn
from torch.utils.data import DataLoader

from ortflow.torch import ORTModule

DATA = [
    {"x": torch.randn(4, generator=torch.Generator().manual_seed(place)), "labels": torch.tensor([float(place % 3)])}
    for place in range(12)
]
Train = Callable[[nn.Module, Path], object]


class Regression(nn.Module):
    """Returns its loss, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.last(torch.tanh(self.first(x)))
        return {"loss": (outputs - labels).square().mean(), "logits": outputs}


def by_transformers(model: nn.Module, folder: Path) -> None:
    """The Trainer reads the signature of forward: it removes other columns of the data."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    options = transformers.TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=4, learning_rate=0.01, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    transformers.Trainer(model, options, train_dataset=[{**each, "unread": 1} for each in DATA]).train()


def by_accelerate(model: nn.Module, folder: Path) -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(DATA, batch_size=4))
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(prepared(**batch)["loss"])
        optimizer.step()
    assert accelerator.unwrap_model(prepared) is model


def by_lightning(model: nn.Module, folder: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Trained(lightning.LightningModule):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, torch.Tensor], place: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 0.01)

    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(Trained(), DataLoader(DATA, batch_size=4))


@pytest.mark.filterwarnings("ignore")  # theirs, about workers of loaders and their own use of PyTorch
@pytest.mark.parametrize("train", [by_transformers, by_accelerate, by_lightning])
def test_three_steps(train: Train, tmp_path: Path) -> None:
    found = []
    for wrap in (ORTModule, nn.Module.train):  # the latter returns the module
        torch.manual_seed(1)
        model = wrap(Regression())
        before = flat(model)
        train(model, tmp_path)
        found.append(flat(model))
    torch.testing.assert_close(found[0], found[1], rtol=2e-5, atol=2e-6)
    assert float((found[1] - before).abs().max()) > 0.01


def flat(model: nn.Module) -> torch.Tensor:
    """All parameters in one tensor."""
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
