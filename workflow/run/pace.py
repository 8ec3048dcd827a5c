"""Where a run is, in each unit of a duration, and how far a step takes it. Pure.

Durations are converted at the position and the pace of the current step. With an unchanged number of samples per step,
each conversion gives the same number of steps throughout the run; after a change, what has passed stays passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from ortflow.workflow.run.durations import Duration, Unit


@dataclass(frozen=True)
class Pace:
    """Of the next step."""

    before: Mapping[Unit, Fraction]
    """What has passed before the step, from the origin of this pace."""
    per_step: Mapping[Unit, Fraction]
    """What a step takes."""

    @property
    def step(self) -> Fraction:
        """Number of the step from the origin, which is 1 for the first."""
        return self.before["steps"] + 1

    def steps(self, duration: Duration) -> Fraction:
        """The number of steps, from the origin, after which a duration has passed.

        Raises KeyError if the unit is not known.
        """
        rest = duration.amount - self.before[duration.unit]
        return self.before["steps"] + rest / self.per_step[duration.unit]

    def next(self) -> Pace:
        """The pace after the step."""
        return Pace({unit: self.before[unit] + per_step for unit, per_step in self.per_step.items()}, self.per_step)

    def length(self, duration: Duration) -> Fraction:
        """The number of steps that a duration takes."""
        return duration.amount / self.per_step[duration.unit]

    def periods(self, duration: Duration) -> Fraction:
        """How many times a duration has passed before the step."""
        return self.before[duration.unit] / duration.amount

    def passed(self, duration: Duration) -> bool:
        """Whether a duration has passed before the step."""
        return self.before[duration.unit] >= duration.amount

    def since(self, duration: Duration) -> Pace:
        """The pace with its origin at the end of a duration."""
        since = self.before["steps"] - self.steps(duration)
        before = {unit: since * per_step for unit, per_step in self.per_step.items()}
        before[duration.unit] = self.before[duration.unit] - duration.amount
        return Pace(before, self.per_step)


def pace_of_steps(step: int) -> Pace:
    """The pace at a step, from 1, where only steps are counted."""
    return Pace({"steps": Fraction(step - 1)}, {"steps": Fraction(1)})


def pace_of_run(
    *,
    step: int,
    epoch: int,
    sample: int,
    samples: int,
    steps_per_epoch: int,
    global_batch: int,
    tokens_per_sample: int | None,
) -> Pace:
    """The pace of a run after `step` steps, at `sample` of `epoch`.

    Parameters
    ----------
    samples
        Of the training set.
    tokens_per_sample
        None if samples have no fixed number of tokens: then tokens are not counted.
    """
    used = min(samples, steps_per_epoch * global_batch)
    within = min(Fraction(sample, steps_per_epoch * global_batch), Fraction(1))
    before: dict[Unit, Fraction] = {
        "steps": Fraction(step),
        "epochs": epoch + within,
        "samples": Fraction(epoch * used + sample),
    }
    per_step: dict[Unit, Fraction] = {
        "steps": Fraction(1),
        "epochs": Fraction(1, steps_per_epoch),
        "samples": Fraction(global_batch),
    }
    if tokens_per_sample is not None:
        before["tokens"] = before["samples"] * tokens_per_sample
        per_step["tokens"] = per_step["samples"] * tokens_per_sample
    return Pace(before, per_step)
