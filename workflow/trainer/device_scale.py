"""The loss scale of a run on a GPU: a step adapts it there, so that the next one does not wait for the host.

The host follows by the same rule (`loss_scale`), for the log and for checkpoints. Used by `queued_work`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import onnx

from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cuda_buffer import CudaBuffer
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.optim.after_step import loss_scale_graph
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.trainer.loss_scale import LARGEST, PERIOD, SMALLEST, LossScale


class DeviceScale:
    """`factor`, fp32 [1] on the device: the scale times `unit`, or 1 if gradients are not scaled."""

    def __init__(self, device: CudaDevice, unit: float) -> None:
        self._unit = unit
        self.factor: CudaBuffer = device.allocate(1, np.float32)
        self._good = device.allocate(1, np.float32)
        self.factor.fill(1)
        self._rule: LossScale | None = None

    @property
    def exists(self) -> bool:
        """Whether the gradients of a micro-batch are multiplied by a loss scale."""
        return self._rule is not None

    @property
    def dynamic(self) -> bool:
        """Whether steps change it."""
        return self._rule is not None and self._rule.dynamic

    def set(self, rule: LossScale) -> None:
        """The scale of the next step."""
        self._rule = rule
        self.factor.send(np.array([rule.value * self._unit], np.float32))
        self._good.send(np.array([rule.good], np.float32))

    def adapted(self, open_: Callable[[onnx.ModelProto], Binding], tail: Mapping[str, CudaBuffer]) -> Binding:
        """What adapts it behind a step; `tail`: the step's sums by the names of `loss_scale_graph`."""
        binding = open_(loss_scale_graph(SMALLEST * self._unit, LARGEST * self._unit, PERIOD))
        for name, buffer in (("scale", self.factor), ("good", self._good)):
            binding.read_from(name, buffer, (1,))
            binding.write_to(f"{name}.out", buffer, (1,))
        for name, buffer in tail.items():
            binding.read_from(name, buffer, (1,))
        return binding

    def follow(self, used: float, fault: str | None) -> tuple[bool, str | None]:
        """Follow the device behind a step with a finite loss.

        Parameters
        ----------
        used
            The factor of the step, from the device.
        fault
            Why the step was skipped; None if it was not.

        Returns
        -------
        tuple
            Whether it overflowed for that of its scale, and why it was skipped.

        Raises
        ------
        OrtflowError
            If the device had another scale.
        """
        assert self._rule is not None
        rule = self._rule
        if used != np.float32(rule.value * self._unit):
            raise OrtflowError(f"the GPU's loss scale is {used / self._unit:g}, and the host's {rule.value:g}")
        overflow = fault is not None and rule.can_fall
        if overflow or (fault is not None and not rule.dynamic):
            fault = f"overflow at loss scale {rule.value:g}"
        self._rule = rule.after(fault is not None)
        return overflow, fault

    def numbers(self) -> Mapping[str, float]:
        """Its state, for a checkpoint."""
        return self._rule.numbers() if self._rule is not None else {}

    def restore(self, numbers: Mapping[str, float]) -> None:
        """Set it to a checkpoint's state. Raises ValueError if the numbers are invalid."""
        if self._rule is not None:
            self.set(self._rule.restored(numbers))

    @contextmanager
    def varied(self) -> Iterator[Callable[[float], None]]:
        """Yields a function that sets the device's scale alone; afterwards it is as before."""
        before = self.factor.read()
        try:
            yield lambda scale: self.factor.send(np.array([scale * self._unit], np.float32))
        finally:
            self.factor.send(before)
