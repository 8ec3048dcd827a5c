"""The graphs of a run, bound to flat buffers.

One buffer holds all parameters followed by the running statistics, one all gradients. In the same memory, the gradients
are followed by the running statistics and a short tail of sums, so that one all-reduce per step carries everything that
the ranks must agree on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ortflow.workflow.comm import Communicator
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.shard import Shard, Sliced
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.types import LOSS_SUM, LOSS_WEIGHT, SEED, VALID, GraphSet, synced_of
from ortflow.workflow.kernels.graph import with_kernels
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.optim.average import RATE
from ortflow.workflow.optim.graph import optimizer_graph
from ortflow.workflow.optim.segments import Segment, by_thaw, segments_of
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.averages import BUFFER
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import MicroBatch, Report, Trainer
from ortflow.workflow.trainer.thaw import Thaw

SILENT = Report()
ADDED = ("_sum", "_weight", "_sums")
"""Ends of the outputs that are added up over batches and ranks."""
GATHERED = ("_scores", "_truths")
"""Ends of the outputs that are gathered."""
TAIL = 64
"""Elements of the tail: loss, weight, samples, then the control values."""


def metric_shapes(evaluation: Binding) -> dict[str, tuple[int, ...]]:
    """The outputs of an evaluation graph that are added up, in order, and their shapes: scalars or vectors.

    Raises UserError if the shape of a user's own output is not fixed.
    """
    shapes = {}
    for name in sorted(evaluation.shapes):
        if not name.startswith("ortflow.") or not name.endswith(ADDED):
            continue
        shape = evaluation.shapes[name]
        shapes[name] = tuple(length for length in shape if isinstance(length, int))
        if len(shapes[name]) < len(shape):
            fix = "give it a fixed shape"
            raise UserError(f"output {name!r} has no fixed shape", where="model.graphs.eval", fix=fix)
    return shapes


class BoundGraphs(Trainer):
    """The buffers and the graphs; `GraphTrainer` runs them. Without `training` only the parameters."""

    def __init__(
        self,
        graphs: GraphSet,
        spec: TrainerRunSpec,
        sessions: Sessions,
        communicator: Communicator,
        report: Report = SILENT,
        *,
        training: bool = True,
    ) -> None:
        self.index: FlatIndex = graphs.index
        self.before_update: Callable[[], None] = lambda: None
        self._graphs, self._spec, self._sessions, self._comm = graphs, spec, sessions, communicator
        self._report = report
        self._allocate_parameters()
        self._moments: Mapping[str, Buffer | Shard] = {}
        if training:
            self._open_for_training()
        elif spec.train.average is not None:
            self._moments = {BUFFER: self._sessions.device.allocate(self.index.trained, np.float32)}

    def _allocate_parameters(self) -> None:
        """The whole flat buffer, and this rank's part of it: all of it."""
        self._parameters = self._sessions.device.allocate(self.index.size, np.float32)
        self._here: Sliced = self._parameters

    def _open_for_training(self) -> None:
        device = self._sessions.device
        state_start, state_end = self.index.span("state")
        self._state_span = (state_start, state_end)
        held, states = self._gradients_held, state_end - state_start
        # Gradients, running statistics and tail in one piece: one collective call per step.
        self._sync = device.allocate(held + states + TAIL, np.float32)
        self._gradients = self._sync.slice(0, held)
        self._statistics = self._sync.slice(held, held + states)
        self._tail = self._sync.slice(held + states, held + states + TAIL)
        # The running statistics that a micro-batch starts from: the state itself changes only with an update.
        self._running = device.allocate(states, np.float32)
        self._sums = device.allocate(2, np.float32)
        self._updates: list[Callable[[], None]] = []
        self._thaw = Thaw(self._spec.train)
        self._average_rate = device.allocate(1, np.float32)
        self._allocate_for_update()

        self._open_passes()
        self._metric_sums = device.allocate(self._metric_count, np.float32)
        self._totals = device.allocate(self._metric_count + TAIL, np.float64)
        self._tie_metrics()
        self._bind_update()

    def _open_passes(self) -> None:
        """The graphs of training and evaluation, bound to the buffers, and the names of the metrics' sums."""
        training = self._open_train()
        self._first = self._bind_training(training, self._gradients)
        self._further = self._bind_training(training, self._scratch) if self._scratch else self._first
        self._evaluation = Binding(self._open_eval(), self._sessions.device)
        self._evaluation.read_tensors(self.index, self._here)
        self._metric_outputs = metric_shapes(self._evaluation)

    @property
    def _metric_count(self) -> int:
        """Elements of all metrics' sums."""
        return sum(map(math.prod, self._metric_outputs.values()))

    def _tie_metrics(self) -> None:
        self._write_metrics_to(self._evaluation)

    def _write_metrics_to(self, binding: Binding) -> None:
        """Tie the metrics' sums that a graph computes."""
        start = 0
        for name, shape in self._metric_outputs.items():
            end = start + math.prod(shape)
            if name in binding.outputs:
                binding.write_to(name, self._metric_sums.slice(start, end), shape)
            start = end

    @property
    def _gradients_held(self) -> int:
        """Elements of the gradients that a training graph writes."""
        return self.index.trained

    def _open_train(self) -> onnxruntime.InferenceSession:
        return self._sessions.open_fastest(self._train_path)

    @property
    def _train_path(self) -> Path:
        """The training graph of a step; that of the check has the statistics of one rank."""
        return synced_of(self._graphs.train) if self._spec.synced_ranks else self._graphs.train

    def _open_eval(self) -> onnxruntime.InferenceSession:
        return self._sessions.open(self._graphs.eval)

    def _allocate_for_update(self) -> None:
        """The moments, and the buffer for the gradients of further micro-batches."""
        device, spec, trained = self._sessions.device, self._spec, self.index.trained
        self._moments = {name: device.allocate(trained, np.float32) for name in spec.train.buffers}
        self._scratch = device.allocate(trained, np.float32) if spec.accumulation > 1 else None

    def _bind_training(self, session: onnxruntime.InferenceSession, gradients: Buffer) -> Binding:
        binding = Binding(session, self._sessions.device)
        binding.read_tensors(self.index, self._here)
        for entry in self.index:
            gradient, new = f"{entry.name}_grad", f"{entry.name}_new"
            if gradient in binding.outputs:
                binding.write_to(gradient, gradients.slice(entry.offset, entry.end), entry.tensor.shape)
            if new in binding.outputs:
                start = entry.offset - self._state_span[0]
                end = start + entry.tensor.count
                binding.read_from(entry.name, self._running.slice(start, end), entry.tensor.shape)
                binding.write_to(new, self._statistics.slice(start, end), entry.tensor.shape)
        for place, name in enumerate((LOSS_SUM, LOSS_WEIGHT)):
            if name in binding.outputs:
                binding.write_to(name, self._sums.slice(place, place + 1), ())
        return binding

    def _bind_scaling(self) -> Binding:
        device, count = self._sessions.device, self._gradients.count
        self._scale = device.allocate(2, np.float32)
        self._norm = device.allocate(1, np.float32)
        scaling = Binding(self._sessions.open_fastest(self._graphs.gradient), device)
        scaling.read_from("gradients", self._gradients, (count,))
        scaling.read_from("inverse_weight", self._scale.slice(0, 1), (1,))
        scaling.read_from("max_norm", self._scale.slice(1, 2), (1,))
        scaling.write_to("gradients.out", self._gradients, (count,))
        scaling.write_to("norm", self._norm, (1,))
        return scaling

    def _open_update(self, cuts: Sequence[Segment]) -> onnxruntime.InferenceSession:
        """The update of some segments, for ranks that make its graph themselves."""
        own = bool(self._sessions.kernels)
        model = optimizer_graph(self._spec.train.optimizer, cuts, kernels=own)
        return self._sessions.open(compose(with_kernels(model) if own else model).SerializeToString())

    def _thawing(
        self, group: int | None, cuts: Sequence[Segment], run: Callable[[], None], gradients: Sliced
    ) -> Callable[[], None]:
        """The update of a group's segments, which is skipped while the group is frozen."""
        if group is None:
            return run
        self._thaw.hold(group, [gradients.slice(cut.start, cut.stop) for cut in cuts])
        return self._thaw.skipping(group, run, self._update_number)

    def _bind_update(self) -> None:
        device = self._sessions.device
        self._scaling = self._bind_scaling()
        self._rate = device.allocate(1, np.float32)
        self._update_number = device.allocate(1, np.int64)
        cuts = segments_of(self._spec.train, self.index)
        if not self._thaw:
            update = self._bind_pieces(self._sessions.open_fastest(self._graphs.optimizer), cuts, self._gradients)
            self._updates = [self._repeated("the update", update.run)]
            return
        for group, some in by_thaw(cuts).items():
            update = self._bind_pieces(self._open_update(some), some, self._gradients)
            self._updates.append(self._thawing(group, some, update.run, self._gradients))

    def _repeated(self, name: str, run: Callable[[], None]) -> Callable[[], None]:
        """Work that every step repeats on the same memory; `name` is its name in the log."""
        return run

    def _bind_pieces(
        self,
        session: onnxruntime.InferenceSession,
        cuts: Sequence[Segment],
        gradients: Buffer | Shard,
        moments_: Mapping[str, Buffer | Shard] | None = None,
    ) -> Binding:
        """An update's graph, bound to pieces of the flat buffers. It may leave some unread or unwritten.

        `moments_` are the trainer's unless they are given.
        """
        update = Binding(session, self._sessions.device)
        update.read_from("learning_rate", self._rate, (1,))
        update.read_from("step", self._update_number, (1,))
        if self._spec.train.average is not None:
            update.read_from(RATE, self._average_rate, (1,))
        flat: dict[str, Sliced] = {"parameters": self._here, "gradients": gradients, **(moments_ or self._moments)}
        for number, piece in enumerate(cuts):
            for name, buffer in flat.items():
                part, value = buffer.slice(piece.start, piece.stop), f"{name}.{number}"
                update.read_from(value, part, (piece.count,))
                if f"{value}.out" in update.outputs:
                    update.write_to(f"{value}.out", part, (piece.count,))
        return update

    def _feed(self, binding: Binding, batch: MicroBatch, seed: int) -> None:
        for name, array in batch.arrays.items():
            if name in binding.inputs:
                binding.feed(name, array)
        if VALID in binding.inputs:
            binding.feed(VALID, np.array([batch.count], np.int64))
        if SEED in binding.inputs:
            binding.feed(SEED, np.array([seed], np.int64))
