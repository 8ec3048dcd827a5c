"""The trainer of ONNX graphs over flat buffers, on one rank. `opening` chooses its parts.

A step is made of four parts: *passes* compute gradients, the *reduction* sums them over the ranks, the *update* changes
parameters and moments, and the *loop* orders the work. Beside them: an evaluator, a checker, an exporter, and what a
checkpoint has. Each is passed in and calls no method of this class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ortflow.workflow.comm.grid import GridRanks
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.copying import Copying
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.memory import buffers, trim
from ortflow.workflow.run.operator_records import Recording
from ortflow.workflow.run.pace import Pace
from ortflow.workflow.run.recorded_environment import LAYOUT
from ortflow.workflow.spec.averages import BUFFER
from ortflow.workflow.trainer import EvaluationOutcome, MicroBatch, StepOutcome, Trainer
from ortflow.workflow.trainer.averaged import exchange
from ortflow.workflow.trainer.check.checker import Checker
from ortflow.workflow.trainer.context import StepContext
from ortflow.workflow.trainer.evaluator import Evaluator
from ortflow.workflow.trainer.export.exporter import Exporter
from ortflow.workflow.trainer.loop import Loop, StepParts, StepRequest
from ortflow.workflow.trainer.parameters import Parameters
from ortflow.workflow.trainer.saved_state import SavedState
from ortflow.workflow.trainer.shard_passes import ShardPasses
from ortflow.workflow.trainer.stage_passes import StagePasses

Moments = Mapping[str, Buffer | Shard]


@dataclass(frozen=True)
class Training:
    """What a trainer has until its last step."""

    parts: StepParts
    loop: Loop
    evaluator: Evaluator
    checker: Checker
    shards: ShardPasses | None = None
    """Its passes under ZeRO's stage 3."""
    stages: StagePasses | None = None
    """Its passes in a pipeline."""


