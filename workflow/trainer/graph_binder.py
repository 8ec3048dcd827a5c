"""Binds the graphs of passes to the flat buffers, and feeds them micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ortflow.workflow.device import Buffer, Device
from ortflow.workflow.device.shard import Sliced
from ortflow.workflow.graph.types import LOSS_SUM, LOSS_WEIGHT, SEED, VALID
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.buffers import StepBuffers
from ortflow.workflow.trainer.work import Work

if TYPE_CHECKING:
    from ortflow.workflow.trainer.rounded import Rounded


class GraphBinder:
    """Ties graphs to what this rank holds of the parameters, and to the step's buffers."""

    def __init__(self, index: FlatIndex, parameters: Sliced, buffers: StepBuffers, work: Work) -> None:
        self.index, self._parameters, self.buffers, self._work = index, parameters, buffers, work

    def training(
        self,
        session: onnxruntime.InferenceSession,
        device: Device,
        gradients: Buffer,
        rounded: Rounded | None = None,
    ) -> Binding:
        """A graph of a forward and a backward pass, or of one of them. It may lack some inputs and outputs."""
        binding, buffers = self.evaluation(session, device), self.buffers
        first_state = buffers.state_span[0]
        for entry in self.index:
            gradient, new = f"{entry.name}_grad", f"{entry.name}_new"
            if gradient in binding.outputs:
                binding.write_to(gradient, gradients.slice(entry.offset, entry.end), entry.tensor.shape)
            if new in binding.outputs:
                start = entry.offset - first_state
                end = start + entry.tensor.count
                binding.read_from(entry.name, buffers.running.slice(start, end), entry.tensor.shape)
                binding.write_to(new, buffers.statistics.slice(start, end), entry.tensor.shape)
        for place, name in enumerate((LOSS_SUM, LOSS_WEIGHT)):
            if name in binding.outputs:
                binding.write_to(name, buffers.sums.slice(place, place + 1), ())
        self._work.tie_training(binding)
        if rounded is not None:
            rounded.bind_inputs(binding, self.index)
        return binding

    def evaluation(self, session: onnxruntime.InferenceSession, device: Device) -> Binding:
        """A graph that reads parameters."""
        binding = Binding(session, device)
        binding.read_tensors(self.index, self._parameters)
        return binding


def feed(binding: Binding, batch: MicroBatch, seed: int) -> None:
    """Bind a micro-batch to what a graph reads of it."""
    for name, array in batch.arrays.items():
        if name in binding.inputs:
            binding.feed(name, array)
    if VALID in binding.inputs:
        binding.feed(VALID, np.array([batch.count], np.int64))
    if SEED in binding.inputs:
        binding.feed(SEED, np.array([seed], np.int64))


def feed_training(binding: Binding, batch: MicroBatch, seed: int) -> None:
    """The same of a training graph. The random numbers of a pass are repeated by a resumed run."""
    feed(binding, batch, seed)
    # Dropout's masks come from ONNX Runtime's global generator.
    onnxruntime.set_seed(seed)


def feed_ahead(binding: Binding, batches: Sequence[MicroBatch]) -> None:
    """Begin to copy the first micro-batch of a step. Further ones are copied while the first one is computed."""
    first = next((batch for batch in batches if batch.count), None)
    for name, array in first.arrays.items() if first is not None else ():
        binding.prefetch(name, array)
