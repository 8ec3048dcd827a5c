"""The trainer of a pipeline's stages on a GPU: their passes one after the other, everything after them queued.

Activations, their gradients and the sums over micro-batches stay on the GPU. Passes are not captured as CUDA graphs;
the norm of the gradient, its scaling and the update are. Opened by `divided_opening`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ortflow.workflow.graph.types import LOSS_SCALE
from ortflow.workflow.parallel.stage import StageSet
from ortflow.workflow.trainer.queued_part import QueuedPartTrainer
from ortflow.workflow.trainer.stage_trainer import StageTrainer


class QueuedStageTrainer(QueuedPartTrainer, StageTrainer):
    """See the module."""

    def _open_passes(self) -> None:
        self._overlap = None
        super()._open_passes()

    def _scales_loss(self) -> bool:
        # Only the last stage has the loss, and all have gradients that are multiplied by the scale.
        stages = self._ranks.stages
        found = stages.gather(self._runner.reads(LOSS_SCALE))
        return bool(stages.broadcast_object(found is not None and any(found)))

    def _repeat(self) -> None:
        self._scale_gradient = self._repeated("the scaling of the gradient", self._scaling.run)

    def _add_loss(self, tail: npt.NDArray[np.float32]) -> None:
        self._tail.slice(0, 2).add(self._sums)

    def _graphs_run(self) -> Iterable[Path]:
        stages = StageSet.load(self.graphs.root)
        return [stages.forward(stage.number) for stage in stages.stages]

    def _drop_passes(self) -> None:
        StageTrainer._drop_passes(self)
