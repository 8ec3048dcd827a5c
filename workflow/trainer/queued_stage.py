"""The trainer of a pipeline's stages on a GPU: their passes one after the other, everything after them queued.

Activations, their gradients and the sums over micro-batches stay on the GPU. Passes are captured as CUDA graphs, one
for each slot (`stage_slots`), at the end of a step; messages are queued between them. Opened by `divided_opening`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ortflow.workflow.device.capture import Repeated
from ortflow.workflow.graph.types import LOSS_SCALE
from ortflow.workflow.parallel.stage import StageSet
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.trainer.obstacles import copied_by, obstacle_in
from ortflow.workflow.trainer.queued_part import QueuedPartTrainer
from ortflow.workflow.trainer.stage_trainer import StageTrainer


class QueuedStageTrainer(QueuedPartTrainer, StageTrainer):
    """See the module."""

    prefetches = False

    def _open_passes(self) -> None:
        self._overlap = None
        super()._open_passes()
        if not self._spec.resources.cuda_graph:
            return
        forms = (self._sessions.fastest_form_of(graph) for graph in self._runner.graphs())
        drawn = next(filter(None, map(obstacle_in, forms)), "")

        def repeat(name: str, run: Callable[[], None], binding: Binding) -> Repeated:
            return self._captured(name, run, copied_by(binding) or drawn, self._agreement(), deferred=True)

        self._runner.repeat = repeat

    def _scales_loss(self) -> bool:
        # Only the last stage has the loss, and all have gradients that are multiplied by the scale.
        stages = self._ranks.stages
        found = stages.gather(self._runner.reads(LOSS_SCALE))
        return bool(stages.broadcast_object(found is not None and any(found)))

    def _repeat(self) -> None:
        self._scale_gradient = self._repeated("the scaling of the gradient", self._scaling.run)

    def _add_loss(self, tail: npt.NDArray[np.float32]) -> None:
        self._tail.slice(0, 2).add(self._sums)

    def _graphs_compared(self) -> Iterable[Path]:
        both = (self._sessions, self._runner.stages), (self._sessions.exact(), StageSet.load(self.graphs.root))
        for sessions, stages in both:
            graphs = [stages.forward(stage.number) for stage in stages.stages]
            yield from (sessions.fastest_form_of(graph) for graph in graphs)

    def _apply(self) -> None:
        super()._apply()
        # Making a graph may wait for the GPU: here, where all messages of the step have been queued on all ranks.
        self._runner.prepare()

    def give_memory_back(self) -> None:
        """See the protocol."""
        self._runner.forget_slots()
        super().give_memory_back()

    def _drop_passes(self) -> None:
        StageTrainer._drop_passes(self)
