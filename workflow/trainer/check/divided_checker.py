"""The check of the gradient of a divided model, by all ranks together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import onnx

from ortflow.workflow.comm.grid import GridRanks
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.graph.ir.other_rows import reads_other_rows
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.parallel.division import Division
from ortflow.workflow.parallel.region import Region
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.check.checked_part import CheckedPart
from ortflow.workflow.trainer.check.divided_check import DividedCheck, key_of
from ortflow.workflow.trainer.check.first_gradient import cut, rows_of
from ortflow.workflow.trainer.loop import StepParts
from ortflow.workflow.trainer.parameters import WholeParameters
from ortflow.workflow.trainer.stage_passes import StagePasses

if TYPE_CHECKING:
    from ortflow.workflow.trainer.check.precision_difference import PrecisionDifference


class CheckedHolding:
    """What a rank holds of a divided model, as the check reads and moves it.

    `precision`: compares precisions; None where training has only one. `stages`: its passes in a pipeline.
    """

    def __init__(
        self,
        parts: StepParts,
        parameters: WholeParameters,
        ranks: GridRanks,
        division: Division,
        precision: PrecisionDifference | None,
        stages: StagePasses | None = None,
    ) -> None:
        self._parts, self._context, self._parameters = parts, parts.context, parameters.buffer
        self._ranks, self.division, self._precision, self._stages = ranks, division, precision, stages
        self.graphs, self.index = parts.context.graphs, parts.context.index

    def region(self, name: str) -> Region:
        """This rank's region of a tensor."""
        return self.division.of(self._ranks.place).region(name)

    def values(self, name: str) -> npt.NDArray[np.float32]:
        """A flat copy of this rank's region of a tensor."""
        entry = self.index[name]
        return self._parameters.slice(entry.offset, entry.end).read()

    def set_values(self, name: str, values: npt.NDArray[np.float32]) -> None:
        """Replace this rank's region of a tensor."""
        entry = self.index[name]
        self._parameters.slice(entry.offset, entry.end).write(values)

    def gradient_of(self, batch: MicroBatch, seed: int) -> tuple[float, Buffer]:
        """The summed loss of a micro-batch on all ranks of the replica, and the gradient of this rank's holding.

        Collective over the replica. Leaves the state unchanged. The gradient is that of this rank's own graph, without
        the terms of other stages for tied weights. Call `forget_gradient` afterwards.
        """
        buffers = self._parts.buffers
        buffers.running.copy_from(self._parts.state())
        buffers.statistics.copy_from(buffers.running)
        # The passes add to the tail.
        buffers.tail.fill(0)
        self._parts.passes.run([batch], [seed])
        loss_sum = float(buffers.tail.read()[0])
        loss = HostBuffer(np.array([loss_sum if self._ranks.speaks else 0.0], np.float64))
        self._ranks.replica.all_reduce(loss)
        self._context.device.free_memory()
        return float(loss.array[0]), buffers.gradients

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Meanwhile, compute in fp32, whatever the run's precision. Collective over the ranks of the model.

        After an error the trainer is unusable: others may not have it, and to open passes would wait for them.
        """
        sessions = self._context.sessions
        if sessions.exact() is sessions:
            yield
            return
        self._parts.passes.open(sessions.exact())
        yield
        self._parts.passes.open(sessions)

    def compare_precision(self, exact: npt.NDArray[np.float32], batch: MicroBatch, seed: int) -> None:
        """Warn if the gradient of this rank is far from `exact`, the one in fp32. Collective like `exact`."""
        sessions, precision = self._context.sessions, self._precision
        if precision is None or sessions.exact() is sessions or self._context.spec.train.precision == "tf32":
            return
        if precision.comparable:
            part = CheckedPart(self.index, self._parameters, self._parts.buffers.gradients)
            precision.warn_divided(exact, lambda: self.gradient_of(batch, seed)[1].read(), part, self._ranks)

    def forget_gradient(self) -> None:
        """Leave no gradient, and no time of its passes, for the next step."""
        self._parts.buffers.gradients.fill(0)
        if self._stages is not None:
            self._stages.runner.forget_seconds()


class DividedChecker:
    """See the module. `graphs` are of the whole model."""

    def __init__(self, graphs: GraphSet, holding: CheckedHolding, parts: StepParts, ranks: GridRanks) -> None:
        self._graphs, self.holding, self._context, self._ranks = graphs, holding, parts.context, ranks

    def check(self, samples: Iterable[MicroBatch]) -> None:
        """Check the gradient against differences of the loss, unless the same graphs have passed before."""
        spec, holding, world = self._context.spec, self.holding, self._ranks.world
        if not spec.train.check_gradient:
            return
        keys = world.gather(key_of(holding.graphs.root, self._context.sessions.kernels, self._ranks.place))
        # Of the whole model: a stage without running statistics checks with as many samples as one that has some.
        rows = rows_of(holding.division.whole, self._graphs.inputs, spec.data.micro_batch)
        needs_all = world.gather(self._indexes_rows())
        if world.broadcast_object(needs_all is not None and any(needs_all)):
            rows = spec.data.micro_batch
        for batch in islice(samples, 1):
            DividedCheck(holding, self._ranks, spec.seed, self._context.report).run(cut(batch, rows), keys)

    def _indexes_rows(self) -> bool:
        """Whether samples index others of their micro-batch in a graph of this rank.

        Unlike a rank alone, a rank of several cannot try few samples first: others wait for its messages.
        """
        parameters = {entry.name for entry in self.holding.index}
        graphs = (onnx.load(path).graph for path in sorted(self.holding.graphs.root.glob("*eval.onnx")))
        return any(reads_other_rows(graph, parameters) for graph in graphs)
