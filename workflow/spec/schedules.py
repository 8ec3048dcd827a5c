"""The run file's `train.schedule`: the learning rate over the steps, and what each shape reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from ortflow.workflow.errors import UserError
from ortflow.workflow.run.durations import parse_duration
from ortflow.workflow.spec.base import Count, NonNegativeFloat, Positive, PositiveFloat, Section, Text, no_items

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Shape = Literal[
    "constant", "linear", "polynomial", "cosine", "step", "multi_step", "exponential", "inverse_sqrt",
    "cosine_restarts", "one_cycle", "warmup_stable_decay", "reduce_on_plateau",
]  # fmt: skip


class SchedulePiece(Section):
    """A schedule of a part of the run, whose steps count from the part's beginning."""

    name: Shape = "constant"
    """Shape after the warm-up."""
    lasts: Text | None = None
    """Duration, such as `500 steps`, `2 epochs`, `100_000 samples` or `2e9 tokens`; the last piece lasts to the end of
    the run if it has none."""
    scale: PositiveFloat = 1.0
    """Factor of `train.optimizer.lr` at the piece's peak."""
    warmup: Text | None = None
    """Duration over which the learning rate rises from 0."""
    final_fraction: Share = 0.0
    """Learning rate at the end, as a fraction of the peak; of reduce_on_plateau, the smallest."""
    power: PositiveFloat = 2.0
    """Exponent of the polynomial."""
    every: Text | None = None
    """Duration between two decays (step), of a decay by `gamma` (exponential), of the first cycle (cosine_restarts)."""
    milestones: list[Text] = Field(default_factory=no_items)
    """Times of the decays (multi_step), in increasing order."""
    gamma: PositiveFloat = 0.1
    """Factor of a decay (step, multi_step, exponential, reduce_on_plateau)."""
    cycle_factor: Positive = 1
    """Length of a cycle as a multiple of that of the cycle before it (cosine_restarts)."""
    rise: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.3
    """Share of the steps over which the rate rises (one_cycle)."""
    start_fraction: Share = 0.04
    """Learning rate at the first step, as a fraction of the peak (one_cycle)."""
    decay: Text | None = None
    """Duration of the linear decay at the end (warmup_stable_decay)."""


class Schedule(SchedulePiece):
    """The learning rate over the steps: a warm-up, then `name`, or a list of `pieces`."""

    warmup_steps: Count = 0
    """Steps over which the learning rate rises from 0; or give `warmup`."""
    pieces: list[SchedulePiece] = Field(default_factory=no_items)
    """Schedules one after another, in place of the other keys."""
    metric: Text = "loss"
    """Evaluation metric that reduce_on_plateau compares."""
    patience: Count = 10
    """Evaluations without improvement that are tolerated before a decay (reduce_on_plateau)."""
    cooldown: Count = 0
    """Evaluations after a decay that do not count (reduce_on_plateau)."""
    min_delta: NonNegativeFloat = 0.0
    """Smallest change that counts as an improvement (reduce_on_plateau)."""


@dataclass(frozen=True)
class ShapeKeys:
    """The keys that a shape reads besides `name`, `lasts`, `scale`."""

    reads: tuple[str, ...]
    needs: tuple[str, ...] = ()
    """Keys without which it has no meaning."""


_PLAIN = ("warmup", "warmup_steps")
SHAPES: dict[str, ShapeKeys] = {
    "constant": ShapeKeys((*_PLAIN, "final_fraction", "power")),
    "linear": ShapeKeys((*_PLAIN, "final_fraction", "power")),
    "polynomial": ShapeKeys((*_PLAIN, "final_fraction", "power")),
    "cosine": ShapeKeys((*_PLAIN, "final_fraction", "power")),
    "step": ShapeKeys((*_PLAIN, "every", "gamma"), ("every",)),
    "multi_step": ShapeKeys((*_PLAIN, "milestones", "gamma"), ("milestones",)),
    "exponential": ShapeKeys((*_PLAIN, "every", "gamma"), ("every",)),
    "inverse_sqrt": ShapeKeys(_PLAIN),
    "cosine_restarts": ShapeKeys((*_PLAIN, "every", "cycle_factor", "final_fraction"), ("every",)),
    "one_cycle": ShapeKeys(("rise", "start_fraction", "final_fraction")),
    "warmup_stable_decay": ShapeKeys((*_PLAIN, "decay", "final_fraction"), ("decay",)),
    "reduce_on_plateau": ShapeKeys((*_PLAIN, "gamma", "metric", "patience", "cooldown", "min_delta", "final_fraction")),
}
"""Shape -> keys. The first four accept each other's, as they always have."""


def durations(schedule: SchedulePiece) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Every duration of a schedule with its place below it."""
    for key in ("lasts", "warmup", "every", "decay"):
        if (text := getattr(schedule, key)) is not None:
            yield (key,), text
    for place, text in enumerate(schedule.milestones):
        yield ("milestones", place), text
    for place, piece in enumerate(schedule.pieces if isinstance(schedule, Schedule) else ()):
        for path, text in durations(piece):
            yield ("pieces", place, *path), text


def units(schedule: Schedule) -> set[str]:
    """The units of a schedule's durations; those that cannot be read are left out."""
    unit_names = set[str]()
    for _, text in durations(schedule):
        try:
            unit_names.add(parse_duration(text).unit)
        except UserError:
            continue
    return unit_names
