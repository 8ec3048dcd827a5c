"""The causes that a run's wall time is divided into, in the words of Google's goodput library."""

from __future__ import annotations

from enum import Enum


class Cause(str, Enum):
    """What a second of a run went into. The order is that of tables and bars."""

    STEP = "step"
    DATA_WAIT = "data_wait"
    EVALUATION = "evaluation"
    SAVE = "save"
    RESTORE = "restore"
    COMPILE = "compile"
    START = "start"
    EXPORT = "export"
    LOST = "lost"
    RECOVERY = "recovery"
    QUEUE = "queue"
    OTHER = "other"

    @property
    def label(self) -> str:
        """The name in tables."""
        return LABELS[self]


LABELS = {
    Cause.STEP: "productive step",
    Cause.DATA_WAIT: "data wait",
    Cause.EVALUATION: "evaluation",
    Cause.SAVE: "checkpoint save",
    Cause.RESTORE: "checkpoint restore",
    Cause.COMPILE: "compile",
    Cause.START: "start",
    Cause.EXPORT: "export",
    Cause.LOST: "lost work",
    Cause.RECOVERY: "recovery",
    Cause.QUEUE: "queue wait",
    Cause.OTHER: "other",
}
MEANINGS = {
    Cause.STEP: "steps that were done and not repeated",
    Cause.DATA_WAIT: "within steps: the rank that waited longest for its samples",
    Cause.EVALUATION: "evaluations",
    Cause.SAVE: "training waited for a checkpoint",
    Cause.RESTORE: "a checkpoint was read",
    Cause.COMPILE: "graphs were built",
    Cause.START: "processes, sessions and data were prepared",
    Cause.EXPORT: "the result was written",
    Cause.LOST: "steps after the last checkpoint, which a later attempt repeated",
    Cause.RECOVERY: "from the last sign of life to the start of the next attempt",
    Cause.QUEUE: "from the submission to the start of the first attempt",
    Cause.OTHER: "not explained by any record",
}
