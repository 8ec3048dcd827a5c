"""The learning rate as a function of the step; pure arithmetic, called by the trainer before each step."""

from __future__ import annotations

import math

from typing_extensions import assert_never

from ortflow.workflow.spec.train import Schedule


def learning_rate(schedule: Schedule, peak: float, step: int, total_steps: int | None) -> float:
    """Learning rate of `step`, counted from 1.

    Warm-up (Goyal et al. 2017, section 2.2) of w steps: peak step / w, so step w has the peak. Afterwards, with
    p = (step - w) / (total_steps - w), at most 1, and f the final fraction, peak times:

    - constant: 1
    - linear: f + (1 - f) (1 - p)
    - polynomial: f + (1 - f) (1 - p)^power (as in DeepLab and BERT)
    - cosine: f + (1 - f) (1 + cos(pi p)) / 2 (Loshchilov & Hutter 2017, equation 5)

    The last step, and any step beyond it, has the rate f peak. A warm-up longer than `total_steps` ends before the
    peak.

    Parameters
    ----------
    schedule
        `train.schedule` of the run file.
    peak
        Learning rate at the peak.
    step
        Number of the step, from 1.
    total_steps
        Steps of the run; may be None for a constant schedule.
    """
    warmup = schedule.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if schedule.name == "constant":
        return peak
    if total_steps is None:
        raise ValueError(f"a {schedule.name} schedule needs the number of steps")
    left = max(total_steps - step, 0) / max(total_steps - warmup, 1)
    if schedule.name == "linear":
        shape = left
    elif schedule.name == "polynomial":
        shape = left**schedule.power
    elif schedule.name == "cosine":
        shape = (1 + math.cos(math.pi * (1 - left))) / 2
    else:
        assert_never(schedule.name)
    return peak * (schedule.final_fraction + (1 - schedule.final_fraction) * shape)
