"""Passes of one rank of a pipeline: its stages' passes in the order of the schedule, with `StageRunner`.

On a GPU the passes are queued one after the other, with messages between them. Activations, their gradients and the
sums over micro-batches stay there. Passes are captured as CUDA graphs, one for each slot (`stage_slots`), at the end
of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.grid import GridRanks
from ortflow.workflow.device import HALF_PRECISIONS, Buffer
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.types import LOSS_SCALE
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.parallel.stage import HALF, StageSet
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.buffers import UpdateMemory
from ortflow.workflow.trainer.context import StepContext
from ortflow.workflow.trainer.graph_binder import GraphBinder, feed
from ortflow.workflow.trainer.metric_sums import MetricSums, Shapes, metric_shapes
from ortflow.workflow.trainer.passes import Scores
from ortflow.workflow.trainer.stage_evaluation import StageEvaluation
from ortflow.workflow.trainer.stage_runner import StageRunner
from ortflow.workflow.trainer.stage_slots import Repeat

Repeater = Callable[[Sessions, Sequence[Path]], Repeat]
"""Makes work that a GPU repeats of the passes of graphs."""


class StagePasses:
    """See the module. `repeater`: None if passes are not repeated on the same memory."""

    def __init__(
        self,
        context: StepContext,
        memory: UpdateMemory,
        binder: GraphBinder,
        ranks: GridRanks,
        repeater: Repeater | None = None,
    ) -> None:
        self._context, self._binder, self._buffers = context, binder, binder.buffers
        self._ranks, self._repeater, self._scratch = ranks, repeater, memory.scratch
        self.open(context.sessions)

    def open(self, sessions: Sessions) -> None:
        """See `Passes`. Collective over the pipeline."""
        context, pipeline = self._context, self._ranks.stages
        stages = StageSet.load(context.graphs.root)
        training = stages
        if sessions.device.precision in HALF_PRECISIONS:
            training = StageSet.load(context.graphs.root, HALF)
        if self._scratch is None and stages.chunks > 1:
            # Chunks of one rank may give gradients of the same weight.
            self._scratch = sessions.device.allocate(context.index.trained, np.float32)

        def bind(session: onnxruntime.InferenceSession, gradients: Buffer) -> Binding:
            return self._binder.training(session, sessions.device, gradients)

        self.runner = StageRunner(
            training, context.spec.parallel.schedule, pipeline, sessions, context.index, bind,
            self._buffers.gradients, self._scratch,
        )  # fmt: skip
        if self._repeater is not None:
            self.runner.repeat = self._repeater(sessions, self.runner.graphs())
        evaluations: list[Binding] = []

        def bind_evaluation(session: onnxruntime.InferenceSession) -> Binding:
            evaluations.append(self._binder.evaluation(session, sessions.device))
            return evaluations[-1]

        evaluation = StageEvaluation(stages, pipeline, sessions, bind_evaluation)
        self.graphs = StageGraphs(context, pipeline, self.runner, evaluation, evaluations)

    def run(self, batches: Sequence[MicroBatch], seeds: Sequence[int]) -> None:
        """See `Passes`."""
        self.runner.run(
            batches,
            seeds,
            feed=feed,
            before_forward=self._buffers.begin_micro_batch,
            after_loss=self._buffers.add_loss,
        )

    def updated(self) -> None:
        """See `Passes`."""
        # Making a CUDA graph may wait for the GPU: here, all messages of the step are queued.
        self.runner.prepare()

    def seconds(self) -> tuple[float, float] | None:
        """See `Pipelined.pass_seconds`. On GPUs passes are queued, and nobody waits on the host."""
        if self._context.device.kind != "cpu" or not self.runner.seconds:
            return None
        return self.runner.busy, self.runner.seconds

    def close(self) -> None:
        """See `Passes`."""
        del self.runner, self.graphs


class StageGraphs:
    """The graphs of this rank's stages."""

    prefetches = False

    def __init__(
        self,
        context: StepContext,
        pipeline: Communicator,
        runner: StageRunner,
        evaluation: StageEvaluation,
        bindings: Sequence[Binding],
    ) -> None:
        self._context, self._pipeline, self._runner, self._evaluation = context, pipeline, runner, evaluation
        self.metrics = MetricSums(context.device, shapes_of_all(bindings, pipeline))
        for binding in bindings:
            self.metrics.tie(binding)

    def prefetch(self, batches: Sequence[MicroBatch]) -> None:
        """See `PassGraphs`."""

    def evaluate(self, batch: MicroBatch, seed: int, scores: Scores) -> npt.NDArray[np.float32]:
        """See `PassGraphs`."""
        self._evaluation.run(batch, lambda binding: feed(binding, batch, seed))
        return self.metrics.read()

    def end_evaluation(self) -> None:
        """See `PassGraphs`."""
        self._evaluation.finish()

    def scales_loss(self) -> bool:
        """See `PassGraphs`. Only the last stage has the loss, and all have gradients that are multiplied by its
        scale."""
        scaled = self._pipeline.gather(self._runner.reads(LOSS_SCALE))
        return bool(self._pipeline.broadcast_object(scaled is not None and any(scaled)))

    def shapes_fed(self) -> dict[str, tuple[int, ...]] | None:
        """See `PassGraphs`."""
        return None

    def compared(self, sessions: Sessions) -> list[Path]:
        """See `PassGraphs`."""
        exact = sessions is not self._context.sessions
        stages = StageSet.load(self._context.graphs.root) if exact else self._runner.stages
        return [sessions.fastest_form_of(stages.forward(stage.number)) for stage in stages.stages]


def shapes_of_all(evaluations: Sequence[Binding], pipeline: Communicator) -> Shapes:
    """The shapes of the metrics' sums, which the last stage computes. Raises UserError if another stage has some."""
    shapes = {name: shape for each in evaluations for name, shape in metric_shapes(each).items()}
    stage_shapes = pipeline.gather({name: shapes[name] for name in sorted(shapes)})
    fault = None if stage_shapes is None else next((min(each) for each in stage_shapes[:-1] if each), None)
    result: tuple[Shapes, str | None] = pipeline.broadcast_object(
        (stage_shapes[-1], fault) if stage_shapes is not None else None
    )
    if result[1] is not None:
        raise UserError(
            f"the value {result[1]!r} is computed in a stage before the last one, whose sums are not read",
            where="parallel.pipeline",
            fix="cut the model before the outputs that losses and metrics compare, or use fewer stages",
        )
    return result[0]
