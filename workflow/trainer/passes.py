"""Passes of a step: their protocol, and what those with one training graph have in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ortflow.workflow.graph.types import LOSS_SCALE
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.context import StepContext
from ortflow.workflow.trainer.graph_binder import feed, feed_ahead
from ortflow.workflow.trainer.metric_sums import GATHERED, MetricSums, metric_shapes

Scores = dict[str, list[npt.NDArray[np.float32]]]
"""Outputs of an evaluation that are gathered, by name, in the order of the batches."""


class PassGraphs(Protocol):
    """The graphs of passes: an evaluation with them, and what is known of them."""

    prefetches: bool
    """Whether `prefetch` copies batches."""
    metrics: MetricSums

    def prefetch(self, batches: Sequence[MicroBatch]) -> None:
        """See `Prefetching`."""

    def evaluate(self, batch: MicroBatch, seed: int, scores: Scores) -> npt.NDArray[np.float32]:
        """The metrics' sums over a micro-batch; adds what is gathered to `scores`."""

    def end_evaluation(self) -> None:
        """Called after the last batch of an evaluation."""
        return

    def scales_loss(self) -> bool:
        """Whether the gradients of a micro-batch are multiplied by a loss scale. Collective if passes are."""

    def shapes_fed(self) -> dict[str, tuple[int, ...]] | None:
        """Shapes of the last micro-batch by input of the training graph; None if there are several graphs."""

    def compared(self, sessions: Sessions) -> list[Path]:
        """The graphs of the forward pass as these sessions open them."""


class Passes(Protocol):
    """The forward and backward passes of a step, and the forward pass of an evaluation."""

    @property
    def graphs(self) -> PassGraphs:
        """Other ones after `open`."""

    def open(self, sessions: Sessions) -> None:
        """Open the graphs, or open them again with other sessions. Collective if passes are."""

    def run(self, batches: Sequence[MicroBatch], seeds: Sequence[int]) -> None:
        """Compute gradients, running statistics and the summed loss of this rank's micro-batches."""

    def updated(self) -> None:
        """Called behind each update, where this rank has queued everything that others wait for."""

    def close(self) -> None:
        """Release what only steps need."""


class OneGraph(PassGraphs):
    """One training graph and one evaluation graph, bound to this rank's buffers."""

    def __init__(self, context: StepContext, training: Binding, evaluation: Binding, *, prefetches: bool) -> None:
        self._context, self._training, self._evaluation = context, training, evaluation
        self.prefetches = training.prefetches = prefetches
        self.metrics = MetricSums(context.device, metric_shapes(evaluation))
        self.metrics.tie(evaluation)

    def prefetch(self, batches: Sequence[MicroBatch]) -> None:
        """See the protocol."""
        feed_ahead(self._training, batches)

    def evaluate(self, batch: MicroBatch, seed: int, scores: Scores) -> npt.NDArray[np.float32]:
        """See the protocol."""
        evaluation = self._evaluation
        feed(evaluation, batch, seed)
        names = sorted(name for name in evaluation.outputs if name.endswith(GATHERED))
        for name, value in evaluation.run_for(names).items():
            scores.setdefault(name, []).append(np.array(value.numpy()))
        evaluation.forget(names)
        return self.metrics.read()

    def scales_loss(self) -> bool:
        """See the protocol."""
        return LOSS_SCALE in self._training.inputs

    def shapes_fed(self) -> dict[str, tuple[int, ...]] | None:
        """See the protocol."""
        return {name: shape for name, _, shape in self._training.fed}

    def compared(self, sessions: Sessions) -> list[Path]:
        """See the protocol."""
        return [sessions.fastest_form_of(self._context.graphs.train)]
