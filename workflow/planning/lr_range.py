"""The learning-rate range test: a short run in which the rate grows from step to step. Called by `ortflow find-lr`.

One process with one rank trains in memory, on batches of the run's global size, and writes nothing. Method: L. N.
Smith, Cyclical Learning Rates for Training Neural Networks, 2017, section 3.3; the suggestion is where the smoothed
loss falls most steeply over the logarithm of the rate.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import pstdev
from typing import TYPE_CHECKING

from ortflow.workflow.errors import UserError

if TYPE_CHECKING:
    from ortflow.workflow.spec.run import TrainerRunSpec

SMOOTHING = 0.9
"""Weight of the earlier losses in their moving average."""
DIVERGED = 4.0
"""The test ends when the smoothed loss has risen by this multiple of its fall, or of its least value."""
FIRST = 5
"""Steps before which the test does not end, and no rate is suggested: the moving average has just begun."""

NOISE = 2.0
"""A fall of at most this many standard deviations of a step's loss is not a descent: of 400 flat curves of 20 to 300
steps, fewer than 4 fall further by chance."""


@dataclass(frozen=True)
class Point:
    """A step of the test."""

    lr: float
    loss: float
    smoothed: float


def rates(low: float, high: float, steps: int) -> list[float]:
    """Learning rates at equal ratios."""
    return [low * (high / low) ** (step / (steps - 1)) for step in range(steps)]


def points(losses: Iterator[tuple[float, float]]) -> list[Point]:
    """The points of (rate, loss) until the loss diverges. Pure."""
    curve: list[Point] = []
    average, least = 0.0, math.inf
    for step, (lr, loss) in enumerate(losses, 1):
        if not math.isfinite(loss):
            break
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        smoothed = average / (1 - SMOOTHING**step)
        curve.append(Point(lr, loss, smoothed))
        least = min(least, smoothed)
        if step > FIRST and smoothed > max(DIVERGED * least, least + DIVERGED * (curve[0].smoothed - least)) > least:
            break
    return curve


def suggestion(curve: Sequence[Point]) -> float:
    """The rate at which the smoothed loss falls most steeply.

    Raises UserError if it does not fall, or not by more than it varies between steps.
    """
    end = min(range(len(curve)), key=lambda place: curve[place].smoothed, default=0)
    slopes = {
        place: (curve[place + 1].smoothed - curve[place - 1].smoothed)
        / math.log(curve[place + 1].lr / curve[place - 1].lr)
        for place in range(FIRST, min(end, len(curve) - 1))
    }
    steepest = min(slopes, key=lambda place: slopes[place], default=None)
    if steepest is None or slopes[steepest] >= 0:
        raise UserError(
            f"the loss does not fall at any learning rate of {len(curve)} steps",
            fix="widen the range (--from, --to), or take more steps (--steps)",
        )
    falls, noise = _fall(curve, end)
    if falls <= NOISE * noise:
        raise UserError(
            f"the loss falls by {falls:.3g} at most, which is no more than it varies between steps ({noise:.3g})",
            fix="widen the range (--from, --to), take more steps (--steps), or raise train.global_batch",
        )
    return curve[steepest].lr


def _fall(curve: Sequence[Point], end: int) -> tuple[float, float]:
    """How far the smoothed loss falls to its least value, and the standard deviation of a step's loss around it.

    The latter is that of differences between steps, divided by the root of 2, so that the fall has little part in it.
    """
    falls = max(point.smoothed for point in curve[FIRST : end + 1]) - curve[end].smoothed
    losses = [point.loss for point in curve[: end + 1]]
    return falls, pstdev([b - a for a, b in pairwise(losses)]) / math.sqrt(2)


def range_test(spec: TrainerRunSpec, low: float, high: float, steps: int) -> list[Point]:
    """Train with growing rates; `spec` has absolute paths. Raises UserError or Faults as the run would."""
    from ortflow.workflow.comm.solo import SoloCommunicator
    from ortflow.workflow.device.cpu import CpuDevice
    from ortflow.workflow.ranks import Place
    from ortflow.workflow.run.progress import Progress
    from ortflow.workflow.run.rundir import RunDir, scratch_folder
    from ortflow.workflow.steps.configure import prepare
    from ortflow.workflow.steps.run_plan import Plan
    from ortflow.workflow.steps.shard import Stream
    from ortflow.workflow.steps.trainers import builder_of
    from ortflow.workflow.trainer import Report

    spec = _alone(spec)
    with scratch_folder("ortflow-find-lr-") as folder:
        run_dir = RunDir(folder)
        builder = builder_of(spec, run_dir, Report())
        prepare(builder, run_dir, spec, Report())
        stream = Stream(
            spec, Plan.load(run_dir.plan), *builder.inputs(), Place(0, 1, 0, 1, "none", "localhost"), Progress()
        )
        trainer = builder.open(SoloCommunicator(), CpuDevice(), os.cpu_count() or 1, ())

        def losses() -> Iterator[tuple[float, float]]:
            for number, lr in enumerate(rates(low, high, steps)):
                batches = stream.next().micro_batches
                seeds = [spec.seed + number * len(batches) + place for place in range(len(batches))]
                outcome = trainer.step(
                    batches, learning_rate=lr, update=number + 1, seeds=seeds, control_values=()
                )  # fmt: skip
                yield lr, math.nan if outcome.skipped else outcome.loss

        try:
            return points(losses())
        finally:
            stream.close()


def _alone(spec: TrainerRunSpec) -> TrainerRunSpec:
    """The run with one rank on the CPU and the same global batch."""
    values = spec.model_dump()
    accumulation = max(1, spec.global_batch // spec.data.micro_batch)
    values["run_dir"] = None
    for key in ("parallel", "resources"):
        values.pop(key)
    values["train"] |= {
        "precision": "fp32", "offload": "none", "sync_batch_norm": False, "global_batch": None,
        "gradient_accumulation": accumulation, "check_gradient": False,
    }  # fmt: skip
    values["export"] |= {"enabled": False}
    return type(spec).model_validate(values)
