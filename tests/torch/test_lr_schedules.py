"""Schedules step by step against torch.optim.lr_scheduler."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
import torch
from torch.optim import lr_scheduler as theirs

from ortflow.workflow.optim.schedule import learning_rate
from ortflow.workflow.run.progress import Progress
from ortflow.workflow.spec.schedules import Schedule, SchedulePiece
from ortflow.workflow.steps.plateau import judge_plateau

STEPS, LR = 60, 0.3
Make = Callable[[torch.optim.Optimizer], Any]

CASES: dict[str, tuple[Schedule, Make]] = {
    "step": (Schedule(name="step", every="7 steps", gamma=0.5), lambda o: theirs.StepLR(o, 7, 0.5)),
    "multi_step": (
        Schedule(name="multi_step", milestones=["10 steps", "15 steps", "40 steps"]),
        lambda o: theirs.MultiStepLR(o, [10, 15, 40]),
    ),
    "exponential": (
        Schedule(name="exponential", every="1 step", gamma=0.9), lambda o: theirs.ExponentialLR(o, 0.9)
    ),
    "cosine_restarts": (
        Schedule(name="cosine_restarts", every="8 steps", cycle_factor=2, final_fraction=0.1),
        lambda o: theirs.CosineAnnealingWarmRestarts(o, 8, 2, eta_min=0.03),
    ),
    "cosine_restarts of one length": (
        Schedule(name="cosine_restarts", every="8 steps"), lambda o: theirs.CosineAnnealingWarmRestarts(o, 8)
    ),
    "one_cycle": (
        Schedule(name="one_cycle", final_fraction=4e-6),
        lambda o: theirs.OneCycleLR(o, LR, total_steps=STEPS, cycle_momentum=False),
    ),
    "one_cycle with all": (
        Schedule(name="one_cycle", rise=0.4, start_fraction=0.1, final_fraction=0.01),
        lambda o: theirs.OneCycleLR(
            o, LR, total_steps=STEPS, pct_start=0.4, div_factor=10, final_div_factor=10, cycle_momentum=False
        ),
    ),
    "warmup_stable_decay": (
        Schedule(name="warmup_stable_decay", warmup="10 steps", decay="20 steps", final_fraction=0.2),
        lambda o: theirs.LambdaLR(
            o, lambda t: (t + 1) / 10 if t < 10 else 1 if t < 40 else 1 - 0.8 * (t + 1 - 40) / 20
        ),
    ),
    "inverse_sqrt": (
        Schedule(name="inverse_sqrt", warmup="10 steps"),
        lambda o: theirs.LambdaLR(o, lambda t: 10**0.5 * min((t + 1) ** -0.5, (t + 1) * 10**-1.5)),
    ),
    "step after a warm-up": (
        Schedule(name="step", warmup_steps=5, every="7 steps", gamma=0.5),
        lambda o: theirs.SequentialLR(
            o, [theirs.LambdaLR(o, lambda t: (t + 1) / 5), theirs.StepLR(o, 7, 0.5)], milestones=[5]
        ),
    ),
    "pieces": (
        Schedule(
            pieces=[
                SchedulePiece(name="exponential", lasts="20 steps", every="1 step", gamma=0.9),
                SchedulePiece(name="constant", lasts="10 steps", scale=0.5),
                SchedulePiece(name="step", every="7 steps", gamma=0.5),
            ]
        ),
        lambda o: theirs.SequentialLR(
            o,
            [theirs.ExponentialLR(o, 0.9), theirs.ConstantLR(o, 0.5, total_iters=100), theirs.StepLR(o, 7, 0.5)],
            milestones=[20, 30],
        ),
    ),
}  # fmt: skip


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)


@pytest.mark.parametrize("case", CASES)
def test_every_step_has_torchs_rate(case: str) -> None:
    schedule, make = CASES[case]
    stepped = optimizer()
    expected = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR passes an epoch itself
        scheduler = make(stepped)
        for _ in range(STEPS):
            expected.append(stepped.param_groups[0]["lr"])
            stepped.step()
            scheduler.step()
    found = [learning_rate(schedule, LR, step, STEPS) for step in range(1, STEPS + 1)]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(("patience", "cooldown", "min_delta"), [(2, 0, 0.0), (1, 3, 0.05), (0, 1, 0.0)])
def test_a_plateau_is_torchs_also_from_a_checkpoint(patience: int, cooldown: int, min_delta: float) -> None:
    schedule = Schedule(
        name="reduce_on_plateau", patience=patience, cooldown=cooldown, min_delta=min_delta, gamma=0.5,
        final_fraction=0.1,
    )  # fmt: skip
    stepped = optimizer()
    scheduler = theirs.ReduceLROnPlateau(
        stepped, factor=0.5, patience=patience, threshold=min_delta, threshold_mode="abs", cooldown=cooldown,
        min_lr=0.1 * LR,
    )  # fmt: skip
    progress, reductions = Progress(), 0
    for value in torch.rand(40, generator=torch.Generator().manual_seed(3)).double().tolist():
        scheduler.step(value)
        reductions += judge_plateau(schedule, progress, value, "loss on eval.arrow")
        # What a checkpoint stores is all there is.
        progress = Progress.from_json(progress.to_json())
        rate = learning_rate(schedule, LR, 5, None, reductions=progress.plateau_reductions)
        assert rate == pytest.approx(stepped.param_groups[0]["lr"], rel=1e-9)
    assert reductions == progress.plateau_reductions > 3


def test_another_evaluation_set_starts_the_count_anew() -> None:
    schedule, progress = Schedule(name="reduce_on_plateau", patience=0), Progress()
    assert not judge_plateau(schedule, progress, 1.0, "loss on a")
    assert not judge_plateau(schedule, progress, 2.0, "loss on b")
    assert judge_plateau(schedule, progress, 2.0, "loss on b")
