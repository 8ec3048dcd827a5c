"""The check of the gradient before the first step: by one rank that has all parameters, or by all ranks with shares.

`divided_checker` has that of a divided model.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.trainer import MicroBatch, Report
from ortflow.workflow.trainer.check.checked_part import CheckedPart
from ortflow.workflow.trainer.graph_binder import feed
from ortflow.workflow.trainer.loop import StepParts
from ortflow.workflow.trainer.parameters import WholeParameters
from ortflow.workflow.trainer.shard_passes import ShardPasses
from ortflow.workflow.trainer.sharded_parameters import ShardedParameters
from ortflow.workflow.trainer.whole_passes import WholePasses

if TYPE_CHECKING:
    from ortflow.workflow.trainer.check.first_gradient import Checked
    from ortflow.workflow.trainer.check.precision_difference import PrecisionDifference


class Checker(Protocol):
    """See the module."""

    def check(self, samples: Iterable[MicroBatch]) -> None:
        """See `Trainer.check`."""


class GradientChecker:
    """Checks one gradient on a real micro-batch.

    `precision`: compares precisions; None where training has only one.
    """

    def __init__(
        self,
        parts: StepParts,
        passes: WholePasses | ShardPasses,
        part: CheckedPart,
        precision: PrecisionDifference | None,
    ) -> None:
        self._parts, self._context, self._passes = parts, parts.context, passes
        self._part, self._precision = part, precision

    def key(self) -> str:
        """A hash of everything that determines the gradient: while it is unchanged, one check is enough."""
        from ortflow.workflow.trainer.check.gradient_check import key_of

        return key_of(self._context.graphs, self._context.sessions.kernels)

    def check(self, samples: Iterable[MicroBatch], key: str, report: Report) -> None:
        """Check with the first samples, and record under `key` that this has passed."""
        from ortflow.workflow.trainer.check.first_gradient import check_now, rows_of

        spec = self._context.spec
        rows = rows_of(self._context.index, self._context.graphs.inputs, spec.data.micro_batch)
        check_now(key, samples, rows, lambda batch: self.run(batch, spec.seed), report)

    def run(self, batch: MicroBatch, seed: int) -> Checked | None:
        """Check on a real micro-batch that the gradient is the loss's.

        None if the micro-batch has no finite loss. Parameters are as before afterwards, but not behind an error, which
        ends the run: to write them might wait for other ranks. Raises UserError if the gradient is wrong, naming
        tensors and node.
        """
        from ortflow.workflow.trainer.check.checked_graph import CheckedGraph
        from ortflow.workflow.trainer.check.gradient_check import GradientCheck

        context, part, passes = self._context, self._part, self._passes
        self._parts.buffers.running.copy_from(self._parts.state())
        exact, training = context.sessions.exact(), passes.first
        # Other ranks take no part in the check, so it is that of the graph with this rank's statistics.
        if exact is not context.sessions or context.spec.synced_ranks:
            training = passes.bind_checked(exact, exact.fastest_form_of(context.graphs.train))

        def bind(model: Path | bytes) -> Binding:
            return passes.bind_checked(exact, model)

        graph = CheckedGraph(
            context.graphs, exact, bind, lambda binding: feed(binding, batch, seed), part=part,
            sums=self._parts.buffers.sums, seed=seed,
        )  # fmt: skip
        checked = GradientCheck(context.graphs, exact, graph).run(training)
        if checked is not None and training is not passes.first and self._precision is not None:
            self._compare_precision(self._precision, training, batch, seed)
        part.gradients.fill(0)
        return checked

    def _compare_precision(self, precision: PrecisionDifference, exact: Binding, batch: MicroBatch, seed: int) -> None:
        """Warn if the gradient of training is far from that of `exact`, the training graph in fp32."""
        if not precision.comparable:
            return

        def gradient(binding: Binding) -> npt.NDArray[np.float32]:
            with self._part.passing():
                feed(binding, batch, seed)
                binding.run()
            return self._part.gradients.read()

        expected = gradient(exact)
        self._passes.refresh()
        precision.warn(expected, lambda: gradient(self._passes.first), self._part)


class WholeChecker:
    """On this rank alone, which holds all parameters."""

    def __init__(
        self, parts: StepParts, passes: WholePasses, parameters: WholeParameters, precision: PrecisionDifference | None
    ) -> None:
        part = CheckedPart(parts.context.index, parameters.buffer, parts.buffers.gradients)
        self._context, self.gradient = parts.context, GradientChecker(parts, passes, part, precision)

    def check(self, samples: Iterable[MicroBatch]) -> None:
        """Check the gradient on a micro-batch, if the run file requests it and the same check has not passed before."""
        from ortflow.workflow.trainer.check.first_gradient import has_passed

        if self._context.spec.train.check_gradient and not has_passed(key := self.gradient.key()):
            self.gradient.check(samples, key, self._context.report)


class ShardsChecker:
    """On all ranks with shares, on the same micro-batch. `waits`: behind it, ranks wait for each other."""

    def __init__(
        self,
        parts: StepParts,
        passes: ShardPasses,
        parameters: ShardedParameters,
        precision: PrecisionDifference | None,
        *,
        waits: bool,
    ) -> None:
        context = parts.context
        shard, gradients = parameters.shard, parts.update.memory.gradients.part
        part = CheckedPart(
            context.index, shard.part, gradients, start=shard.start, over=context.replicas, exchanging=passes.exchanging
        )
        self._context, self._passes, self._waits = context, passes, waits
        self.gradient = GradientChecker(parts, passes, part, precision)

    def check(self, samples: Iterable[MicroBatch]) -> None:
        """See above. A check without shares does not cover their exchange, and has another key."""
        from ortflow.workflow.trainer.check.first_gradient import has_passed

        context, gradient, ranks = self._context, self.gradient, self._context.replicas
        if not context.spec.train.check_gradient:
            return
        leads, key = ranks.rank == 0, f"{gradient.key()}-shares"
        if not ranks.broadcast_object(leads and has_passed(key)):
            try:
                gradient.check(samples, key, context.report if leads else Report())
            finally:
                self._passes.forget_checked()
        if self._waits:
            # Ranks wait for each other here: NCCL would take a long check for a rank that hangs.
            ranks.barrier()
