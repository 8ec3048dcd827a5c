"""One execution of a node on the device: its tensors, and what an operator may ask for. Operators depend on this."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ortflow.workflow.errors import OrtflowError


@dataclass(frozen=True)
class Tensor:
    """A value on the device."""

    pointer: int
    shape: tuple[int, ...]
    type: int
    """Element type of onnx.TensorProto."""


class Operator(Protocol):
    """Computes one node; created when its session is opened."""

    def __init__(self, attributes: Mapping[str, Any]) -> None: ...

    def run(self, call: Call) -> None:
        """Queue the work. Must not wait or depend on values, since the step may be captured as a CUDA graph."""


class Shards(Protocol):
    """Gathers parameters for the nodes of a graph, and reduces gradients: see `ortflow.workflow.graph.shards.ahead`."""

    def begin(self, number: int, made: Sequence[int]) -> None:
        """Begin to gather the parameters of a step of the program into memory at these addresses."""

    def ready(self, number: int) -> None:
        """Let the nodes that are queued from now on wait for the parameters of a step."""

    def send(self, number: int, given: Sequence[int], held: int) -> None:
        """Begin to reduce the gradients of a step, which lie at these addresses; those of step `held` must have been
        reduced before later nodes run. `number` -1: nothing is sent."""


class Launcher(Protocol):
    """Queues kernels."""

    def launch(
        self,
        source: str,
        function: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        arguments: Sequence[Any],
        shared: int = 0,
        options: Sequence[str] = (),
        stream: int | None = None,
    ) -> None:
        """See `Call.launch`; on another stream than the sessions' if one is given."""


class Owner(Launcher, Protocol):
    """What nodes of all sessions of a process share: `ortflow.workflow.cuda.operators.Operators`."""

    stream: int
    on_bucket: Callable[[int, Sequence[int]], None] | None
    """Called where a bucket of the gradient is complete, with its number and device pointers; None: nobody sums."""
    on_rows: Callable[[int, Tensor, Tensor], None] | None
    """See `Call.rows`."""
    on_collective: Callable[[int, int, int, Tensor, int], None] | None
    """See `Call.collect`; None if no ranks are connected."""
    shards: dict[int, Shards]
    """By channel: what exchanges the parameters and gradients of a graph."""

    @property
    def gpu(self) -> str:
        """See `Call`."""

    @property
    def captured(self) -> bool:
        """See `Call`."""

    @property
    def rounds(self) -> bool:
        """See `Call`."""

    def output(self, call: int, place: int, shape: Sequence[int]) -> int:
        """See `Call`."""

    def scratch(self, size: int) -> int:
        """See `Call`."""

    def counters(self, count: int) -> int:
        """See `Call`."""

    def copy(self, target: int, source: int, size: int) -> None:
        """See `Call`."""


class Call:
    """One execution of one node."""

    def __init__(self, owner: Owner, call: int, inputs: Sequence[Tensor | None], types: Sequence[int]) -> None:
        self._owner, self._call = owner, call
        self.inputs, self.types = inputs, types

    @property
    def stream(self) -> int:
        """The stream to queue the work on."""
        return self._owner.stream

    @property
    def gpu(self) -> str:
        """The model of the GPU."""
        return self._owner.gpu

    @property
    def captured(self) -> bool:
        """Whether the work is noted for a CUDA graph, so that nothing may wait."""
        return self._owner.captured

    @property
    def rounds(self) -> bool:
        """Whether products of fp32 values may round their factors to TF32."""
        return self._owner.rounds

    def given(self, place: int) -> Tensor:
        """A required input."""
        tensor = self.inputs[place]
        assert tensor is not None
        return tensor

    def output(self, place: int, shape: Sequence[int]) -> int:
        """Device pointer to an output, allocated by ONNX Runtime."""
        return self._owner.output(self._call, place, shape)

    def scratch(self, size: int) -> int:
        """Device pointer to at least `size` bytes, which this node may use until it has run."""
        return self._owner.scratch(size)

    def counters(self, count: int) -> int:
        """Device pointer to `count` integers of 32 bits, or more, which are 0, and must be so when the node has run."""
        return self._owner.counters(count)

    def ready(self, bucket: int, gradients: Sequence[int]) -> None:
        """The gradients at these device pointers are queued, and complete the bucket unless it is -1."""
        if self._owner.on_bucket is not None:
            self._owner.on_bucket(bucket, gradients)

    def rows(self, table: int, indices: Tensor, gradient: Tensor) -> None:
        """Hand over the gradient of rows of a table, which lies in these tensors until the next node runs."""
        if self._owner.on_rows is None:
            raise OrtflowError(f"nobody adds up the gradient of table {table}")
        self._owner.on_rows(table, indices, gradient)

    def shards(self, channel: int) -> Shards:
        """What exchanges parameters and gradients for the graph of this channel."""
        exchange = self._owner.shards.get(channel)
        if exchange is None:
            raise OrtflowError(f"channel {channel} of a graph is not connected to an exchange of parameters")
        return exchange

    def copy(self, target: int, source: int, size: int) -> None:
        """Queue a copy of bytes on the device."""
        self._owner.copy(target, source, size)

    def collect(self, kind: int, channel: int, parts: int, source: Tensor, target: int) -> None:
        """Queue a collective over the ranks of a channel; `target` is the pointer to its result."""
        if self._owner.on_collective is None:
            raise OrtflowError("no communicator is connected to this process's sessions")
        self._owner.on_collective(kind, channel, parts, source, target)

    def launch(
        self,
        source: str,
        function: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *arguments: Any,
        shared: int = 0,
        options: Sequence[str] = (),
    ) -> None:
        """Queue a kernel of a CUDA source; the arguments are ctypes values."""
        self._owner.launch(source, function, grid, block, arguments, shared, options)


class PlacedCall(Call):
    """One execution of an operator outside of a session. Its output is memory at a given address."""

    def __init__(self, owner: Owner, inputs: Sequence[Tensor | None], target: Tensor) -> None:
        super().__init__(owner, 0, inputs, [target.type])
        self._target = target

    def output(self, place: int, shape: Sequence[int]) -> int:
        """Device pointer to the only output. Raises OrtflowError if it has another shape."""
        if place or tuple(shape) != self._target.shape:
            raise OrtflowError(f"output {place} has shape {list(shape)}, and its memory {list(self._target.shape)}")
        return self._target.pointer
