"""Compares the gradient of a GPU's training precision with the one in fp32, when the gradient is checked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ortflow.workflow.comm.grid import GridRanks
from ortflow.workflow.trainer.check.checked_part import CheckedPart
from ortflow.workflow.trainer.check.precision_check import compare
from ortflow.workflow.trainer.context import StepContext
from ortflow.workflow.trainer.device_scale import DeviceScale
from ortflow.workflow.trainer.obstacles import draw_alike
from ortflow.workflow.trainer.passes import Passes

Vector = npt.NDArray[np.float32]


class PrecisionDifference:
    """See the module. Graphs that draw different random numbers are not compared."""

    def __init__(self, context: StepContext, passes: Passes, loss_scale: DeviceScale) -> None:
        self._context, self._passes, self._loss_scale = context, passes, loss_scale

    @property
    def comparable(self) -> bool:
        """Whether a difference means anything."""
        sessions = self._context.sessions
        return draw_alike([*self._passes.graphs.compared(sessions), *self._passes.graphs.compared(sessions.exact())])

    def warning(
        self, exact: Vector, gradient: Callable[[], Vector], finite: Callable[[Vector], bool], part: CheckedPart
    ) -> str:
        """See `compare`; the loss scale is the same afterwards. `gradient` computes that of training."""
        with self._loss_scale.varied() as set_to:

            def at(scale: float) -> Vector:
                set_to(scale)
                return gradient()

            return compare(exact, at, finite, part, self._context.spec.train.precision, self._loss_scale.exists)

    def warn(self, exact: Vector, gradient: Callable[[], Vector], part: CheckedPart) -> None:
        """Warn if the gradient of training is far from the one in fp32, of the whole model or of shares."""

        def finite(values: Vector) -> bool:
            return bool(part.totals(np.array([float(not np.isfinite(values).all())]))[0] == 0)

        warning = self.warning(exact, gradient, finite, part)
        if warning and (part.ranks == 1 or self._context.replicas.rank == 0):
            self._context.report.warn(warning)

    def warn_divided(self, exact: Vector, gradient: Callable[[], Vector], part: CheckedPart, ranks: GridRanks) -> None:
        """The same for a rank of a divided model."""

        def finite(values: Vector) -> bool:
            overflows = self._context.device.allocate(1, np.float64)
            overflows.fill(0.0 if np.isfinite(values).all() else 1.0)
            ranks.replica.all_reduce(overflows)
            return bool(overflows.read()[0] == 0)

        warning = self.warning(exact, gradient, finite, part)
        if warning:
            self._context.report.warn(warning)
