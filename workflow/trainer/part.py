"""Trains one rank's holding of a divided model: a part of its layers, a stage of its pipeline, or both.

Its index, buffers and graphs are this rank's own. Data parallelism and ZeRO act on them over the replicas. Quantities
of the whole model are summed over all ranks, each element and each sample once. Called by `DividedTrainer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.grid import GridRanks
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.layout import TRAINED
from ortflow.workflow.optim.segments import segments_of
from ortflow.workflow.parallel.division import Division
from ortflow.workflow.parallel.region import Region
from ortflow.workflow.parallel.ties import common, ties
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import EvaluationOutcome, MicroBatch, Report
from ortflow.workflow.trainer.bound_graphs import SILENT
from ortflow.workflow.trainer.graph import CONTROL_VALUES
from ortflow.workflow.trainer.tensor_norms import sum_over, take_over_first
from ortflow.workflow.trainer.tied import CommonWeights, TiedWeights
from ortflow.workflow.trainer.zero import ZeroTrainer


class PartTrainer(ZeroTrainer):
    """See the module.

    Parameters
    ----------
    graphs
        Of this rank's holding.
    ranks
        The communicators of this rank.
    division
        How the model is divided.
    """

    _queues = False
    """Whether work is queued on a device, so that messages pass beside it."""

    def __init__(
        self,
        graphs: GraphSet,
        spec: TrainerRunSpec,
        sessions: Sessions,
        ranks: GridRanks,
        division: Division,
        report: Report = SILENT,
    ) -> None:
        self._ranks, self.division, self.graphs = ranks, division, graphs
        self._tied = TiedWeights(ties(division, ranks.place), ranks.stages, sessions.device, later=self._queues)
        super().__init__(graphs, spec, sessions, ranks.replicas, report)
        self._common = CommonWeights(
            common(division, ranks.place), ranks.parts, self._parameters, sessions.device, self._repeated
        )

    def counts(self, name: str) -> bool:
        """Whether sums over all ranks count this rank's elements of a tensor."""
        return self.division.counts(self.division.number(self._ranks.place), name)

    def predicts(self, name: str) -> bool:
        """Whether this rank's gradient of a tensor is a term of the change of the loss.

        For a tensor that each part holds whole, the gradient is complete on each part. For one that is tied between
        stages, each stage has one term.
        """
        return name in self.division.of(self._ranks.place).regions or self._ranks.place.part == 0

    def region(self, name: str) -> Region:
        """This rank's region of a tensor."""
        return self.division.of(self._ranks.place).region(name)

    def values(self, name: str) -> npt.NDArray[np.float32]:
        """A flat copy of this rank's region of a tensor."""
        entry = self.index[name]
        return self._parameters.slice(entry.offset, entry.end).read()

    def set_values(self, name: str, values: npt.NDArray[np.float32]) -> None:
        """Replace this rank's region of a tensor."""
        entry = self.index[name]
        self._parameters.slice(entry.offset, entry.end).write(values)

    def _bind_squaring(self) -> None:
        self._squares = self._sessions.device.allocate(1, np.float64)
        spans = list(self._counted_spans())
        if not spans or not (self._spec.parallel.zero or self._ranks.place.data == 0):
            # Each replica has the whole gradient. A sum of each over its own ranks may differ in rounding, and then
            # the replicas' parameters would: only the first one's counts.
            self._square = lambda: self._squares.fill(0)
            return
        squaring = Binding(self._open(self.squares_graph(len(spans))), self._sessions.device)
        for number, (start, stop) in enumerate(spans):
            squaring.read_from(f"piece.{number}", self._own.slice(start, stop), (stop - start,))
        squaring.write_to("squares", self._squares, (1,))
        self._square = self._repeated("the norm of the gradient", squaring.run)

    def _counted_spans(self) -> Iterator[tuple[int, int]]:
        """Elements updated by this rank that count here in the sum of squares over all ranks; adjacent ones joined."""
        trained = [entry for entry in self.index if entry.tensor.group in TRAINED]
        edges = [*(entry.offset for entry in trained), self.index.trained][1:]
        start, stop = self._own.start, self._own.stop
        open_at: int | None = None
        for entry, end in zip(trained, edges, strict=True):
            counted = self.counts(entry.name)
            if counted and open_at is None:
                open_at = entry.offset
            if open_at is not None and (not counted or end == self.index.trained):
                first, last = max(open_at, start), min(end if counted else entry.offset, stop)
                if first < last:
                    yield first, last
                open_at = None

    def _sum_squares(self) -> None:
        self._square()
        self._ranks.world.all_reduce(self._squares)

    def _sum_norms(self, sums: Buffer) -> None:
        cuts = segments_of(self._spec.train, self.index)
        offsets = {entry.offset: entry.name for entry in self.index if entry.tensor.count}
        # The norm of a tensor that every part holds whole is complete; of a divided one, each part has one term.
        mine = np.array([self.predicts(offsets[cut.start]) for cut in cuts])
        sum_over(sums, np.tile(mine, sums.count // max(1, len(mine))), self._sharers, self._ranks.parts)
        take_over_first(sums, self._comm, self._ranks.parts)

    def _reduce_gradients(self) -> None:
        self._tied.sum_gradients(self._gradients)
        super()._reduce_gradients()

    def _sum_over_ranks(self) -> None:
        if self._statistics.count:
            self._comm.all_reduce(self._statistics)
        if not self._ranks.speaks:
            self._tail.slice(0, CONTROL_VALUES).fill(0)
        self._ranks.world.all_reduce(self._tail)

    def _apply(self) -> None:
        self._tied.settle()
        super()._apply()
        self._sessions.device.free_memory()
        self._tied.take_over(self._parameters)
        self._common.take_over()

    def exchange_average(self) -> None:
        """See the protocol. What several ranks hold has the same bits on all of them, as after an update."""
        self._tied.settle()
        super().exchange_average()
        if self._spec.train.average is not None:
            self._tied.take_over(self._parameters)
            self._common.take_over()

    def evaluate(
        self, batches: Iterable[MicroBatch], control_values: Callable[[], Sequence[float]]
    ) -> EvaluationOutcome:
        """See the protocol."""
        self._tied.settle()
        found = super().evaluate(self._together(batches), control_values)
        self._sessions.device.free_memory()
        return found

    def _together(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield batches until the first rank of the replica has no more. A rank that was asked to exit has none."""
        source, ended = iter(batches), HostBuffer(np.zeros(1))
        while True:
            batch = next(source, None)
            ended.fill(batch is None)
            self._ranks.replica.all_reduce(ended)
            if batch is None or ended.array[0]:
                return
            yield batch

    @property
    def _world(self) -> Communicator:
        return self._ranks.world

    @property
    def _gives_scores(self) -> bool:
        return self._ranks.speaks

    def _sum_totals(self) -> None:
        totals, metrics = self._totals.read(), self._metric_count + 1
        if not self._ranks.speaks:
            totals[:metrics] = 0
        self._totals.write(totals)
        self._ranks.world.all_reduce(self._totals)

    def gradient_of(self, batch: MicroBatch, seed: int) -> tuple[float, Buffer]:
        """The summed loss of a micro-batch on all ranks of the replica, and the gradient of this rank's holding.

        Collective over the replica. Leaves the state unchanged. The gradient is that of this rank's own graph, without
        the terms of other stages for tied weights. Call `forget_gradient` afterwards.
        """
        self._running.copy_from(self._parameters.slice(*self._state_span))
        self._statistics.copy_from(self._running)
        found = self._loss_of(batch, seed)
        loss = HostBuffer(np.array([found if self._ranks.speaks else 0.0], np.float64))
        self._ranks.replica.all_reduce(loss)
        self._sessions.device.free_memory()
        return float(loss.array[0]), self._gradients

    def _loss_of(self, batch: MicroBatch, seed: int) -> float:
        """Run the passes of a micro-batch; its summed loss, where it is computed."""
        return float(self._pass([batch], [seed])[0])

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Meanwhile, compute in fp32, whatever the run's precision. Collective over the ranks of the model.

        After an error the trainer is unusable: others may not have it, and to open passes would wait for them.
        """
        mine, self._sessions = self._sessions, self._sessions.exact()
        if self._sessions is mine:
            yield
            return
        self._open_passes()
        yield
        self._sessions = mine
        self._open_passes()
        self._tie_metrics()

    def compare_precision(self, exact: npt.NDArray[np.float32], batch: MicroBatch, seed: int) -> None:
        """Warn if the gradient of this rank is far from `exact`, the one in fp32. Collective like `exact`."""

    def end_training(self) -> None:
        """See the protocol."""
        self._tied.settle()
        super().end_training()

    def forget_gradient(self) -> None:
        """Leave no gradient for the next step."""
        self._gradients.fill(0)

    def state(self) -> dict[str, Buffer | Shard]:
        """The tensors that this rank holds."""
        if self._spec.parallel.zero:
            return dict(super().state())
        whole = {name: each.part if isinstance(each, Shard) else each for name, each in self._moments.items()}
        return {"parameters": self._parameters, **whole}
