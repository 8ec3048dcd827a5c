"""The parameters of a GPU run in half precision once more, in 16 bits, as the training graph reads them.

Used by `queued_work`. The update writes them together with the parameters. Whatever else writes parameters (loading,
a checkpoint, the check of the gradient) does so through their buffer, which counts writes: then they are rounded anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from onnx import TensorProto

from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cuda_buffer import CudaBuffer
from ortflow.workflow.fusion.rounded import ROUNDED, rounding
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.optim.segments import Segment
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions

AT_A_TIME = 1 << 28
"""Elements that one run of the rounding graph takes: ONNX Runtime's Cast counts in 32 bits."""


class Rounded:
    """The first elements of `parameters` as halves of the element type `kind`; `inputs`: graph input -> parameter."""

    def __init__(self, sessions: Sessions, parameters: CudaBuffer, kind: int, inputs: Mapping[str, str]) -> None:
        device = sessions.device
        assert isinstance(device, CudaDevice)
        self._parameters, self._kind, self._inputs = parameters, kind, inputs
        # numpy has no bfloat16: 16 bits, and the type by its number.
        of_numpy = kind == TensorProto.FLOAT16
        self._halves = device.allocate(parameters.count, np.float16 if of_numpy else np.uint16)
        self._element = None if of_numpy else kind
        self._rounding = Binding(sessions.open(rounding(kind).SerializeToString()), device)
        self.seen: int | None = None
        self.written = True
        """Whether every update that was bound writes the halves of its parameters."""

    def bind_inputs(self, training: Binding, index: FlatIndex) -> None:
        """Let a training graph read the halves."""
        entries = {entry.name: entry for entry in index}
        for name, parameter in self._inputs.items():
            entry = entries[parameter]
            halves = self._halves.slice(entry.offset, entry.end)
            training.read_from(name, halves, entry.tensor.shape, self._element)

    def bind_update(self, update: Binding, cuts: Sequence[Segment]) -> None:
        """Let an update write the halves of some segments, if its graph computes all of them, of this type."""
        names = [f"{ROUNDED}{number}" for number in range(len(cuts))]
        writes = all(update.element_of(name) == self._kind for name in names)
        self.written = self.written and writes
        for name, cut in zip(names, cuts, strict=True):
            if writes:
                update.write_to(name, self._halves.slice(cut.start, cut.stop), (cut.count,), self._element)

    def updated(self) -> None:
        """Called behind each update."""
        if not self.written:
            self.seen = None

    def refresh(self) -> None:
        """Called before each pass: round what has been written since."""
        if self.seen == self._parameters.writes:
            return
        for start in range(0, self._parameters.count, AT_A_TIME):
            stop = min(start + AT_A_TIME, self._parameters.count)
            shape = (stop - start,)
            self._rounding.read_from("parameters", self._parameters.slice(start, stop), shape)
            self._rounding.write_to("rounded", self._halves.slice(start, stop), shape, self._element)
            self._rounding.run()
        self.seen = self._parameters.writes
