"""The learning rate as a function of the step; pure arithmetic, called by the trainer before each step."""

from __future__ import annotations

import math
from fractions import Fraction

from typing_extensions import assert_never

from ortflow.workflow.run.durations import Duration, parse_duration
from ortflow.workflow.run.pace import Pace, pace_of_steps
from ortflow.workflow.spec.schedules import Schedule, SchedulePiece


def learning_rate(
    schedule: Schedule,
    peak: float,
    step: int,
    total_steps: int | None,
    *,
    pace: Pace | None = None,
    reductions: int = 0,
) -> float:
    """Learning rate of `step`, counted from 1.

    Warm-up (Goyal et al. 2017, section 2.2) of w steps: peak step / w, so step w has the peak. Afterwards, with
    p = (step - w) / (total_steps - w), at most 1, f the final fraction, t = step - 1 - w, the number of steps since the
    warm-up, and e the steps of `every`, peak times:

    - constant: 1
    - linear: f + (1 - f) (1 - p)
    - polynomial: f + (1 - f) (1 - p)^power (as in DeepLab and BERT)
    - cosine: f + (1 - f) (1 + cos(pi p)) / 2 (Loshchilov & Hutter 2017, equation 5)
    - step: gamma^floor(t / e)
    - multi_step: gamma^n, n the number of milestones that have passed
    - exponential: gamma^(t / e)
    - inverse_sqrt: sqrt(w / step) (Vaswani et al. 2017, section 5.3)
    - cosine_restarts: f + (1 - f) (1 + cos(pi c)) / 2, c the share of its cycle that has passed; the first cycle
      lasts e, each further one `cycle_factor` times as long as the one before it
    - one_cycle: without a warm-up, from the start fraction s at step 1 to 1 at step r = rise total_steps, and from
      there to f at the last step, each by half a cosine (Smith & Topin 2018; torch.optim's OneCycleLR with two phases)
    - warmup_stable_decay: 1 until the last d steps, then f + (1 - f) (total_steps - step) / d
    - reduce_on_plateau: max(f, gamma^reductions)

    The last step of linear, polynomial, cosine, one_cycle and warmup_stable_decay, and any step beyond it, has the rate
    f peak. A warm-up longer than `total_steps` ends before the peak.

    Parameters
    ----------
    schedule
        `train.schedule` of the run file.
    peak
        Learning rate at the peak.
    step
        Number of the step, from 1.
    total_steps
        Steps of the run; may be None for schedules without an end.
    pace
        Where the run is in other units than steps; None if no duration has another unit.
    reductions
        How often reduce_on_plateau has decayed the rate.
    """
    pace = pace or pace_of_steps(step)
    total = None if total_steps is None else Fraction(total_steps)
    if schedule.pieces:
        return _of_pieces(schedule, peak, total, pace)
    return _rate(schedule, peak, total, pace, reductions)


def _of_pieces(schedule: Schedule, peak: float, total: Fraction | None, pace: Pace) -> float:
    """The rate of the piece in which the step is; behind the last, that of its last step."""
    *_, last = schedule.pieces
    for piece in schedule.pieces:
        length = None if piece.lasts is None else parse_duration(piece.lasts)
        if length is not None and pace.passed(length) and piece is not last:
            total = None if total is None else total - pace.steps(length)
            pace = pace.since(length)
            continue
        end = total if length is None else pace.steps(length)
        return _rate(piece, peak, end, pace, 0)
    raise AssertionError("a schedule with pieces has a last one")


def _warmup(schedule: SchedulePiece) -> Duration | None:
    if schedule.warmup is not None:
        return parse_duration(schedule.warmup)
    steps = schedule.warmup_steps if isinstance(schedule, Schedule) else 0
    return Duration(Fraction(steps), "steps") if steps else None


def _rate(schedule: SchedulePiece, peak: float, total: Fraction | None, pace: Pace, reductions: int) -> float:
    duration, peak = _warmup(schedule), peak * schedule.scale
    if duration is None:
        return peak * _factor(schedule, total, Fraction(0), pace, pace, reductions)
    warmup = pace.steps(duration)
    if pace.step <= warmup:
        return peak * float(pace.step) / float(warmup)
    return peak * _factor(schedule, total, warmup, pace, pace.since(duration), reductions)


def _factor(
    schedule: SchedulePiece, total: Fraction | None, warmup: Fraction, pace: Pace, after: Pace, reductions: int
) -> float:
    """The rate as a multiple of the peak, behind `warmup` steps, from which `after` counts."""
    step = pace.step
    name, final = schedule.name, schedule.final_fraction
    if name == "constant":
        return 1.0
    if name == "step":
        return float(schedule.gamma ** math.floor(after.periods(_every(schedule))))
    if name == "multi_step":
        passed = sum(after.passed(parse_duration(milestone)) for milestone in schedule.milestones)
        return float(schedule.gamma**passed)
    if name == "exponential":
        return float(schedule.gamma ** float(after.periods(_every(schedule))))
    if name == "inverse_sqrt":
        return math.sqrt(warmup / step)
    if name == "cosine_restarts":
        return _between(1.0, final, _share_of_cycle(after.periods(_every(schedule)), schedule.cycle_factor))
    if name == "reduce_on_plateau":
        return float(max(final, schedule.gamma**reductions))
    if total is None:
        raise ValueError(f"a {name} schedule needs the number of steps")
    if name == "one_cycle":
        return _one_cycle(schedule, float(total), float(step))
    if name == "warmup_stable_decay":
        assert schedule.decay is not None
        decay = pace.length(parse_duration(schedule.decay))
        return final + (1 - final) * float(min(max(total - step, Fraction(0)) / decay, Fraction(1)))
    remaining = float(max(total - step, Fraction(0)) / max(total - warmup, Fraction(1)))
    if name == "linear":
        shape = remaining
    elif name == "polynomial":
        shape = remaining**schedule.power
    elif name == "cosine":
        shape = (1 + math.cos(math.pi * (1 - remaining))) / 2
    else:
        assert_never(name)
    return final + (1 - final) * shape


def _every(schedule: SchedulePiece) -> Duration:
    assert schedule.every is not None
    return parse_duration(schedule.every)


def _between(start: float, end: float, share: float) -> float:
    """Half a cosine from start to end."""
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def _share_of_cycle(periods: Fraction, factor: int) -> float:
    """The share of its cycle that has passed, from the number of first cycles that have."""
    length = Fraction(1)
    if factor == 1:
        return float(periods % 1)
    while periods >= length:
        periods -= length
        length *= factor
    return float(periods / length)


def _one_cycle(schedule: SchedulePiece, total: float, step: float) -> float:
    top = schedule.rise * total
    if step <= top:
        return _between(schedule.start_fraction, 1.0, (step - 1) / max(top - 1, 1e-9))
    return _between(1.0, schedule.final_fraction, min((step - top) / max(total - top, 1e-9), 1.0))
