"""Memory of a pipeline's stages: outputs of graphs, and gradients accumulated over micro-batches.

Called by `stage_runner` and `stage_evaluation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from ortflow.workflow.device import Buffer, Device
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.graph.types import LOSS_SUM, LOSS_WEIGHT
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.trainer.buffer_pool import DeviceValue

_DTYPES = {
    "tensor(bool)": "bool", "tensor(float)": "float32", "tensor(double)": "float64", "tensor(float16)": "float16",
    "tensor(int32)": "int32", "tensor(int64)": "int64", "tensor(int8)": "int8", "tensor(uint8)": "uint8",
    "tensor(uint64)": "uint64", "tensor(uint32)": "uint32", "tensor(int16)": "int16", "tensor(uint16)": "uint16",
    "tensor(bfloat16)": "uint16",
}  # fmt: skip
_BFLOAT16 = 16
"""As ONNX counts types; numpy has none."""


def device_value(value: onnxruntime.OrtValue, device: Device) -> DeviceValue:
    """An output of a binding, in the binding's memory."""
    kind, shape = value.data_type(), tuple(value.shape())
    count, element = math.prod(shape), _BFLOAT16 if kind == "tensor(bfloat16)" else None
    if not count:
        return DeviceValue(device.allocate(0, _DTYPES[kind]), shape, element)
    return DeviceValue(device.view(value.data_ptr(), count, _DTYPES[kind]), shape, element)


def bind_inputs(binding: Binding, values: Mapping[str, DeviceValue]) -> None:
    """Bind values to the inputs of a graph."""
    for name, value in values.items():
        binding.read_from(name, value.buffer, value.shape, value.element)


def handed_out(outputs: Iterable[str], index: FlatIndex) -> list[str]:
    """Outputs of a forward graph other than sums of the loss and running statistics."""
    tied = {LOSS_SUM, LOSS_WEIGHT, *(f"{entry.name}_new" for entry in index)}
    return sorted(name for name in outputs if name not in tied)


def runs(index: FlatIndex, names: Collection[str]) -> Iterator[tuple[int, int]]:
    """Elements [start, stop) of the flat buffer that hold the tensors, adjacent ones joined."""
    start = stop = 0
    for entry in sorted((index[name] for name in names), key=lambda entry: entry.offset):
        follows = not any(stop <= other.offset < entry.offset for other in index) if stop else False
        if not follows:
            if stop:
                yield start, stop
            start = entry.offset
        stop = entry.end
    if stop:
        yield start, stop


class Pool:
    """Bindings of one graph, one per micro-batch whose activations are kept in its memory."""

    def __init__(self, bind: Callable[[], Binding], outputs: Sequence[str]) -> None:
        self._bind, self._outputs = bind, outputs
        self._free: list[Binding] = [bind()]

    def take(self) -> Binding:
        """Return an unused binding."""
        return self._free.pop() if self._free else self._bind()

    def give_back(self, binding: Binding) -> None:
        """Release a binding whose outputs are no longer needed."""
        binding.forget(self._outputs)
        self._free.append(binding)


class GradientSums:
    """The gradients of one stage, summed over the micro-batches of a step in their order.

    The first backward pass of a step writes the gradients of `fresh` to their place. Everything else is written to
    `scratch` and added: further micro-batches, and weights of which another stage of this rank already has a gradient.
    """

    def __init__(
        self,
        index: FlatIndex,
        trained: Sequence[str],
        fresh: Collection[str],
        gradients: Buffer,
        scratch: Buffer | None,
    ) -> None:
        self._index, self._trained, self._fresh = index, trained, fresh
        self._gradients, self._scratch = gradients, scratch
        self._to_add = [self._pairs(name for name in trained if name not in fresh), self._pairs(trained)]

    def _pairs(self, names: Iterable[str]) -> list[tuple[Buffer, Buffer]]:
        spans = list(runs(self._index, list(names))) if self._scratch is not None else []
        scratch = self._scratch
        assert scratch is not None or not spans
        return [(self._gradients.slice(a, b), scratch.slice(a, b)) for a, b in spans if scratch is not None]

    def tie(self, binding: Binding, *, first: bool) -> None:
        """Bind a graph's gradients for the first pass of a step, or for a further one."""
        for name in self._trained:
            target = self._gradients if first and name in self._fresh else self._scratch
            if target is None:
                raise OrtflowError(f"there is no scratch buffer for the gradient of {name!r}")
            entry = self._index[name]
            binding.write_to(f"{name}_grad", target.slice(entry.offset, entry.end), entry.tensor.shape)

    def add(self, *, first: bool) -> None:
        """Add the gradients that a pass wrote to the scratch buffer."""
        for target, addend in self._to_add[0 if first else 1]:
            target.add(addend)
