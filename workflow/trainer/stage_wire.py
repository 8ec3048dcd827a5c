"""Messages between the stages of a pipeline: activations and their gradients, over a communicator.

Called by `stage_runner`. A receiver must know the shapes. The sender sends them before the first message of each link
whose batch has certain shapes. Later batches of the same shapes need no such message, so that a receive can be posted
before anything is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ortflow.workflow.comm import Communicator, Request
from ortflow.workflow.comm.staged import StagedCommunicator
from ortflow.workflow.device import Device
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.errors import UserError
from ortflow.workflow.parallel.stage import Value
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.buffer_pool import BufferPool, DeviceValue, Shape

Link = tuple[str, int]
"""forward, backward or eval, and the sending stage."""
_MOST_AXES = 8
_KINDS = {"forward": 0, "backward": 1, "eval": 0}
"""Evaluation and training never have messages in progress at the same time."""


@dataclass
class Arrival:
    """Values being received."""

    values: dict[str, DeviceValue]
    requests: list[Request] = field(default_factory=list)

    def wait(self) -> dict[str, DeviceValue]:
        """Block until the values have arrived. Further calls return immediately."""
        requests, self.requests = self.requests, []
        for request in requests:
            request.wait()
        return self.values


class Wire:
    """The messages of one rank of a pipeline; see the module."""

    def __init__(self, pipeline: Communicator, device: Device, stages: int) -> None:
        self._comm, self._stages = pipeline, stages
        self._linked = pipeline
        self.memory = BufferPool(device)
        ranks = pipeline.world_size
        ends = [(number % ranks, (number + 1) % ranks, number) for number in range(stages - 1)]
        forward = [(rank, following, self._tag(("forward", number))) for rank, following, number in ends]
        backward = [(following, rank, self._tag(("backward", number + 1))) for rank, following, number in ends]
        pipeline.connect_links([*forward, *backward], during_passes=True)
        self._shapes: dict[tuple[Link, object], list[Shape]] = {}

    def pass_through_host(self, *, through: bool) -> None:
        """Let messages between GPUs pass through the host's memory, on all ranks of the pipeline alike, or directly."""
        # A message that waits for the other rank on the GPU keeps it busy, and loading a kernel may wait until it is
        # not: two ranks could wait for each other.
        below = getattr(self._linked, "below", None)
        self._comm = StagedCommunicator(below) if through and below is not None else self._linked

    def send(
        self, link: Link, values: Sequence[Value], tensors: Mapping[str, DeviceValue], batch: MicroBatch, to: int
    ) -> Arrival:
        """Begin to send activations.

        Raises
        ------
        UserError
            If their shapes differ from those of an earlier batch of the same shapes.
        """
        key, shapes = (link, signature(batch)), [tensors[value.name].shape for value in values]
        requests = []
        if key not in self._shapes:
            self._shapes[key] = shapes
            header = HostBuffer(_packed(values, shapes))
            requests.append(self._comm.start_send(header, to, self._tag(link, 1)))
        for value, shape, known_shape in zip(values, shapes, self._shapes[key], strict=True):
            if shape != known_shape:
                raise UserError(
                    f"{value.name!r} has the shape {list(shape)}, and {list(known_shape)} in another batch of the same"
                    " shapes, so it cannot go from one stage to the next",
                    where="parallel.cuts",
                    fix="cut the model elsewhere",
                )
        return self._start_send(link, values, tensors, to, requests)

    def send_gradients(
        self, link: Link, values: Sequence[Value], tensors: Mapping[str, DeviceValue], to: int
    ) -> Arrival:
        """Begin to send the gradients of activations, which have the activations' shapes."""
        return self._start_send(link, values, tensors, to, [])

    def knows(self, activations: Link, batch: MicroBatch) -> bool:
        """Whether the shapes of a link's values are known before they are sent."""
        return (activations, signature(batch)) in self._shapes

    def shapes(self, activations: Link, values: Sequence[Value], batch: MicroBatch) -> dict[str, Shape]:
        """Shapes of a link's values, if known."""
        names = (value.name for value in values)
        return dict(zip(names, self._shapes[activations, signature(batch)], strict=True))

    def receive(
        self,
        link: Link,
        values: Sequence[Value],
        batch: MicroBatch,
        source: int,
        into: dict[str, DeviceValue] | None = None,
    ) -> Arrival:
        """Begin to receive activations; waits for their shapes if these are not known.

        `into`: memory to receive in, by value. What is missing is added.
        """
        key = link, signature(batch)
        if key not in self._shapes:
            header = HostBuffer(np.zeros(len(values) * (_MOST_AXES + 1), np.int64))
            self._comm.receive(header, source, self._tag(link, 1))
            self._shapes[key] = _unpacked(header.read(), len(values))
        return self._start_receive(link, values, self._shapes[key], source, into)

    def receive_gradients(
        self,
        link: Link,
        activations: Link,
        sent: Sequence[Value],
        batch: MicroBatch,
        source: int,
        into: dict[str, DeviceValue] | None = None,
    ) -> Arrival:
        """Begin to receive the gradients of `sent`, which this rank sent over the link `activations`.

        `into` is as in `receive`.
        """
        shapes, values = self.shapes(activations, sent, batch), [value for value in sent if value.gradient]
        return self._start_receive(link, values, [shapes[value.name] for value in values], source, into)

    def _start_send(
        self,
        link: Link,
        values: Sequence[Value],
        tensors: Mapping[str, DeviceValue],
        to: int,
        requests: Sequence[Request],
    ) -> Arrival:
        sent = {value.name: tensors[value.name] for value in values}
        started = [self._comm.start_send(tensor.buffer, to, self._tag(link)) for tensor in sent.values()]
        return Arrival(sent, [*requests, *started])

    def _start_receive(
        self,
        link: Link,
        values: Sequence[Value],
        shapes: Sequence[Shape],
        source: int,
        into: dict[str, DeviceValue] | None,
    ) -> Arrival:
        arrival = Arrival({} if into is None else into)
        for value, shape in zip(values, shapes, strict=True):
            if value.name not in arrival.values:
                arrival.values[value.name] = self.memory.take(shape, value.dtype)
            arriving = arrival.values[value.name]
            arrival.requests.append(self._comm.start_receive(arriving.buffer, source, self._tag(link)))
        return arrival

    def _tag(self, link: Link, header: int = 0) -> int:
        kind, stage = link
        return 2 * (_KINDS[kind] * self._stages + stage) + header


def signature(batch: MicroBatch) -> object:
    """Everything that determines the shapes of all values."""
    return tuple((name, array.shape) for name, array in sorted(batch.arrays.items()))


def _packed(values: Sequence[Value], shapes: Sequence[Shape]) -> npt.NDArray[np.int64]:
    rows = np.zeros((len(shapes), _MOST_AXES + 1), np.int64)
    for row, value, shape in zip(rows, values, shapes, strict=True):
        if len(shape) > _MOST_AXES:
            raise UserError(
                f"{value.name!r} has {len(shape)} axes, and a stage sends values of {_MOST_AXES} at most",
                where="parallel.cuts",
                fix="cut the model elsewhere",
            )
        row[0] = len(shape)
        row[1 : 1 + len(shape)] = shape
    return rows.reshape(-1)


def _unpacked(header: npt.NDArray[np.int64], values: int) -> list[Shape]:
    rows = header.reshape(values, _MOST_AXES + 1).tolist()
    return [tuple(row[1 : 1 + row[0]]) for row in rows]
