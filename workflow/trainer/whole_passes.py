"""Passes over micro-batches with one training graph that reads all parameters from memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.buffers import UpdateMemory
from ortflow.workflow.trainer.context import StepContext
from ortflow.workflow.trainer.graph_binder import GraphBinder, feed_training
from ortflow.workflow.trainer.parameters import Parameters
from ortflow.workflow.trainer.passes import OneGraph
from ortflow.workflow.trainer.work import Repetition, TrainGraph, Work

if TYPE_CHECKING:
    from ortflow.workflow.comm.nccl import NcclCommunicator


class WholePasses:
    """See the module. `parts`: the ranks over which queued collectives in the graph run; None if it has none."""

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
        self.open(context.sessions)

    def open(self, sessions: Sessions) -> None:
        """See the protocol."""
        context, work, scratch = self._context, self._work, self._memory.scratch
        self.graph: TrainGraph = work.open_train(sessions, self._parameters)
        self.first = self._bound(self.graph.session, sessions)
        self._further = self.first
        if scratch is not None:
            self._further = self._binder.training(self.graph.session, sessions.device, scratch, self.graph.rounded)
        self._further.prefetches = work.queued
        evaluation = self._binder.evaluation(sessions.open(context.graphs.eval), sessions.device)
        self.graphs = OneGraph(context, self.first, evaluation, prefetches=work.queued)
        over = self._parts if self.graph.overlap is None else context.replicas
        repetition = Repetition(sessions, work.obstacle(sessions, self.first, [context.graphs.train]), over)
        self._first_run = work.repeat("a micro-batch", self._run_first, repetition)
        self._further_run = work.repeat("another micro-batch", self._run_further, repetition)

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

    def bind_checked(self, sessions: Sessions, model: Path | bytes) -> Binding:
        """A training graph for the check of the gradient."""
        return self._bound(sessions.open(model), self._context.sessions)

    def close(self) -> None:
        """See the protocol."""
        operators = self._context.sessions.operators
        if self.graph.overlap is not None and operators is not None:
            operators.on_bucket = operators.on_rows = None
            self.graph.overlap.close()
        del self.graph, self.graphs, self.first, self._further, self._first_run, self._further_run
