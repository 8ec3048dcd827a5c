"""How much of the new weights an update takes into their average, and the nodes that do so.

EMA: a = d a + (1 - d) w. SWA behind n weights: a = (n a + w) / (n + 1). Both are a = (1 - r) a + r w, as in
torch.optim.swa_utils, which starts from the first weights that it gets and not from those before the first step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from ortflow.workflow.optim.builder import Builder
from ortflow.workflow.optim.segments import Segment
from ortflow.workflow.run.durations import Duration, parse_duration
from ortflow.workflow.run.pace import Pace
from ortflow.workflow.spec.averages import BUFFER, Ema, Swa

RATE = "average_rate"
"""Name of the input r, fp32 [1]."""


def average_rate(section: Ema | Swa, pace: Pace, averaged: int) -> tuple[float, bool]:
    """r of the next step, and whether it is one more of the averaged weights, of which there are `averaged` so far."""
    start = Duration(Fraction(0), "steps") if section.start is None else parse_duration(section.start)
    every, after = parse_duration(section.every), pace.next()
    if not after.passed(start):
        return 1.0, False
    # Weights behind a step count: those behind the step that ends at `start` are the first, unless it is the beginning.
    updates, before = (math.floor(step.since(start).periods(every)) for step in (after, pace))
    if updates == before:
        return 0.0, False
    if isinstance(section, Swa):
        return 1 / (averaged + 1), True
    decay = min(section.decay, (1 + averaged) / (10 + averaged)) if section.warmup else section.decay
    return 1 - decay, True


def update(build: Builder, segments: Sequence[Segment]) -> None:
    """Append the new average of each segment, behind its new parameters.

    With r = 0 and r = 1 the result is exactly the average and exactly the parameters.
    """
    if not any(segment.averaged for segment in segments):
        return
    rate = build.input(RATE, 1)
    share = build("Sub", build.constant([1.0], "float32"), rate)
    for i, segment in enumerate(segments):
        average = build.input(f"{BUFFER}.{i}", segment.count)
        old = build("Mul", average, share)
        build("Add", old, build("Mul", f"parameters.{i}.out", rate), output=f"{average}.out")
        build.output(f"{average}.out", segment.count)
