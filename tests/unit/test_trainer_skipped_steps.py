"""A skipped step leaves no trace: neither in a checkpoint nor in any buffer that later steps read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graph_build_models import Array, built, run_file
from queued import network
from trainers import trainer_on

from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.trainer import MicroBatch, StepOutcome
from ortflow.workflow.trainer.step import GraphTrainer

OPTIMIZERS = [
    {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1},
    {"name": "adam", "lr": 1e-3, "weight_decay": 0.1},
    {"name": "lamb", "lr": 1e-3, "weight_decay": 0.1},
    {"name": "sgd", "lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five numbers to three classes through BatchNormalization; no tensor has a multiple of 64 elements."""
    return network(tmp_path_factory.mktemp("model") / "model.onnx")


def trainer_of(model: Path, **changes: Any) -> GraphTrainer:
    return trainer_on(built(model, **changes), run_file(model, **changes))


def batches(steps: int, micro_batches: int, damaged: Sequence[int]) -> Iterator[list[MicroBatch]]:
    """The micro-batches of each step; a damaged step has a NaN in one sample of its last micro-batch."""
    random = np.random.default_rng(1)
    for step in range(steps):
        made = []
        for _ in range(micro_batches):
            x, labels = random.normal(size=(8, 5)).astype("float32"), random.integers(0, 3, 8)
            made.append(MicroBatch({"x": x, "labels": labels}, 8))
        if step in damaged:
            made[-1].arrays["x"][3, 2] = np.nan
        yield made


def train(
    trainer: GraphTrainer, steps: int, micro_batches: int, damaged: Sequence[int], *, leave_out: bool
) -> list[StepOutcome]:
    """Every step as the training loop drives it; damaged ones are omitted, or left for the trainer to skip."""
    outcomes: list[StepOutcome] = []
    updates = 0
    for step, given in enumerate(batches(steps, micro_batches, damaged)):
        if step in damaged and leave_out:
            continue
        rate = 1e-3 * (1 - step / steps)
        outcome = trainer.step(
            given, learning_rate=rate, update=updates + 1, seeds=[1] * micro_batches, control_values=[0.0]
        )
        updates += outcome.skipped is None
        outcomes.append(outcome)
    return outcomes


def state_of(trainer: GraphTrainer) -> dict[str, Array]:
    return {name: buffer.read() for name, buffer in trainer.state().items()}


def padding(index: FlatIndex, flat: Array) -> Array:
    """The values between the tensors."""
    free = np.ones(flat.size, bool)
    for entry in index:
        free[entry.offset : entry.end] = False
    return flat[free]


@pytest.mark.rotates
@pytest.mark.parametrize("kernels", ["auto", "onnxruntime"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer["name"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_with_damaged_samples_is_the_run_without_their_updates(
    model: Path, optimizer: dict[str, Any], accumulation: int, kernels: str
) -> None:
    steps, damaged = 1000, [0, *np.random.default_rng(2).choice(1000, 10, replace=False), 500, 501]
    if (accumulation, optimizer["name"]) != (1, "adamw"):
        steps, damaged = 60, [0, 7, 8, 30]
    changes = {
        "train__optimizer": optimizer,
        "train__gradient_accumulation": accumulation,
        "train__clip_norm": 1.0,
        "resources__kernels": kernels,
    }
    skipping, sparing = trainer_of(model, **changes), trainer_of(model, **changes)
    outcomes = train(skipping, steps, accumulation, damaged, leave_out=False)
    expected = train(sparing, steps, accumulation, damaged, leave_out=True)
    assert [step for step, outcome in enumerate(outcomes) if outcome.skipped] == sorted(set(map(int, damaged)))
    followed = [(outcome.loss, outcome.grad_norm) for outcome in outcomes if outcome.skipped is None]
    assert followed == [(outcome.loss, outcome.grad_norm) for outcome in expected]
    for name, flat in state_of(sparing).items():
        assert np.array_equal(state_of(skipping)[name], flat), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer["name"])
def test_padding_is_zero_behind_every_step(model: Path, optimizer: dict[str, Any]) -> None:
    trainer = trainer_of(model, train__optimizer=optimizer, train__gradient_accumulation=2)
    for last in (4, 5):
        train(trainer, 5, 2, [4] if last == 5 else [], leave_out=False)
        for name, flat in state_of(trainer).items():
            assert not padding(trainer.index, flat).any(), name
