"""The progress of a run: the part of a checkpoint besides the flat buffers. Plain numbers, equal on all ranks."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field, fields
from typing import Any

REQUIRED = ("step", "updates", "epoch", "sample")
"""Without these, trained parameters would start again at the first sample or the first bias correction."""


@dataclass
class Progress:
    """Counters of a run; `epoch` and `sample` are the global position of the next sample."""

    step: int = 0
    """Completed steps, including skipped ones."""
    updates: int = 0
    """Completed parameter updates: the count of Adam's bias correction."""
    epoch: int = 0
    sample: int = 0
    """Samples of the epoch that were used, over all ranks."""
    skipped_in_a_row: int = 0
    skipped: int = 0
    evaluated_step: int = 0
    """Last step after which an evaluation was completed."""
    best_metric: float | None = None
    best_step: int | None = None
    """The step after which `best_metric` was measured; None if an earlier version saved it."""
    best_of: str | None = None
    """What `best_metric` was measured on; None if an earlier version saved it."""
    best_checkpoint: float | None = None
    """The best result of `checkpoint.best`."""
    best_checkpoint_step: int | None = None
    """The step after which it was measured."""
    best_checkpoint_of: str | None = None
    """What it was measured on."""
    evaluations_without_improvement: int = 0
    stopped_early: bool = False
    plateau_best: float | None = None
    """The best metric of the schedule reduce_on_plateau."""
    plateau_of: str | None = None
    """What `plateau_best` was measured on."""
    plateau_evaluations: int = 0
    """Evaluations without improvement since the last one or the last decay."""
    plateau_cooldown: int = 0
    """Evaluations that do not count yet."""
    plateau_reductions: int = 0
    """How often the learning rate was decayed."""
    averaged: int = 0
    """How many weights are in the average of `train.average`."""
    trainer: dict[str, float] = field(default_factory=dict)
    """The trainer's own numbers."""

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable data for a manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Progress:
        """Read data that `to_json` returned; unknown fields are ignored, missing ones take defaults.

        Raises ValueError with the reason if it is invalid.
        """
        missing = [name for name in REQUIRED if name not in record]
        if missing:
            raise ValueError(f"lacks progress.{missing[0]}")
        types = {entry.name: str(entry.type) for entry in fields(cls)}
        values = {name: value for name, value in record.items() if name in types}
        for name, value in values.items():
            if not _is(types[name], value):
                raise ValueError(f"has {value!r} for progress.{name}")
        return cls(**values)


def _is(declared: str, value: Any) -> bool:
    """Whether a value has the type of a field: a count, a flag, or an optional number or text."""
    if declared == "int":
        # For isinstance, True is an int.
        return type(value) is int and value >= 0
    if declared == "bool":
        return type(value) is bool
    if declared == "str | None":
        return value is None or type(value) is str
    if declared == "dict[str, float]":
        return type(value) is dict and all(type(number) in (int, float) for number in value.values())
    return value is None or type(value) in (int, float)


def dropout_seed(seed: int, step: int, place: int) -> int:
    """The seed for one run of the training graph, on the micro-batch at `place` in the step's global batch.

    Depends only on the position, so that a resumed run draws the same masks, also with another number of ranks.
    """
    return _hash(f"{seed}/{step}/{place}/0")


def evaluation_seed(seed: int, place: int) -> int:
    """The seed for one run of the evaluation graph, on the micro-batch at `place` in the evaluation set.

    Equal in each evaluation, so that differences between evaluations come only from the parameters.
    """
    return _hash(f"{seed}/evaluation/{place}")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") & 0x7FFFFFFF
