"""What passes between the ranks of a divided model in a step.

Data parallelism and ZeRO act on a rank's holding over the replicas (`Scatter`). Quantities of the whole model are
summed over all ranks, each element and each sample once. Weights that several ranks hold have the same bits on all.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ortflow.workflow.comm.grid import GridRanks
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.layout import TRAINED
from ortflow.workflow.optim.segments import segments_of
from ortflow.workflow.parallel.division import Division
from ortflow.workflow.parallel.ties import common, ties
from ortflow.workflow.trainer.buffers import CONTROL_VALUES, StepBuffers
from ortflow.workflow.trainer.context import StepContext
from ortflow.workflow.trainer.parameters import WholeParameters
from ortflow.workflow.trainer.reduction import Scatter
from ortflow.workflow.trainer.tensor_norms import sum_over, take_over_first
from ortflow.workflow.trainer.tied import CommonWeights, TiedWeights
from ortflow.workflow.trainer.work import Work


class DividedReduction:
    """See the module."""

    def __init__(
        self,
        context: StepContext,
        ranks: GridRanks,
        division: Division,
        scatter: Scatter,
        buffers: StepBuffers,
        parameters: WholeParameters,
        work: Work,
    ) -> None:
        self._context, self._ranks, self._division, self._scatter = context, ranks, division, scatter
        self._buffers, self._parameters = buffers, parameters.buffer
        self.after_each, device = scatter.after_each, context.device
        self._tied = TiedWeights(ties(division, ranks.place), ranks.stages, device, later=work.queued)
        self._common = CommonWeights(
            common(division, ranks.place), ranks.parts, self._parameters, device,
            lambda name, run: work.repeat(name, run).run,
        )  # fmt: skip

    def sum_gradients(self) -> None:
        """See `Reduction`."""
        self._tied.sum_gradients(self._buffers.gradients)
        self._scatter.sum_gradients()

    def sum_rest(self) -> None:
        """See `Reduction`."""
        buffers = self._buffers
        if buffers.statistics.count:
            self._context.replicas.all_reduce(buffers.statistics)
        # All ranks of a replica read the same samples, which count once.
        if not self._ranks.speaks:
            buffers.tail.slice(0, CONTROL_VALUES).fill(0)
        self._ranks.world.all_reduce(buffers.tail)

    def sum_squares(self, squares: Buffer) -> None:
        """See `Reduction`."""
        self._ranks.world.all_reduce(squares)

    def sum_norms(self, sums: Buffer) -> None:
        """See `Reduction`."""
        index = self._context.index
        cuts = segments_of(self._context.spec.train, index)
        offsets = {entry.offset: entry.name for entry in index if entry.tensor.count}
        # The norm of a tensor that every part holds whole is complete; of a divided one, each part has one term.
        cut_terms = np.array([predicts(self._division, self._ranks, offsets[cut.start]) for cut in cuts])
        terms = np.tile(cut_terms, sums.count // max(1, len(cut_terms)))
        sum_over(sums, terms, self._scatter.sharers, self._ranks.parts)
        take_over_first(sums, self._context.replicas, self._ranks.parts)

    def settle(self) -> None:
        """See `Reduction`."""
        self._tied.settle()

    def gather_parameters(self) -> None:
        """See `Reduction`."""
        self._scatter.gather_parameters()
        # Freeing waits for the GPU: here, where it waits for no message of another rank.
        self._context.device.free_memory()
        self._tied.take_over(self._parameters)
        self._common.take_over()

    def counted(self, shard: Shard) -> list[tuple[int, int]]:
        """Elements updated by this rank that count here in the sum of squares over all ranks.

        Each replica has the whole gradient if that is not sharded. A sum of each over its own ranks may differ in
        rounding, and then the replicas' parameters would: only the first one's counts.
        """
        if not (self._context.spec.parallel.zero or self._ranks.place.data == 0):
            return []
        return list(self._counted_spans(shard))

    def _counted_spans(self, shard: Shard) -> Iterator[tuple[int, int]]:
        """Adjacent ones are joined."""
        index = self._context.index
        trained = [entry for entry in index if entry.tensor.group in TRAINED]
        edges = [*(entry.offset for entry in trained), index.trained][1:]
        start, stop = shard.start, shard.stop
        open_at: int | None = None
        for entry, end in zip(trained, edges, strict=True):
            counted = counts(self._division, self._ranks, entry.name)
            if counted and open_at is None:
                open_at = entry.offset
            if open_at is not None and (not counted or end == index.trained):
                first, last = max(open_at, start), min(end if counted else entry.offset, stop)
                if first < last:
                    yield first, last
                open_at = None


def counts(division: Division, ranks: GridRanks, name: str) -> bool:
    """Whether sums over all ranks count this rank's elements of a tensor."""
    return division.counts(division.number(ranks.place), name)


def predicts(division: Division, ranks: GridRanks, name: str) -> bool:
    """Whether this rank's gradient of a tensor is a term of the change of the loss.

    For a tensor that each part holds whole, the gradient is complete on each part. For one that is tied between
    stages, each stage has one term.
    """
    return name in division.of(ranks.place).regions or ranks.place.part == 0
