"""PyTorch's own loops over the samples of the runs of docs/walks, in their order, read through ortflow's sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn.utils import parametrize

from ortflow.workflow.data.augmented import augmented
from ortflow.workflow.data.batches import Batches
from ortflow.workflow.data.epoch_positions import Position
from ortflow.workflow.data.feed import Feed
from ortflow.workflow.data.order import SampleOrder
from ortflow.workflow.data.samples import Samples
from ortflow.workflow.data.sources import open_evaluation, open_training
from ortflow.workflow.data.vocabulary import transforms_of
from ortflow.workflow.spec.file.load import load_run_text
from ortflow.workflow.spec.file.paths import resolve_paths
from ortflow.workflow.spec.mapping import ColumnReference

Arrays = Mapping[str, torch.Tensor]
EPSILON = 1e-6
"""AdamW's, as in the pages: with 1e-8 two orders of summation in fp32 are over 1e-5 apart; page `text` has 1e-5."""


@dataclass(frozen=True)
class Peer:
    """What PyTorch made of a run's samples."""

    losses: list[float]
    """Before each step."""
    module: torch.nn.Module
    """Trained; that of a run with adapters has parametrizations."""
    evaluation: dict[str, float]
    """Of the held-out samples, under the names of the run's metrics."""
    held_out: list[Arrays]


@dataclass(frozen=True)
class RunSamples:
    """The samples that a run reads."""

    batches: Iterator[Arrays]
    """In the order of the run, without end."""
    held_out: list[Arrays]
    steps: int
    """Of the run."""
    epoch: int
    """Steps of one epoch."""

    @classmethod
    def of(cls, folder: Path, name: str, inputs: Mapping[str, str]) -> RunSamples:
        """Those of `NAME.yaml`; the columns of each input."""
        file = folder / f"{name}.yaml"
        spec = resolve_paths(load_run_text(file.read_text(), file.name), file, folder)
        data = spec.data
        assert data is not None
        assert spec.train.epochs is not None
        plain = open_training(data, spec.seed)
        train = augmented(plain, transforms_of(data.train, "data.train"), spec.seed, "data.train")
        order = SampleOrder(len(train), spec.seed)
        batches = _batches(train, order, inputs, micro_batch=data.micro_batch, last_batch=data.last_batch)
        kept = open_evaluation(data, spec.seed)
        held_out = []
        if kept is not None:
            straight = SampleOrder(len(kept), 0, shuffle=False)
            every = _batches(kept, straight, inputs, micro_batch=data.micro_batch, last_batch="keep")
            held_out = list(_read(every, every.plan.steps_per_epoch))
        epoch = batches.plan.steps_per_epoch
        return cls(_read(batches), held_out, spec.train.epochs * epoch, epoch)


def _batches(samples: Samples, order: SampleOrder, inputs: Mapping[str, str], **options: Any) -> Batches:
    feeds = []
    for name, column in inputs.items():
        dtype = np.dtype("float32" if samples.columns[column].dtype.kind == "f" else "int64")
        feeds.append(Feed(name, dtype, ColumnReference(column), -100 if name == "labels" else 0))
    return Batches(samples, order, feeds, accumulation=1, rank=0, world_size=1, **options)


def _read(batches: Batches, count: int | None = None) -> Iterator[Arrays]:
    with batches.read_from(Position()) as reader:
        for number, step in enumerate(reader, 1):
            (batch,) = step.micro_batches
            yield {name: torch.from_numpy(np.array(array)) for name, array in batch.arrays.items()}
            if number == count:
                return


