"""Passes over micro-batches with one training graph that reads all parameters from memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from ortflow.workflow.graph.types import LOSS_SCALE
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.buffers import UpdateMemory
from ortflow.workflow.trainer.context import StepContext
from ortflow.workflow.trainer.graph_binder import GraphBinder, feed, feed_ahead, feed_training
from ortflow.workflow.trainer.metric_sums import GATHERED, MetricSums, metric_shapes
from ortflow.workflow.trainer.parameters import Parameters
from ortflow.workflow.trainer.work import TrainGraph, Work

if TYPE_CHECKING:
    from ortflow.workflow.comm.nccl import NcclCommunicator

Scores = dict[str, list[npt.NDArray[np.float32]]]
"""Outputs of an evaluation that are gathered, by name, in the order of the batches."""


class Passes(Protocol):
    """The forward and backward passes of a step, and the forward pass of an evaluation."""

    prefetches: bool
    """Whether `prefetch` copies batches."""
    metrics: MetricSums

    def open(self, sessions: Sessions) -> None:
        """Open the graphs, or open them again with other sessions. Collective if passes are."""

    def run(self, batches: Sequence[MicroBatch], seeds: Sequence[int]) -> None:
        """Compute gradients, running statistics and the summed loss of this rank's micro-batches."""

    def updated(self) -> None:
        """Called behind each update, where this rank has queued everything that others wait for."""

    def prefetch(self, batches: Sequence[MicroBatch]) -> None:
        """See `Trainer.prefetch`."""

    def evaluate(self, batch: MicroBatch, seed: int, scores: Scores) -> npt.NDArray[np.float32]:
        """The metrics' sums over a micro-batch; adds what is gathered to `scores`."""

    def end_evaluation(self) -> None:
        """Called after the last batch of an evaluation."""

    def scales_loss(self) -> bool:
        """Whether the gradients of a micro-batch are multiplied by a loss scale. Collective if passes are."""

    def shapes_fed(self) -> dict[str, tuple[int, ...]] | None:
        """Shapes of the last micro-batch by input of the training graph; None if there are several graphs."""

    def compared(self, sessions: Sessions) -> list[Path]:
        """The graphs of the forward pass as these sessions open them."""

    def close(self) -> None:
        """Release what only steps need."""