class GraphTrainer(Trainer):
    """See the module. It has all capabilities.

    `training`: None for a trainer that only exports. `ranks`: the communicators of a divided model; None if it is not
    divided.
    """

    def __init__(
        self,
        context: StepContext,
        parameters: Parameters,
        moments: Moments,
        saved: SavedState,
        exporter: Exporter,
        training: Training | None,
        *,
        graphs: GraphSet,
        ranks: GridRanks | None = None,
        together: bool = False,
    ) -> None:
        self.index = graphs.index
        self.prefetches = self.begins = False
        self._average_rate = 0.0
        self.context, self.parameters, self._moments = context, parameters, moments
        self._saved, self.exporter, self._training = saved, exporter, training
        self._graphs, self._ranks, self.together = graphs, ranks, together
        self.before_update: Callable[[], None] = _nothing
        self.before_wait: Callable[[], None] = _nothing
        if training is not None:
            self.prefetches = training.parts.passes.graphs.prefetches
            # A divided model begins no step before the one before has ended.
            self.begins = training.loop.begins and ranks is None

    @property
    def training(self) -> Training:
        """Its parts; until `end_training`."""
        assert self._training is not None, "training has ended"
        return self._training

    @property
    def parts(self) -> StepParts:
        """The parts of a step."""
        return self.training.parts

    def state(self) -> Mapping[str, Buffer | Shard]:
        """See the protocol."""
        return self._saved.state()

    def before_save(self) -> None:
        """See the protocol."""
        self._saved.before_save()

    def after_load(self) -> None:
        """See the protocol."""
        self._saved.after_load()

    def load_tensors(self, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Set what this rank holds of every tensor to the values given by name."""
        self.parameters.load(tensors)
        if (pair := self._averaged_here()) is not None:
            weights, average = pair
            average.copy_from(weights)

    def _averaged_here(self) -> tuple[Buffer, Buffer] | None:
        """The weights that this rank averages, and their average; None if the run has none."""
        average, weights = self._moments.get(BUFFER), self.parameters.here
        if average is None:
            return None
        if isinstance(average, Shard):
            return weights.slice(average.start, average.stop), average.part
        return weights.slice(0, average.count), average

    def exchange_average(self) -> None:
        """See `Averaging`. What several ranks hold has the same bits on all of them, as after an update."""
        if (pair := self._averaged_here()) is None:
            return
        if self._training is not None:
            self.parts.reduction.settle()
        self._before_change()
        exchange(self.context.device, *pair)
        if self._training is not None:
            self.parts.reduction.gather_parameters()

    def _before_change(self) -> None:
        if not self._saved.is_copy:
            self.before_update()

    def environment(self) -> Mapping[str, str]:
        """See the protocol: that of the undivided graphs, and the layout of a divided model."""
        from ortflow.workflow.trainer.environment import environment_of

        record = environment_of(self._graphs, self.context.spec.kernels, self.context.sessions)
        if self._ranks is not None:
            grid = self._ranks.grid
            record[LAYOUT] = f"data {grid.data} x pipeline {grid.pipeline} x horizontal {grid.horizontal}"
        return record

    def check(self, samples: Iterable[MicroBatch]) -> None:
        """See the protocol."""
        self.training.checker.check(samples)

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
        request = StepRequest(
            batches, learning_rate, update, seeds, control_values, self._before_change, self.before_wait,
            self._average_rate,
        )  # fmt: skip
        return self.training.loop.step(request)

    def at(self, pace: Pace, average_rate: float = 0.0) -> None:
        """See the protocol."""
        self._average_rate = average_rate
        self.parts.thaw.at(pace)

    def begin(self, batches: Sequence[MicroBatch], *, seeds: Sequence[int], control_values: Sequence[float]) -> None:
        """See the protocol."""
        self.training.loop.begin(batches, seeds, control_values)

    def prefetch(self, batches: Sequence[MicroBatch]) -> None:
        """See the protocol."""
        self.parts.passes.graphs.prefetch(batches)

    def numbers(self) -> Mapping[str, float]:
        """See the protocol."""
        return self.training.loop.stored.numbers()

    def restore(self, numbers: Mapping[str, float]) -> None:
        """See the protocol."""
        self.training.loop.stored.restore(numbers)

    def evaluate(
        self, batches: Iterable[MicroBatch], control_values: Callable[[], Sequence[float]]
    ) -> EvaluationOutcome:
        """See the protocol."""
        self.parts.reduction.settle()
        # Values of the two graphs differ in size: memory that one leaves in the arena hardly serves the other.
        self.give_memory_back()

        def evaluated() -> Sequence[float]:
            self.give_memory_back()
            return control_values()

        outcome = self.training.evaluator.run(batches, evaluated)
        self.context.device.free_memory()
        return outcome

    def memory(self) -> Mapping[str, int]:
        """See the protocol."""
        context, index = self.context, self.context.index
        return self._saved.memory(
            buffers(
                index.trained,
                index.size - index.trained,
                len(self._moments),
                accumulation=context.spec.accumulation,
                world_size=context.replicas.world_size,
                zero=context.spec.parallel.zero,
                rank=context.replicas.rank,
                messages=shards.exchange.buffered if (shards := self.training.shards) is not None else 0,
                chunks=context.spec.parallel.chunks,
                staging=self.parts.update.staging,
            )
        )

    def device_memory(self) -> Mapping[str, int]:
        """See the protocol."""
        return self.context.device.memory()

    def copying(self, room: int) -> Copying:
        """See the protocol."""
        return self.context.device.copying(room)

    def pass_seconds(self) -> tuple[float, float] | None:
        """See the protocol."""
        return self.training.stages.seconds() if self.training.stages is not None else None

    def record(self) -> Recording | None:
        """See the protocol."""
        return self.context.sessions.record()

    def flops(self) -> int | None:
        """See the protocol. With recomputed values the graph has products that are not the model's."""
        import onnx

        from ortflow.workflow.graph.stages.flops import flops_in

        shapes = self.parts.passes.graphs.shapes_fed()
        if shapes is None or self._ranks is not None or self.context.spec.onnx_model.recompute:
            return None
        return flops_in(onnx.load(self._graphs.train), shapes)

    def give_memory_back(self) -> None:
        """See the protocol."""
        if self.training.stages is not None:
            self.training.stages.runner.forget_slots()
        self.parts.give_memory_back()
        trim()

    def end_training(self) -> None:
        """See the protocol."""
        # Other ranks may still receive parameters from memory that is freed here.
        self.parts.reduction.settle()
        self.give_memory_back()
        self.before_update = self.before_wait = _nothing
        self._moments = {}
        self._saved.end_training()
        self.parts.close()
        self._training = None
        self.context.device.free_memory()

    def before_export(self) -> None:
        """See the protocol."""
        self.exporter.before_export()

    def lend(self) -> None:
        """See the protocol."""
        self.exporter.lend()

    def after_export(self) -> None:
        """See the protocol."""
        self.exporter.after_export()

    def export(
        self, path: Path, samples: Sequence[MicroBatch], tolerance: float | None, *, trial: bool = False
    ) -> float | None:
        """See the protocol."""
        return self.exporter.export(path, samples, tolerance, trial=trial)


def _nothing() -> None:
    """Until the steps set something else."""
