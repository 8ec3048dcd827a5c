"""Averages, frozen groups and rules that read matrices, for tests of the trainer on CPUs and on real and fake GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
from graph_build_models import Array

from ortflow.workflow.optim.average import average_rate
from ortflow.workflow.run.pace import pace_of_steps
from ortflow.workflow.spec.averages import Ema
from ortflow.workflow.trainer import MicroBatch, StepOutcome
from ortflow.workflow.trainer.step import GraphTrainer

RULES: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1},
    "sgd": {"name": "sgd", "lr": 1e-2, "momentum": 0.9},
    "muon": {"name": "muon", "lr": 0.02, "adamw": ["u"], "weight_decay": 0.1},
    "adafactor": {"name": "adafactor", "lr": 0.05},
}
AVERAGE = {"train__average": {"name": "ema", "decay": 0.8, "start": "3 steps"}}
FROZEN = {
    "train__groups": [
        {"match": ["w", "scale"], "frozen_until": "4 steps"}, {"match": ["u"], "frozen_until": "6 steps"},
    ]
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "average": AVERAGE, "frozen": FROZEN, "both": {**AVERAGE, **FROZEN}}
SECTION = Ema.model_validate(AVERAGE["train__average"])


class Going:
    """A run's position, and the steps of a trainer from there."""

    def __init__(self, trainer: GraphTrainer) -> None:
        self.trainer, self.step, self.updates, self.averaged = trainer, 0, 0, 0

    def go(self, steps: list[list[MicroBatch]], *, ahead: bool = False) -> list[StepOutcome]:
        """Every step; with `ahead` the passes of the next one begin while the host waits."""
        trainer, outcomes = self.trainer, list[StepOutcome]()

        def begin() -> None:
            for batches in steps[len(outcomes) + 1 : len(outcomes) + 2]:
                trainer.begin(batches, seeds=[1] * len(batches), control_values=[])

        trainer.before_wait = begin if ahead and trainer.begins else lambda: None
        for batches in steps:
            pace = pace_of_steps(self.step + 1)
            rate, counts = average_rate(SECTION, pace, self.averaged)
            trainer.at(pace, rate)
            outcome = trainer.step(
                batches, learning_rate=1e-2 / (1 + self.step), update=self.updates + 1, seeds=[1] * len(batches),
                control_values=[],
            )  # fmt: skip
            self.step += 1
            self.updates += outcome.skipped is None
            self.averaged += counts and outcome.skipped is None
            outcomes.append(outcome)
        return outcomes

    def take_over(self, other: Going) -> None:
        """Continue from another's state, as from a checkpoint."""
        for name, buffer in self.trainer.state().items():
            buffer.write(other.trainer.state()[name].read())  # type: ignore[union-attr]
        self.trainer.restore(other.trainer.numbers())
        self.step, self.updates, self.averaged = other.step, other.updates, other.averaged


def same(one: dict[str, Array], other: dict[str, Array]) -> None:
    """Check that two states have the same bits."""
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name)


def alike(one: list[StepOutcome], other: list[StepOutcome]) -> None:
    """Check that two lists of steps have the same bits."""
    np.testing.assert_array_equal([(o.loss, o.grad_norm) for o in one], [(o.loss, o.grad_norm) for o in other])
    assert [o.skipped for o in one] == [o.skipped for o in other]
