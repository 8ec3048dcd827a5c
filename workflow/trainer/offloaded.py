"""The trainer whose moments lie in the host's memory: they pass through the GPU while the update runs (`streamed`).

Everything else is as in `QueuedZeroTrainer`, under stage 0 of ZeRO, too. The same kernels update the same elements, so
that the results have the bits of a run whose moments stay on the GPU. Opened by `builder` for `train.offload`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import onnx

from ortflow.workflow.device.cudart import CudaError
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.errors import UserError
from ortflow.workflow.memory import ITEM
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.optim.guard import GRADIENTS
from ortflow.workflow.optim.segments import Piece, pieces, segments_of
from ortflow.workflow.optim.whole_tensors import NormGraphs
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.spec.optimizers import OPTIMIZERS, moments
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.queued_zero import QueuedZeroTrainer
from ortflow.workflow.trainer.streamed import Streamed, groups_of
from ortflow.workflow.trainer.zero import Moments


class OffloadedTrainer(QueuedZeroTrainer):
    """See the module."""

    def _allocate_moments(self, kept: Sequence[str], start: int, stop: int) -> Mapping[str, Shard]:
        optimizer, trained = self._spec.train.optimizer, self.index.trained
        mine = pieces(segments_of(self._spec.train, self.index), start, stop)
        self._groups = groups_of(mine, whole=OPTIMIZERS[optimizer.name].whole_tensors)
        try:
            self._streamed = Streamed(self._device, kept, (start, stop, trained), self._groups)
        except CudaError as error:
            raise UserError(
                f"is optimizer, and this machine cannot pin {(stop - start) * len(kept) * ITEM / 1e9:.1f} GB of its "
                f"memory for a rank: {error.message}",
                where="train.offload",
                fix="raise the limit of locked memory (ulimit -l) or resources.memory, or set it to none",
            ) from error
        seconds, streamed = self._streamed.seconds(), self._streamed
        self._sessions_by_form: dict[bytes, onnxruntime.InferenceSession] = {}
        if self._comm.rank == 0:
            moved = 2 * streamed.size
            self._report.note(
                f"the optimizer's state, {len(kept)} moments x {ITEM} bytes x {stop - start} elements = "
                f"{streamed.size} bytes, lies in pinned host memory; in each step it passes through "
                f"{streamed.staging} bytes of the GPU in {len(self._groups)} pieces, which takes "
                f"{1e3 * seconds:.1f} ms without other work ({moved / max(seconds, 1e-9) / 1e9:.1f} GB/s)"
            )
            self._report.record(
                "offload", bytes=streamed.size, staging=streamed.staging, pieces=len(self._groups),
                seconds=round(seconds, 6),
            )  # fmt: skip
        return self._streamed.moments

    def _open(self, model: onnx.ModelProto, change: str = GRADIENTS) -> onnxruntime.InferenceSession:
        """See the class above. Pieces of one length and one weight decay share a session."""
        form = model.SerializeToString(deterministic=True)
        if form not in self._sessions_by_form:
            self._sessions_by_form[form] = super()._open(model, change)
        return self._sessions_by_form[form]

    def _passes(
        self, name: str, mine: Sequence[Piece], bind: Callable[[Sequence[Piece], Moments], Binding]
    ) -> list[Callable[[], None]]:
        runs = [
            self._repeated(f"{name} of a piece", bind(group, self._streamed.here(number)).run)
            for number, group in enumerate(self._groups)
        ]
        return [partial(self._streamed.run, runs)] if runs else []

    def _by_norms(self, graphs: NormGraphs, mine: Sequence[Piece], tensors: int) -> list[Callable[[], None]]:
        read = {value.name.partition(".")[0] for value in graphs.first(mine).graph.input} if mine else set[str]()
        if not graphs.keeps_changes and not read.isdisjoint(moments(self._spec.train.optimizer)):
            raise UserError(
                f"is optimizer, and {self._spec.train.optimizer.name} reads norms of its moments, which pass through "
                "the GPU once in a step",
                where="train.offload",
                fix="set it to none",
            )
        return super()._by_norms(graphs, mine, tensors)

    def begin(self, batches: Sequence[MicroBatch], *, seeds: Sequence[int], control_values: Sequence[float]) -> None:
        """See the protocol. The first moments arrive during the passes."""
        self._streamed.begin()
        super().begin(batches, seeds=seeds, control_values=control_values)

    @property
    def _staging(self) -> int | None:
        return self._streamed.staging // ITEM

    def _drop_update(self) -> None:
        super()._drop_update()
        del self._streamed, self._sessions_by_form
