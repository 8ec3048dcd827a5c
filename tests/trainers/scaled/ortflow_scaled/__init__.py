"""The linear trainer with gradients that overflow as in fp16 if the loss scale is too large; for one rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ortflow_linear import LinearBuilder, LinearTrainer

from ortflow.workflow.comm import Communicator
from ortflow.workflow.device import Device
from ortflow.workflow.trainer import MicroBatch, StepOutcome
from ortflow.workflow.trainer.loss_scale import LossScale


class ScaledBuilder(LinearBuilder):
    """Opens the trainer below."""

    def open(
        self,
        communicator: Communicator,
        device: Device,
        threads: int,
        machines: Sequence[Any],
        *,
        training: bool = True,
    ) -> ScaledTrainer:
        return ScaledTrainer(self._context, self._features(), communicator, device)


class ScaledTrainer(LinearTrainer):
    """Skips steps whose gradients would overflow in fp16."""

    scaler = LossScale()

    def step(self, batches: Sequence[MicroBatch], *, control_values: Sequence[float], **rest: Any) -> StepOutcome:
        scaler, largest = self.scaler, 0.0
        for batch in batches:
            inputs, error = self._error(batch)
            largest = max(largest, float(np.abs(2 * inputs.T @ error).max()))
        overflow = largest * scaler.value > np.finfo(np.float16).max
        self.scaler = scaler.after(overflow)
        if not overflow:
            return super().step(batches, control_values=control_values, **rest)
        samples = sum(batch.count for batch in batches)
        reason = f"overflow at loss scale {scaler.value:g}"
        return StepOutcome(1.0, math.inf, samples, np.array(control_values, np.float32), reason, overflow=True)

    def numbers(self) -> Mapping[str, float]:
        return self.scaler.numbers()

    def restore(self, numbers: Mapping[str, float]) -> None:
        self.scaler = self.scaler.restored(numbers)
