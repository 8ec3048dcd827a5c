"""Passes under ZeRO's stage 3 (Rajbhandari et al. 2020): parameters are sharded, too.

Like moments and gradients, the trained parameters are stored only as each rank's `layout.share`. Graphs fetch the
parameters of a layer when they need them (`graph/shards`), and ONNX Runtime frees them after their last reader. They
reduce gradients to the ranks that update them. An exchange does so: `shard_exchange` on CPUs, `queued_exchange` on
GPUs, where a pass is captured as a CUDA graph with all that it exchanges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import onnx

from ortflow.workflow.device.shard import Shard
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.shards.fetch_nodes import TOKEN
from ortflow.workflow.graph.shards.graphs import sharded
from ortflow.workflow.graph.shards.program import Program
from ortflow.workflow.kernels.library import remedy
from ortflow.workflow.memory import ITEM
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.context import StepContext
from ortflow.workflow.trainer.graph_binder import GraphBinder, feed_training
from ortflow.workflow.trainer.passes import OneGraph
from ortflow.workflow.trainer.shard_exchange import Exchange
from ortflow.workflow.trainer.sharded_parameters import ShardedParameters
from ortflow.workflow.trainer.work import Repetition, Work

if TYPE_CHECKING:
    from ortflow.workflow.trainer.queued_exchange import QueuedExchange

TRAINING, EVALUATION = 0, 1
"""Channels. Those above are of graphs that the check of the gradient opens."""


class Exchanging(Protocol):
    """Fetches parameters for graphs, and reduces their gradients."""

    @property
    def buffered(self) -> int:
        """Elements of its own buffers."""

    def add(self, channel: int, program: Program, *, accumulated: bool = False) -> None:
        """Serve the graph of a channel. `accumulated`: its gradients may be added to those of other micro-batches."""

    def drop(self, channel: int) -> None:
        """Serve it no more."""

    def begin_pass(self, *, fresh: bool) -> None:
        """Called before a pass. `fresh` gradients replace those of the share; others are added to them."""

    def end_pass(self) -> None:
        """Queue later work behind everything that was exchanged."""

    def watch(self) -> None:
        """Limit the time that what is queued may take."""

    def take_part(self, channel: int) -> None:
        """Exchange what the graph of a channel would, without a batch."""


class ShardPasses:
    """See the module. Gradients are in this rank's share, `gradients`."""

    def __init__(
        self, context: StepContext, parameters: ShardedParameters, gradients: Shard, binder: GraphBinder, work: Work
    ) -> None:
        self._context, self._binder, self._buffers, self._work = context, binder, binder.buffers, work
        self._gradients, self._shard = gradients, parameters.shard
        self._token = context.device.allocate(2, np.float32)
        self._channels: set[int] = set()
        self.exchange = self._new_exchange()
        form = context.sessions.fastest_form_of(context.train_graph)
        self._plan = sharded(
            context.train_graph, form, context.graphs.eval, context.index, on_gpus=work.queued
        )  # fmt: skip
        if context.replicas.rank == 0:
            self._note()
        self.open(context.sessions)

    def _new_exchange(self) -> Exchanging:
        context, shares = self._context, (self._shard, self._gradients)
        if not self._work.queued:
            assert context.sessions.library is not None
            return Exchange(context.replicas, context.index, *shares, context.sessions.library)
        return queued_exchange(context, *shares)

    def _note(self) -> None:
        context, plan = self._context, self._plan
        trained, ranks = context.index.trained, context.replicas.world_size
        counts = {entry.name: entry.tensor.count for entry in context.index}
        sizes = [sum(counts[name] for name in layer.tensors) for layer in plan.layers]
        context.report.note(
            f"ZeRO stage 3: parameters and gradients 2 x {ITEM} bytes x {trained} / {ranks} ranks = "
            f"{2 * ITEM * trained / ranks:.0f} bytes, {2 * self._shard.part.count * ITEM} allocated on rank 0; "
            f"{len(sizes)} layers are fetched, of {ITEM * min(sizes)} to {ITEM * max(sizes)} bytes"
        )

    def open(self, sessions: Sessions) -> None:
        """See `Passes`."""
        context, work = self._context, self._work
        self.first = self._bound(self._opened(sessions, *self._plan.train, TRAINING), sessions)
        session = self._opened(sessions, *self._plan.eval, EVALUATION)
        evaluation = self._with_token(self._binder.evaluation(session, sessions.device))
        self.graphs = OneGraph(context, self.first, evaluation, prefetches=work.queued)
        obstacle = work.obstacle(sessions, self.first, [context.graphs.train])
        repetition = Repetition(sessions, obstacle, context.replicas)
        self._first_run = work.repeat("a micro-batch", partial(self._pass_once, fresh=True), repetition)
        self._further_run = work.repeat("another micro-batch", partial(self._pass_once, fresh=False), repetition)

    def _opened(
        self, sessions: Sessions, model: onnx.ModelProto, program: Program, channel: int
    ) -> onnxruntime.InferenceSession:
        accumulated = channel == TRAINING and self._context.spec.accumulation > 1
        self.exchange.add(channel, program, accumulated=accumulated)
        self._channels.add(channel)
        return sessions.open(model.SerializeToString())

    def _bound(self, session: onnxruntime.InferenceSession, sessions: Sessions) -> Binding:
        return self._with_token(self._binder.training(session, sessions.device, self._buffers.gradients))

    def _with_token(self, binding: Binding) -> Binding:
        binding.read_from(TOKEN, self._token.slice(0, 1), (1,))
        for name in binding.outputs:
            if name.startswith(TOKEN):
                binding.write_to(name, self._token.slice(1, 2), (1,))
        return binding

    def _pass_once(self, *, fresh: bool) -> None:
        self._buffers.begin_micro_batch()
        self.exchange.begin_pass(fresh=fresh)
        self.first.run()
        self._buffers.add_loss()
        self.exchange.end_pass()

    def run(self, batches: Sequence[MicroBatch], seeds: Sequence[int]) -> None:
        """See `Passes`. A rank without samples takes part in what the others exchange."""
        for number, (batch, seed) in enumerate(zip(batches, seeds, strict=True)):
            passes = self._further_run if number else self._first_run
            if batch.count:
                feed_training(self.first, batch, seed)
                passes.run(self.first.fed)
                self.exchange.watch()
            else:
                passes.skip()
                self.exchange.begin_pass(fresh=number == 0)
                self._take_part(TRAINING)

    def _take_part(self, channel: int) -> None:
        self.exchange.take_part(channel)
        self.exchange.end_pass()
        self.exchange.watch()

    def refresh(self) -> None:
        """Parameters are rounded when they are fetched."""

    def updated(self) -> None:
        """See `Passes`."""

    def in_step(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield batches. While another rank has one and this one has none, takes part in the fetches."""
        remaining, active_ranks = iter(batches), self._context.device.allocate(1, np.float64)
        while True:
            batch = next(remaining, None)
            active_ranks.fill(batch is not None)
            self._context.replicas.all_reduce(active_ranks)
            if not active_ranks.read()[0]:
                return
            if batch is None or not batch.count:
                self._take_part(EVALUATION)
            if batch is not None:
                yield batch

    def bind_checked(self, sessions: Sessions, model: Path | bytes) -> Binding:
        """A training graph for the check of the gradient, with exchanges on a channel of its own."""
        channel = max(self._channels) + 1
        loaded = onnx.load(model) if isinstance(model, Path) else onnx.load_from_string(model)
        exchanging, program = self._plan.another(loaded, channel)
        return self._bound(self._opened(sessions, exchanging, program, channel), sessions)

    def forget_checked(self) -> None:
        """Serve the graphs of the check no more."""
        for channel in self._channels - {TRAINING, EVALUATION}:
            self._forget(channel)

    def _forget(self, channel: int) -> None:
        self._channels.discard(channel)
        self.exchange.drop(channel)

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Around a run of a graph of the check."""
        self.exchange.begin_pass(fresh=True)
        yield
        self.exchange.end_pass()
        self.exchange.watch()

    def close(self) -> None:
        """See `Passes`."""
        for channel in [*self._channels]:
            self._forget(channel)
        del self.exchange, self.graphs, self.first, self._first_run, self._further_run


def queued_exchange(context: StepContext, parameters: Shard, gradients: Shard) -> QueuedExchange:
    """The exchange of a GPU."""
    from ortflow.workflow.device.cuda import CudaDevice
    from ortflow.workflow.trainer.queued_exchange import QueuedExchange

    operators, device = context.sessions.operators, context.device
    assert operators is not None
    assert isinstance(device, CudaDevice)
    return QueuedExchange(context.replicas, device, operators, context.index, parameters, gradients)


def check_kernels(sessions: Sessions, *, queued: bool) -> None:
    """Raise UserError if this machine lacks the kernels that exchange."""
    if (sessions.operators if queued else sessions.library) is None:
        kernels, does = ("kernels of ortflow's for GPUs", "gather") if queued else ("kernels of ortflow's", "fetch")
        raise UserError(
            f"is 3, and this machine has no {kernels}, which {does} parameters",
            where="parallel.zero",
            fix=f"{remedy()}, or set it to 2",
        )