class WholePasses:
    """See the module.

    Parameters
    ----------
    context, parameters, memory
        Of this rank.
    binder, work
        Bind and repeat the graphs.
    parts
        The ranks over which queued collectives in the graph run; None if it has none.
    """

    def __init__(
        self,
        context: StepContext,
        parameters: Parameters,
        memory: UpdateMemory,
        binder: GraphBinder,
        work: Work,
        parts: NcclCommunicator | None = None,
    ) -> None:
        self._context, self._parameters, self._memory = context, parameters, memory
        self._binder, self._buffers, self._work, self._parts = binder, binder.buffers, work, parts
        self.prefetches = work.queued
        self.open(context.sessions)

    def open(self, sessions: Sessions) -> None:
        """See the protocol."""
        context, work, scratch = self._context, self._work, self._memory.scratch
        self.graph: TrainGraph = work.open_train(sessions, self._parameters)
        self.first = self._bound(self.graph.session, sessions)
        self._further = self.first
        if scratch is not None:
            self._further = self._binder.training(self.graph.session, sessions.device, scratch, self.graph.rounded)
        self.first.prefetches = self._further.prefetches = work.queued
        self._evaluation = self._binder.evaluation(sessions.open(context.graphs.eval), sessions.device)
        self.metrics = MetricSums(context.device, metric_shapes(self._evaluation))
        self.metrics.tie(self._evaluation)
        over = self._parts if self.graph.overlap is None else context.replicas
        obstacle = work.obstacle(sessions, self.first, [context.graphs.train])
        self._first_run = work.passes(sessions, "a micro-batch", self._run_first, obstacle, over)
        self._further_run = work.passes(sessions, "another micro-batch", self._run_further, obstacle, over)

    def _bound(self, session: onnxruntime.InferenceSession, sessions: Sessions) -> Binding:
        return self._binder.training(session, sessions.device, self._buffers.gradients, self.graph.rounded)

    def _run_first(self) -> None:
        self._buffers.begin_micro_batch()
        if (overlap := self.graph.overlap) is not None:
            overlap.begin()
        self.first.run()
        self._buffers.add_loss()
        if overlap is not None:
            overlap.finish()

    def _run_further(self) -> None:
        self._buffers.begin_micro_batch()
        self._further.run()
        assert self._memory.scratch is not None
        self._buffers.gradients.add(self._memory.scratch)
        self._buffers.add_loss()

    def run(self, batches: Sequence[MicroBatch], seeds: Sequence[int]) -> None:
        """See the protocol. The first gradients replace those in the buffer; others are added to them."""
        fresh = True
        for batch, seed in zip(batches, seeds, strict=True):
            if batch.count:
                self._run_one(batch, seed, fresh=fresh)
                fresh = False
        if fresh:
            self._without_samples()

    def _run_one(self, batch: MicroBatch, seed: int, *, fresh: bool) -> None:
        binding, passes = (self.first, self._first_run) if fresh else (self._further, self._further_run)
        feed_training(binding, batch, seed)
        self.refresh()
        passes.run(binding.fed)
        if self._parts is not None:
            self._parts.watch()

    def refresh(self) -> None:
        """Round parameters again that something but the update has written."""
        if self.graph.rounded is not None:
            self.graph.rounded.refresh()

    def _without_samples(self) -> None:
        """Take part in a step as a rank that has no samples."""
        self._buffers.gradients.fill(0)
        self._first_run.skip()
        if self.graph.overlap is not None:
            self.graph.overlap.finish()

    def updated(self) -> None:
        """See the protocol."""
        if self.graph.rounded is not None:
            self.graph.rounded.updated()

    def prefetch(self, batches: Sequence[MicroBatch]) -> None:
        """See the protocol."""
        feed_ahead(self.first, batches)

    def evaluate(self, batch: MicroBatch, seed: int, scores: Scores) -> npt.NDArray[np.float32]:
        """See the protocol."""
        return evaluated_by(self._evaluation, self.metrics, batch, seed, scores)

    def end_evaluation(self) -> None:
        """See the protocol."""

    def scales_loss(self) -> bool:
        """See the protocol."""
        return LOSS_SCALE in self.first.inputs

    def shapes_fed(self) -> dict[str, tuple[int, ...]] | None:
        """See the protocol."""
        return {name: shape for name, _, shape in self.first.fed}

    def compared(self, sessions: Sessions) -> list[Path]:
        """See the protocol."""
        return [sessions.fastest_form_of(self._context.graphs.train)]

    def bind_checked(self, sessions: Sessions, model: Path | bytes) -> Binding:
        """A training graph for the check of the gradient."""
        return self._bound(sessions.open(model), self._context.sessions)

    def close(self) -> None:
        """See the protocol."""
        operators = self._context.sessions.operators
        if self.graph.overlap is not None and operators is not None:
            operators.on_bucket = operators.on_rows = None
            self.graph.overlap.close()
        del self.graph, self.first, self._further, self._first_run, self._further_run


def evaluated_by(
    evaluation: Binding, metrics: MetricSums, batch: MicroBatch, seed: int, scores: Scores
) -> npt.NDArray[np.float32]:
    """Run an evaluation graph; see `Passes.evaluate`."""
    feed(evaluation, batch, seed)
    names = sorted(name for name in evaluation.outputs if name.endswith(GATHERED))
    for name, value in evaluation.run_for(names).items():
        scores.setdefault(name, []).append(np.array(value.numpy()))
    evaluation.forget(names)
    return metrics.read()