def train(
    samples: RunSamples,
    compute: Callable[[Arrays], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    schedule: Any = None,
    before: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """PyTorch's loop: the loss before each step. `before` is called with the steps that are done."""
    losses = []
    for step in range(samples.steps):
        before(step)
        batch = next(samples.batches)
        value = cross_entropy(compute(batch), batch["labels"])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(value.item())
    return losses


def adamw(module: torch.nn.Module, lr: float, epsilon: float = EPSILON) -> torch.optim.Optimizer:
    """Of the trained parameters, as in the pages."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=lr, eps=epsilon, weight_decay=0.0)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Over the last axis."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def evaluated(compute: Callable[[Arrays], torch.Tensor], batches: Sequence[Arrays]) -> dict[str, float]:
    """Loss, perplexity, accuracy, top 5 and macro F1 of all samples."""
    with torch.no_grad():
        rows = [(compute(batch), batch["labels"]) for batch in batches]
    logits, labels = (torch.cat(part).flatten(0, -2 + index) for index, part in enumerate(zip(*rows, strict=True)))
    loss, predicted = cross_entropy(logits, labels), logits.argmax(-1)
    among = logits.topk(min(5, logits.shape[-1])).indices == labels[:, None]
    scores = []
    for kind in range(logits.shape[-1]):
        hits = ((predicted == kind) & (labels == kind)).sum().item()
        scores.append(2 * hits / max(1, ((predicted == kind).sum() + (labels == kind).sum()).item()))
    return {
        "loss": loss.item(),
        "perplexity": loss.exp().item(),
        "accuracy": (predicted == labels).float().mean().item(),
        "top_5": among.any(-1).float().mean().item(),
        "f1": sum(scores) / len(scores),
    }


def table(folder: Path, made: Mapping[str, Any]) -> dict[str, Peer]:
    """The page `table`."""
    samples = RunSamples.of(folder, "customers", {"x": "x", "labels": "outcome"})
    module = made["network"]
    losses = train(samples, lambda batch: module(batch["x"]), adamw(module, 1e-3))
    scores = evaluated(lambda batch: module(batch["x"]), samples.held_out)
    return {"customers": Peer(losses, module, scores, samples.held_out)}


def images(folder: Path, made: Mapping[str, Any]) -> dict[str, Peer]:
    """The page `images`: all but the head is frozen for an epoch; statistics of batches move all the time."""
    samples = RunSamples.of(folder, "animals", {"pixels": "image", "labels": "label"})
    module = made["network"].train()
    pretrained = torch.load(folder / "resnet18.pt", weights_only=True)
    missing = module.load_state_dict({k: v for k, v in pretrained.items() if k[:3] != "fc."}, strict=False)
    assert sorted(missing.missing_keys) == ["fc.bias", "fc.weight"]
    body = [value for name, value in module.named_parameters() if name[:3] != "fc."]
    groups = [{"params": body}, {"params": module.fc.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [1e-3, 1e-2], total_steps=samples.steps, final_div_factor=float("inf"), cycle_momentum=False
    )

    def unfreeze(step: int) -> None:
        for parameter in body:
            parameter.requires_grad_(step >= samples.epoch)

    losses = train(samples, lambda batch: module(batch["pixels"]), optimizer, schedule, unfreeze)
    module.eval()
    scores = evaluated(lambda batch: module(batch["pixels"]), samples.held_out)
    return {"animals": Peer(losses, module, scores, samples.held_out)}


def text(folder: Path, made: Mapping[str, Any]) -> dict[str, Peer]:
    """The page `text`: the classifier begins with the weights of the masked model."""
    inputs = {"input_ids": "tokens", "attention_mask": "attention_mask"}
    masked, classifier = made["masked"].train(), made["classifier"].train()
    samples = RunSamples.of(folder, "masked", {**inputs, "labels": "labels"})
    losses = train(samples, lambda batch: _logits(masked, batch), adamw(masked, 3e-3, 1e-5))
    peers = {"masked": Peer(losses, masked, {}, [])}
    classifier.distilbert.load_state_dict(masked.distilbert.state_dict())
    samples = RunSamples.of(folder, "classify", {**inputs, "labels": "stars"})
    losses = train(samples, lambda batch: _logits(classifier, batch), adamw(classifier, 2e-3, 1e-5))
    scores = evaluated(lambda batch: _logits(classifier, batch), samples.held_out)
    return {**peers, "classify": Peer(losses, classifier, scores, samples.held_out)}


def language_model(folder: Path, made: Mapping[str, Any]) -> dict[str, Peer]:
    """The page `language-model`: adapters of the run's first values, and the embedding."""
    module = made["module"].train()
    adapt(module, load_file(folder / "runs" / "story" / "graphs" / "initial.safetensors"), 2.0)
    module.model.embed_tokens.weight.requires_grad_(True)
    inputs = {"input_ids": "tokens", "position_ids": "position_ids", "labels": "labels"}
    samples = RunSamples.of(folder, "story", inputs)
    losses = train(samples, lambda batch: _logits(module, batch), adamw(module, 1e-3))
    scores = evaluated(lambda batch: _logits(module, batch), samples.held_out)
    return {"story": Peer(losses, module, scores, samples.held_out)}


PEERS = {"table": table, "images": images, "text": text, "language-model": language_model}
"""Of each page: runs its PyTorch programs in its folder, with the variables of its `export.py`."""


def _logits(module: torch.nn.Module, batch: Arrays) -> torch.Tensor:
    logits: torch.Tensor = module(**{name: array for name, array in batch.items() if name != "labels"}).logits
    return logits


class Adapter(torch.nn.Module):
    """A weight with a low-rank adapter."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.a, self.b, self.scale = torch.nn.Parameter(a), torch.nn.Parameter(b), scale

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.scale * self.b @ self.a


def adapt(module: torch.nn.Module, initial: dict[str, torch.Tensor], scale: float) -> None:
    """Put adapters on the module's weights, and freeze the rest."""
    module.requires_grad_(False)
    for name in sorted(initial):
        if name.endswith(".weight.lora_A"):
            layer = module.get_submodule(name.removesuffix(".weight.lora_A"))
            a, b = initial[name], initial[name.removesuffix("A") + "B"]
            parametrize.register_parametrization(layer, "weight", Adapter(a, b, scale))
