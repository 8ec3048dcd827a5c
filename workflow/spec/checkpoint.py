"""The run file's `checkpoint` section: when the state is saved, where, and what is kept."""

from __future__ import annotations

from ortflow.workflow.spec.base import NonNegativeFloat, Positive, PositiveFloat, Section, Text


class Keep(Section):
    """Which checkpoints are kept."""

    newest: Positive = 2
    """Number of newest checkpoints."""
    every: Positive | None = None
    """Also keep checkpoints whose step is a multiple of this, permanently."""


class Best(Section):
    """The checkpoint with the best result of an evaluation."""

    metric: Text = "loss"
    """Result to compare: loss, or a metric of `model.metrics` by its name in the results."""


class CheckpointSection(Section):
    """When the state is saved, where, and what is kept."""

    directory: Text = "checkpoints"
    """Folder, relative to the run directory. An absolute path is for this run alone."""
    every_steps: Positive | None = None
    """Period in steps. Without a period, a run saves every 300 seconds, or less often, so that saves are in progress
    for at most 5% of the time."""
    every_seconds: PositiveFloat | None = None
    """Period in seconds; whichever comes first if both are given."""
    keep: Keep = Keep.model_construct()
    """Which checkpoints are kept."""
    best: Best | None = None
    """Save after each evaluation with a better result than all before, keep that checkpoint until there is a better
    one, and export its model beside the last one, as NAME.best.onnx."""
    asynchronous: bool = True
    """Write in the background."""
    wait_for_room: NonNegativeFloat = 600.0
    """Seconds that a run waits for space on a full disk, at its end and between attempts, before it fails."""
    exact: bool = True
    """Refuse to resume if results would not be bit-identical: other kernels, another ONNX Runtime or training graph."""
