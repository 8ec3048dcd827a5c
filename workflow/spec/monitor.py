"""The run file's `monitor` section: how a run is reported."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ortflow.workflow.spec.base import NonNegativeFloat, Positive, Section, Text, no_items
from ortflow.workflow.spec.notify import Notify
from ortflow.workflow.spec.profile import ProfileWindow
from ortflow.workflow.spec.sinks import Sink


class MonitorSection(Section):
    """How the run is reported."""

    every_steps: Positive = 10
    """Steps between lines of progress in the log."""
    tensorboard: bool = True
    """Write TensorBoard scalars."""
    tensorboard_directory: Text = "tensorboard"
    """Folder, relative to the run directory."""
    sinks: list[Sink] = Field(default_factory=no_items)
    """Services that get the metrics, too: prometheus, wandb, mlflow, opentelemetry. They cost no step, and a failure of
    one is a warning."""
    sinks_seconds: NonNegativeFloat = 10.0
    """Seconds that a run waits at its end for its sinks to send the last steps."""
    runtime_log: Literal["verbose", "info", "warning", "error", "fatal"] = "error"
    """ONNX Runtime's log level."""
    notify: list[Notify] = Field(default_factory=no_items)
    """Messages to commands or web addresses when the run has finished, failed or hung, and so on."""
    profile: ProfileWindow | None = None
    """Record where the time of some steps goes, operator by operator; other steps cost nothing. `ortflow profile` shows
    it."""
