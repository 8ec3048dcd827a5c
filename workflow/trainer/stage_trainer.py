"""The trainer of one rank of a pipeline: runs its stages' passes in the order of the schedule, with `StageRunner`.

Everything after the passes, from the sums over the replicas to the update, is `PartTrainer`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ortflow.workflow.device import HALF_PRECISIONS
from ortflow.workflow.errors import UserError
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.parallel.stage import HALF, StageSet
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.trainer import EvaluationOutcome, MicroBatch
from ortflow.workflow.trainer.bound_graphs import TAIL, metric_shapes
from ortflow.workflow.trainer.part import PartTrainer
from ortflow.workflow.trainer.stage_evaluation import StageEvaluation
from ortflow.workflow.trainer.stage_runner import StageRunner


class StageTrainer(PartTrainer):
    """See the module."""

    def _open_passes(self) -> None:
        stages, parallel = StageSet.load(self.graphs.root), self._spec.parallel
        training = stages
        if self._sessions.device.precision in HALF_PRECISIONS:
            training = StageSet.load(self.graphs.root, HALF)
        if self._scratch is None and stages.chunks > 1:
            # Chunks of one rank may give gradients of the same weight.
            self._scratch = self._sessions.device.allocate(self.index.trained, np.float32)
        self._runner = StageRunner(
            training, parallel.schedule, self._ranks.stages, self._sessions, self.index, self._bind_training,
            self._gradients, self._scratch,
        )  # fmt: skip
        self._evaluations: list[Binding] = []
        self._evaluator = StageEvaluation(stages, self._ranks.stages, self._sessions, self._bind_evaluation)
        shapes = {name: shape for each in self._evaluations for name, shape in metric_shapes(each).items()}
        found = self._ranks.stages.gather({name: shapes[name] for name in sorted(shapes)})
        fault = None if found is None else next((min(each) for each in found[:-1] if each), None)
        self._metric_outputs, fault = self._ranks.stages.broadcast_object(
            (found[-1], fault) if found is not None else None
        )
        if fault is not None:
            raise UserError(
                f"the value {fault!r} is computed in a stage before the last one, whose sums are not read",
                where="parallel.pipeline",
                fix="cut the model before the outputs that losses and metrics compare, or use fewer stages",
            )

    def _bind_evaluation(self, session: onnxruntime.InferenceSession) -> Binding:
        binding = Binding(session, self._sessions.device)
        binding.read_tensors(self.index, self._here)
        self._evaluations.append(binding)
        return binding

    def _tie_metrics(self) -> None:
        for binding in self._evaluations:
            self._write_metrics_to(binding)

    def _pass(self, batches: Sequence[MicroBatch], seeds: Sequence[int]) -> npt.NDArray[np.float32]:
        tail = np.zeros(TAIL, np.float32)

        def after_loss() -> None:
            self._add_loss(tail)

        self._runner.run(batches, seeds, feed=self._feed, before_forward=self._move_statistics, after_loss=after_loss)
        tail[2] = sum(batch.count for batch in batches)
        return tail

    def _add_loss(self, tail: npt.NDArray[np.float32]) -> None:
        """Add the sums of the loss of a micro-batch to those of the step."""
        tail[:2] += self._sums.read()

    def _move_statistics(self) -> None:
        self._running.copy_from(self._statistics)

    def _metrics_of(self, batch: MicroBatch, seed: int) -> npt.NDArray[np.float32]:
        self._evaluator.run(batch, lambda binding: self._feed(binding, batch, seed))
        return self._metric_sums.read()

    def evaluate(
        self, batches: Iterable[MicroBatch], control_values: Callable[[], Sequence[float]]
    ) -> EvaluationOutcome:
        """See the protocol."""

        def all_sent() -> Sequence[float]:
            self._evaluator.finish()
            return control_values()

        return super().evaluate(batches, all_sent)

    def pass_seconds(self) -> tuple[float, float] | None:
        """See the protocol. On GPUs passes are queued, and nobody waits on the host."""
        if self._sessions.device.kind != "cpu" or not self._runner.seconds:
            return None
        return self._runner.busy, self._runner.seconds

    def forget_gradient(self) -> None:
        """Leave no gradient, and no time of its passes, for the next step."""
        super().forget_gradient()
        self._runner.forget_seconds()

    def _drop_passes(self) -> None:
        del self._runner, self._evaluator, self._evaluations
