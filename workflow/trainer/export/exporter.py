"""The export of the trained model: from this rank's parameters, or from those that all ranks lend rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ortflow.workflow.comm import Communicator
from ortflow.workflow.device.shard import Sliced
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.context import StepContext
from ortflow.workflow.trainer.export.inference import export_checked
from ortflow.workflow.trainer.export.lent_tensors import LentTensors
from ortflow.workflow.trainer.export.mapped_export import export_mapped
from ortflow.workflow.trainer.export.watched_logits import watch_logits
from ortflow.workflow.trainer.parameters import WholeParameters

Range = tuple[int, int]


class Exporter(Protocol):
    """See the module; its methods are those of `Trainer`."""

    def before_export(self) -> None:
        """See `Trainer`."""
        return

    def lend(self) -> None:
        """See `Trainer`."""
        return

    def after_export(self) -> None:
        """See `Trainer`."""
        return

    def export(
        self, path: Path, samples: Sequence[MicroBatch], tolerance: float | None, *, trial: bool
    ) -> float | None:
        """See `Trainer`."""


class WholeExporter(Exporter):
    """From this rank's parameters, which are all."""

    def __init__(self, context: StepContext, parameters: WholeParameters) -> None:
        self._context, self._parameters = context, parameters

    def export(
        self, path: Path, samples: Sequence[MicroBatch], tolerance: float | None, *, trial: bool
    ) -> float | None:
        """See the protocol."""
        context = self._context
        exact, graphs = context.sessions.exact(), context.graphs
        watch = watch_logits(graphs, context.spec.onnx_model.loss, context.report) if trial else None
        return export_checked(
            graphs, self._parameters.buffer, exact, path, samples, tolerance, trial=trial, watch=watch
        )  # fmt: skip


class LentExporter(Exporter):
    """From the parameters of all ranks, one tensor at a time.

    `ranges_of`: the elements of the whole model's flat buffer that a rank sends; see `LentTensors`.
    """

    def __init__(
        self,
        context: StepContext,
        graphs: GraphSet,
        world: Communicator,
        ranges_of: Callable[[int], Sequence[Range]],
        local: Callable[[], Sliced],
    ) -> None:
        self._context, self._graphs, self._world, self._ranges_of, self._local = (
            context, graphs, world, ranges_of, local,
        )  # fmt: skip
        self.lent: LentTensors | None = None

    def before_export(self) -> None:
        """See the protocol."""
        self.lent = LentTensors(self._world, self._graphs.index, self._ranges_of, self._local())

    def lend(self) -> None:
        """See the protocol."""
        assert self.lent is not None
        self.lent.lend()

    def after_export(self) -> None:
        """See the protocol."""
        assert self.lent is not None
        self.lent.end()

    def export(
        self, path: Path, samples: Sequence[MicroBatch], tolerance: float | None, *, trial: bool
    ) -> float | None:
        """See the protocol."""
        assert self.lent is not None
        context, graphs = self._context, self._graphs
        watch = watch_logits(graphs, context.spec.onnx_model.loss, context.report) if trial else None
        return export_mapped(
            graphs, self.lent, context.sessions, path, samples, tolerance, trial=trial, watch=watch
        )  # fmt: skip
