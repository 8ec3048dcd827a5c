"""Moments in the host's memory, which pass through the GPU while the update runs (`streamed`): `train.offload`.

The same kernels update the same elements as where moments stay on the GPU, so that the results have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cudart import CudaError
from ortflow.workflow.errors import UserError
from ortflow.workflow.memory import ITEM
from ortflow.workflow.optim.segments import Piece, pieces, segments_of
from ortflow.workflow.optim.whole_tensors import NormGraphs
from ortflow.workflow.spec.optimizers import OPTIMIZERS, moments
from ortflow.workflow.trainer.context import StepContext
from ortflow.workflow.trainer.share_update import Bind
from ortflow.workflow.trainer.streamed import Streamed, groups_of
from ortflow.workflow.trainer.update import Moments
from ortflow.workflow.trainer.work import Work


class StreamedMoments:
    """Those of the elements [start, stop)."""

    def __init__(self, context: StepContext, start: int, stop: int) -> None:
        train, device = context.spec.train, context.device
        self._optimizer = train.optimizer
        own_pieces = pieces(segments_of(train, context.index), start, stop)
        self._groups = groups_of(own_pieces, uncut=OPTIMIZERS[train.optimizer.name].whole_tensors)
        names, count = train.buffers, stop - start
        assert isinstance(device, CudaDevice)
        try:
            self._streamed = Streamed(device, names, (start, stop, context.index.trained), self._groups)
        except CudaError as error:
            raise UserError(
                f"is optimizer, and this machine cannot pin {count * len(names) * ITEM / 1e9:.1f} GB of its "
                f"memory for a rank: {error.message}",
                where="train.offload",
                fix="raise the limit of locked memory (ulimit -l) or resources.memory, or set it to none",
            ) from error
        seconds = self._streamed.seconds()
        self.moments: Moments = self._streamed.moments
        self.staging: int | None = self._streamed.staging // ITEM
        if context.replicas.rank == 0:
            self._report(context, count, seconds)

    def _report(self, context: StepContext, count: int, seconds: float) -> None:
        streamed = self._streamed
        context.report.note(
            f"the optimizer's state, {len(self.moments)} moments x {ITEM} bytes x {count} elements = "
            f"{streamed.size} bytes, lies in pinned host memory; in each step it passes through "
            f"{streamed.staging} bytes of the GPU in {len(self._groups)} pieces, which takes "
            f"{1e3 * seconds:.1f} ms without other work ({2 * streamed.size / max(seconds, 1e-9) / 1e9:.1f} GB/s)"
        )
        context.report.record(
            "offload", bytes=streamed.size, staging=streamed.staging, pieces=len(self._groups),
            seconds=round(seconds, 6),
        )  # fmt: skip

    def begin(self) -> None:
        """See `MomentStore`."""
        self._streamed.begin()

    def runs(self, name: str, own_pieces: Sequence[Piece], bind: Bind, work: Work) -> list[Callable[[], None]]:
        """See `MomentStore`."""
        runs = [
            work.repeat(f"{name} of a piece", bind(group, self._streamed.here(number)).run).run
            for number, group in enumerate(self._groups)
        ]
        return [partial(self._streamed.run, runs)] if runs else []

    def check_norms(self, graphs: NormGraphs, own_pieces: Sequence[Piece]) -> None:
        """See `MomentStore`."""
        read = (
            {value.name.partition(".")[0] for value in graphs.first(own_pieces).graph.input}
            if own_pieces
            else set[str]()
        )
        if not graphs.keeps_changes and not read.isdisjoint(moments(self._optimizer)):
            raise UserError(
                f"is optimizer, and {self._optimizer.name} reads norms of its moments, which pass through "
                "the GPU once in a step",
                where="train.offload",
                fix="set it to none",
            )
