"""The trainer of a model that is divided over ranks: by layers, pipeline stages, or both.

Each rank trains its holding (`PartTrainer`). Checkpoints and exports contain only the whole model: the state is
converted to its canonical form before a save, and back after a load (`CanonicalState`). Opened by `builder`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path

import onnx

from ortflow.workflow.comm.grid import GridRanks
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.copying import Copying
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.environment import LAYOUT
from ortflow.workflow.graph.ir.other_rows import reads_other_rows
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.layout import FlatIndex, share
from ortflow.workflow.memory import ITEM, KEPT
from ortflow.workflow.pace import Pace
from ortflow.workflow.parallel.division import Division
from ortflow.workflow.recording import Recording
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import EvaluationOutcome, MicroBatch, Report, StepOutcome, Trainer
from ortflow.workflow.trainer.canonical import PARAMETERS, CanonicalState
from ortflow.workflow.trainer.divided_check import DividedCheck, key_of
from ortflow.workflow.trainer.environment import environment_of
from ortflow.workflow.trainer.first_gradient import cut, rows_of
from ortflow.workflow.trainer.lent_tensors import LentTensors
from ortflow.workflow.trainer.mapped_export import export_mapped
from ortflow.workflow.trainer.part import PartTrainer
from ortflow.workflow.trainer.watched_logits import watch_logits


class DividedTrainer(Trainer):
    """See the module.

    Parameters
    ----------
    graphs
        Of the whole model.
    sessions
        Of this rank.
    ranks
        Its communicators.
    division
        How the model is divided.
    part
        The trainer of what this rank holds.
    """

    together = True

    def __init__(
        self,
        graphs: GraphSet,
        spec: TrainerRunSpec,
        sessions: Sessions,
        ranks: GridRanks,
        division: Division,
        part: PartTrainer,
        report: Report,
    ) -> None:
        self.index: FlatIndex = division.whole
        # The copies in `state` change only in `before_save`, and the previous save is complete before that.
        self.before_update: Callable[[], None] = lambda: None
        self._graphs, self._spec, self._sessions, self._ranks = graphs, spec, sessions, ranks
        self._part, self._report = part, report
        self.prefetches = part.prefetches
        self._canonical: CanonicalState | None = CanonicalState(division, ranks.world, part.state())
        self._shares: Mapping[str, Shard] = self._canonical.shares
        self.lent: LentTensors | None = None

    def state(self) -> Mapping[str, Buffer | Shard]:
        """This rank's shares of the whole model's buffers."""
        return self._shares

    def before_save(self) -> None:
        """See the protocol."""
        assert self._canonical is not None
        self._canonical.gather()

    def after_load(self) -> None:
        """See the protocol."""
        assert self._canonical is not None
        self._canonical.scatter()

    def record(self) -> Recording | None:
        """See the protocol."""
        return self._sessions.record()

    def environment(self) -> Mapping[str, str]:
        """The environment of the undivided graphs, and the layout."""
        grid = self._ranks.grid
        layout = f"data {grid.data} x pipeline {grid.pipeline} x horizontal {grid.horizontal}"
        return {**environment_of(self._graphs, self._spec.kernels, self._sessions), LAYOUT: layout}

    def check(self, samples: Iterable[MicroBatch]) -> None:
        """Check the gradient against differences of the loss, unless the same graphs have passed before."""
        if not self._spec.train.check_gradient:
            return
        keys = self._ranks.world.gather(key_of(self._part.graphs.root, self._sessions.kernels, self._ranks.place))
        # Of the whole model: a stage without running statistics checks with as many samples as one that has some.
        rows = rows_of(self.index, self._graphs.inputs, self._spec.data.micro_batch)
        needs_all = self._ranks.world.gather(self._indexes_rows())
        if self._ranks.world.broadcast_object(needs_all is not None and any(needs_all)):
            rows = self._spec.data.micro_batch
        for batch in islice(samples, 1):
            few = cut(batch, rows)
            DividedCheck(self._part, self._ranks, self._spec.seed, self._report).run(few, keys)

    def _indexes_rows(self) -> bool:
        """Whether samples index others of their micro-batch in a graph of this rank.

        Unlike a rank alone, a rank of several cannot try few samples first: others wait for its messages.
        """
        parameters = {entry.name for entry in self._part.index}
        graphs = (onnx.load(path).graph for path in sorted(self._part.graphs.root.glob("*eval.onnx")))
        return any(reads_other_rows(graph, parameters) for graph in graphs)

    def step(
        self,
        batches: Sequence[MicroBatch],
        *,
        learning_rate: float,
        update: int,
        seeds: Sequence[int],
        control_values: Sequence[float],
    ) -> StepOutcome:
        """See the protocol."""
        return self._part.step(
            batches, learning_rate=learning_rate, update=update, seeds=seeds, control_values=control_values
        )

    def at(self, pace: Pace, average_rate: float = 0.0) -> None:
        """See the protocol."""
        self._part.at(pace, average_rate)

    def exchange_average(self) -> None:
        """See the protocol."""
        self._part.exchange_average()

    def numbers(self) -> Mapping[str, float]:
        """The loss scale's state, which is the same on all ranks."""
        return self._part.numbers()

    def prefetch(self, batches: Sequence[MicroBatch]) -> None:
        """See the protocol."""
        self._part.prefetch(batches)

    def restore(self, numbers: Mapping[str, float]) -> None:
        """See the protocol."""
        self._part.restore(numbers)

    def evaluate(
        self, batches: Iterable[MicroBatch], control_values: Callable[[], Sequence[float]]
    ) -> EvaluationOutcome:
        """See the protocol."""
        return self._part.evaluate(batches, control_values)

    def memory(self) -> Mapping[str, int]:
        """Bytes of this rank's holding, by part; `checkpoint` are its shares, and the copy that is written."""
        shares = sum(each.part.count * ITEM for each in self._shares.values())
        return {**self._part.memory(), "checkpoint": shares + min(shares, KEPT)}

    def pass_seconds(self) -> tuple[float, float] | None:
        """See the protocol."""
        return self._part.pass_seconds()

    def device_memory(self) -> Mapping[str, int]:
        """See the protocol."""
        return self._sessions.device.memory()

    def copying(self, room: int) -> Copying:
        """See the protocol."""
        return self._sessions.device.copying(room)

    def give_memory_back(self) -> None:
        """See the protocol."""
        self._part.give_memory_back()

    def end_training(self) -> None:
        """See the protocol."""
        self._canonical = None
        self._shares = {}
        self._part.end_training()
        self._sessions.device.free_memory()

    def before_export(self) -> None:
        """Bring all parameters into the ranks' shares, from which rank 0 exports."""
        assert self._canonical is not None
        self._canonical.gather([PARAMETERS])
        shared, ranks = self._shares[PARAMETERS], self._ranks.world.world_size
        self.lent = LentTensors(self._ranks.world, self.index, lambda rank: [share(shared.count, rank, ranks)], shared)

    def lend(self) -> None:
        """See the protocol."""
        assert self.lent is not None
        self.lent.lend()

    def after_export(self) -> None:
        """See the protocol."""
        assert self.lent is not None
        self.lent.end()

    def export(
        self, path: Path, samples: Sequence[MicroBatch], tolerance: float | None, *, trial: bool = False
    ) -> float | None:
        """See the protocol."""
        assert self.lent is not None
        watch = watch_logits(self._graphs, self._spec.onnx_model.loss, self._report) if trial else None
        return export_mapped(
            self._graphs, self.lent, self._sessions, path, samples, tolerance, trial=trial, watch=watch
        )
