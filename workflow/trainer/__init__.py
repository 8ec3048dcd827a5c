"""The seam to what step 4 runs. `graph` trains ONNX graphs; engine, checkpointing and monitoring know only this.

A trainer holds its state in named flat buffers that are equal on all ranks between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ortflow.workflow.device import Buffer
from ortflow.workflow.layout import FlatIndex

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

GRADIENT_GRAPH = "gradient.onnx"
"""Beside the other graphs: scales and clips the flat gradients."""


@dataclass(frozen=True)
class MicroBatch:
    """Arrays by graph input, and how many of their rows are real samples."""

    arrays: Mapping[str, npt.NDArray[Any]]
    count: int


@dataclass(frozen=True)
class StepOutcome:
    """What one step over all ranks gave; equal on all ranks."""

    loss: float
    grad_norm: float
    samples: int
    votes: npt.NDArray[np.float32]
    """Sums over the ranks of what each put in."""
    skipped: str | None
    """Why the parameters were left as they are; None if they were updated."""


@dataclass(frozen=True)
class EvaluationOutcome:
    """Metrics over the whole evaluation set; equal on all ranks."""

    metrics: Mapping[str, float]
    samples: int
    votes: npt.NDArray[np.float64]


class Trainer(Protocol):
    """What the training loop drives."""

    index: FlatIndex
    """Where each tensor lies in the parameters buffer."""
    processor: str
    """What computes, as its maker calls it."""
    before_update: Callable[[], None]
    """Called in every step when the gradients are ready, before anything that a checkpoint holds changes."""

    def state(self) -> Mapping[str, Buffer]:
        """The flat buffers a checkpoint holds, by name."""

    def step(
        self,
        batches: Sequence[MicroBatch],
        *,
        learning_rate: float,
        update: int,
        seeds: Sequence[int],
        votes: Sequence[float],
    ) -> StepOutcome:
        """One optimizer step over this rank's micro-batches.

        `update` counts parameter updates from 1; `seeds` are one a micro-batch; `votes` are summed over the ranks
        with the gradients.
        """

    def gradient_key(self) -> str:
        """A hash of everything that decides on the gradient: while it stays, one check is enough."""

    def check_gradient(self, batch: MicroBatch, seed: int) -> str | None:
        """Check on a real micro-batch, on this rank alone, that the gradient is the loss's; what was compared.

        None where the micro-batch has no finite loss. Parameters are as before afterwards. Raises UserError where the
        gradient is wrong, naming tensors and node.
        """

    def evaluate(self, batches: Iterable[MicroBatch], votes: Callable[[], Sequence[float]]) -> EvaluationOutcome:
        """Metrics of the evaluation graph over all ranks' batches.

        `votes` is asked when the batches are through; the answers are summed over the ranks with the metrics.
        """

    def memory(self) -> Mapping[str, int]:
        """Bytes of what this rank keeps for training, by part, as `ortflow.workflow.memory.buffers` names them."""

    def give_memory_back(self) -> None:
        """Between two steps: return to the system what only other work than steps has needed."""

    def end_training(self) -> None:
        """No step follows: give back the memory that only steps need. `state` holds the parameters alone then."""

    def export(
        self, path: Path, samples: Sequence[MicroBatch], tolerance: float | None, *, trial: bool = False
    ) -> float | None:
        """Write the inference model, or with `trial` only try to.

        Returns its largest difference to the trained graph on the samples; None where it could not be compared.
        Raises UserError where the model is unusable, or where the difference is larger than the tolerance; then the
        file of an earlier export stays. Without a tolerance, the model's own rounding counts.
        """
