"""The outputs of evaluation graphs that are added up, in one flat buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ortflow.workflow.device import Device
from ortflow.workflow.errors import UserError
from ortflow.workflow.sessions.binding import Binding

ADDED = ("_sum", "_weight", "_sums")
"""Ends of the outputs that are added up over batches and ranks."""
GATHERED = ("_scores", "_truths")
"""Ends of the outputs that are gathered."""
Shapes = Mapping[str, tuple[int, ...]]


def metric_shapes(evaluation: Binding) -> dict[str, tuple[int, ...]]:
    """The outputs of an evaluation graph that are added up, in order, and their shapes: scalars or vectors.

    Raises UserError if the shape of a user's own output is not fixed.
    """
    shapes = {}
    for name in sorted(evaluation.shapes):
        if not name.startswith("ortflow.") or not name.endswith(ADDED):
            continue
        shape = evaluation.shapes[name]
        shapes[name] = tuple(length for length in shape if isinstance(length, int))
        if len(shapes[name]) < len(shape):
            fix = "give it a fixed shape"
            raise UserError(f"output {name!r} has no fixed shape", where="model.graphs.eval", fix=fix)
    return shapes


class MetricSums:
    """All metrics' sums of a micro-batch, one after the other, fp32."""

    def __init__(self, device: Device, shapes: Shapes) -> None:
        self._shapes = shapes
        self.count = sum(map(math.prod, shapes.values()))
        self._buffer = device.allocate(self.count, np.float32)

    def tie(self, binding: Binding) -> None:
        """Let a graph write those that it computes."""
        start = 0
        for name, shape in self._shapes.items():
            end = start + math.prod(shape)
            if name in binding.outputs:
                binding.write_to(name, self._buffer.slice(start, end), shape)
            start = end

    def read(self) -> npt.NDArray[np.float32]:
        """Those of the last micro-batch."""
        return self._buffer.read()

    def by_name(self, totals: npt.NDArray[np.float64]) -> dict[str, npt.NDArray[np.float64]]:
        """Totals of all metrics, by output."""
        pieces = np.split(totals[: self.count], np.cumsum([math.prod(shape) for shape in self._shapes.values()]))
        return dict(zip(self._shapes, pieces, strict=False))
