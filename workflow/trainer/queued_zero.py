"""The trainer of ZeRO stages 1 and 2 on GPUs: what `ZeroTrainer` does, queued as `QueuedTrainer` does it.

One reduce-scatter of the flat gradient behind the backward pass (stage 2: behind that of each micro-batch), the update
of this rank's share, and one all-gather of the parameters. Passes, norm, scaling and update are captured as CUDA
graphs; the collectives are queued between them, so that it does not matter which ranks have captured what. Opened by
`builder`.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.fusion.groups import fuse
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.optim.gradient import queued_gradient_graph, square_sum_graph, square_sums_graph
from ortflow.workflow.optim.guard import GRADIENTS, guarded
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.trainer.queued import QueuedTrainer
from ortflow.workflow.trainer.zero import ZeroTrainer


class QueuedZeroTrainer(QueuedTrainer, ZeroTrainer):
    """See the module. Methods of `QueuedTrainer` come first, and those that they extend are `ZeroTrainer`'s."""

    _own_kernels = False

    def _open(self, model: onnx.ModelProto, change: str = GRADIENTS) -> onnxruntime.InferenceSession:
        form = guarded(compose(model), multiplied=True, change=change)
        if self._sessions.operators is not None:
            fused, taken = fuse(form)
            form = fused if taken else form
        return self._sessions.open(form.SerializeToString())

    def squares_graph(self, pieces: int | None = None) -> onnx.ModelProto:
        fused = self._sessions.operators is not None
        return square_sum_graph(fused=fused) if pieces is None else square_sums_graph(pieces, fused=fused)

    def _skips_cleanly(self) -> bool:
        return super()._skips_cleanly() and not self._changes_kept

    def _bind_scaling(self) -> Binding:
        self._bind_squaring()
        scaling = self._bind_factor(self._sessions.open(queued_gradient_graph(shared=True).SerializeToString()))
        scaling.read_from("squares", self._squares, (1,))
        return scaling

    def _queue_scaling(self) -> None:
        self._sum_squares()
        super()._queue_scaling()
