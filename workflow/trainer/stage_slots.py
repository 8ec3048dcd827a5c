"""Passes of a pipeline's stages on memory that stays where it is, so that a GPU repeats them as CUDA graphs.

Used by `stage_runner` for steps whose micro-batches have the shapes of those before. Messages are queued between the
passes. A slot is the memory of one micro-batch in one chunk: the schedule gives it to the same micro-batches in every
step. Nothing here waits for the GPU once the passes are captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ortflow.workflow.device import Device
from ortflow.workflow.device.capture import Repeated
from ortflow.workflow.parallel.messages import Message
from ortflow.workflow.parallel.schedule import Action
from ortflow.workflow.parallel.stage import gradient_from_next, gradient_of
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.trainer.buffer_pool import DeviceValue, Shape
from ortflow.workflow.trainer.stage_memory import bind_inputs, device_value
from ortflow.workflow.trainer.stage_step import Chunk, Step
from ortflow.workflow.trainer.stage_wire import Arrival, Wire

Repeat = Callable[[str, Callable[[], None], Binding], Repeated]
"""Makes repeated work of a pass, given its name in the log and the binding that it runs."""
REACH = 1
"""Actions before the one that needs a message, from which on its receive is posted. A waiting receive keeps a part of
the GPU busy."""


class Slot:
    """The memory of one micro-batch in a chunk, and the passes on it."""

    def __init__(self, chunk: Chunk, repeat: Repeat, memory_taken: Callable[[], None]) -> None:
        self.chunk, self._repeat, self._memory_taken = chunk, repeat, memory_taken
        self.received: dict[str, DeviceValue] = {}
        """What arrives for the forward pass; filled by `Wire.receive`."""
        self.from_next: dict[str, DeviceValue] = {}
        """What arrives for the backward pass."""
        self.outputs: dict[str, DeviceValue] = {}
        """What the forward pass makes."""
        self._back: dict[str, DeviceValue] = {}
        """Gradients that go to the stage before."""
        self.sent_back: Arrival | None = None
        """The message with the gradients of the micro-batch before."""
        self._forward: tuple[Binding, Repeated] | None = None
        self._backward: dict[tuple[bool, bool], tuple[Binding, Repeated]] = {}

    def settle(self) -> None:
        """Let later work wait until the gradients that were sent from here have been received."""
        if self.sent_back is not None:
            self.sent_back.wait()
            self.sent_back = None

    def forward(self, start: Callable[[Binding], None], device: Device) -> None:
        """Run the forward pass; `start` feeds its graph."""
        if self._forward is not None:
            binding, repeated = self._forward
            start(binding)
            repeated.run(binding.fed)
            return
        binding = self.chunk.bind_forward()
        bind_inputs(binding, self.received)
        start(binding)
        values = binding.run_for(self.chunk.outputs)
        self._memory_taken()
        self.outputs = {name: device_value(value, device) for name, value in values.items()}
        binding.keep(values)
        self._forward = binding, self._repeat("the forward pass of a stage", binding.run, binding)

    def backward(
        self,
        start: Callable[[Binding], None],
        wire: Wire,
        shapes: Mapping[str, Shape],
        *,
        with_forward: bool,
        first: bool,
    ) -> dict[str, DeviceValue]:
        """Run a graph that makes gradients.

        Parameters
        ----------
        start
            Feeds the graph.
        wire
            Has memory.
        shapes
            Of the values that this stage received.
        with_forward
            Whether the graph contains the forward pass.
        first
            Whether this is the first micro-batch of the step.

        Returns
        -------
        dict
            The gradients that this rank may send back.
        """
        key = with_forward, first
        if key not in self._backward:
            self._backward[key] = self._bind_backward(wire, shapes, with_forward=with_forward, first=first)
        binding, repeated = self._backward[key]
        start(binding)
        repeated.run(binding.fed)
        return {**self.from_next, **self._back}

    def _bind_backward(
        self, wire: Wire, shapes: Mapping[str, Shape], *, with_forward: bool, first: bool
    ) -> tuple[Binding, Repeated]:
        chunk = self.chunk
        binding = (chunk.bind_both if with_forward else chunk.bind_backward)(first)
        bind_inputs(binding, {**self.received, **self.outputs})
        bind_inputs(binding, {gradient_from_next(name): gradient for name, gradient in self.from_next.items()})
        for value in chunk.stage.receives:
            name = value.name
            if value.gradient and name not in chunk.stage.passed:
                if name not in self._back:
                    self._back[name] = wire.memory.take(shapes[name], value.dtype)
                binding.write_to(gradient_of(name), self._back[name].buffer, self._back[name].shape)

        def run() -> None:
            binding.run()
            chunk.sums.add(first=first)

        passes = "both passes of a stage" if with_forward else "the backward pass of a stage"
        return binding, self._repeat(passes, run, binding)

    @property
    def passes(self) -> list[Repeated]:
        """What is repeated here."""
        forward = [self._forward] if self._forward is not None else []
        return [repeated for _, repeated in (*forward, *self._backward.values())]


class Slots:
    """The slots of a rank; those that no micro-batch has at the moment are taken in their order."""

    def __init__(self, chunks: Sequence[Chunk], repeat: Repeat) -> None:
        self._chunks, self._repeat = chunks, repeat
        self._all: list[list[Slot]] = [[] for _ in chunks]
        self._free: list[list[int]] = [[] for _ in chunks]
        self.reach = 0
        """As `REACH`; none in the first step, in which memory is allocated."""

    def take(self, chunk: int) -> Slot:
        """A free slot of a chunk, or a new one."""
        unused, slots = self._free[chunk], self._all[chunk]
        if unused:
            number = min(unused)
            unused.remove(number)
            return slots[number]
        slots.append(Slot(self._chunks[chunk], self._repeat, self.forget))
        return slots[-1]

    def give_back(self, chunk: int, slot: Slot) -> None:
        """Whatever is queued from now on may overwrite the slot."""
        self._free[chunk].append(self._all[chunk].index(slot))

    def step(self, *arguments: Any) -> SlotStep:
        """A step on these slots."""
        return SlotStep(self, *arguments)

    def prepare(self) -> None:
        """Capture the passes that have run often enough."""
        if not self.reach:
            # With receives ahead, the next step takes more slots.
            self.reach = REACH
            return
        for repeated in self._passes:
            repeated.prepare()

    def forget(self) -> None:
        """Give the captured passes back."""
        # They use memory that ONNX Runtime had free when they were captured, and does not keep for them: what a slot
        # holds from now on may lie there.
        for repeated in self._passes:
            repeated.forget()

    @property
    def _passes(self) -> list[Repeated]:
        return [repeated for slots in self._all for slot in slots for repeated in slot.passes]


class SlotStep(Step):
    """A step on slots; see the module."""

    def __init__(self, slots: Slots, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._slots = slots
        self._taken: dict[tuple[int, int], Slot] = {}
        """Chunk and micro-batch -> slot."""

    def _slot(self, action: Action) -> Slot:
        key = action.chunk, action.micro_batch
        if key not in self._taken:
            self._taken[key] = self._slots.take(action.chunk)
        return self._taken[key]

    def _give_back(self, action: Action) -> None:
        self._slots.give_back(action.chunk, self._taken.pop((action.chunk, action.micro_batch)))

    def _may_post(self, place: int, next_one: int, message: Message) -> bool:
        return next_one <= place + self._slots.reach

    def _receive(self, place: int, message: Message, into: dict[str, DeviceValue] | None = None) -> Arrival:
        action = self._actions[place]
        # The action that runs before the receive is needed must not be given the slot of this one.
        slot = self._slot(action)
        slot.settle()
        return super()._receive(place, message, slot.received if action.direction == "forward" else slot.from_next)

    def _begin(self, action: Action, *, forward: bool) -> Callable[[Binding], None]:
        """Feeds a graph; before a forward pass, also prepares what it draws and updates."""
        if forward:
            stage = self._runner.chunks[action.chunk].stage
            return lambda binding: self._feed_forward(binding, action, stage)
        return lambda binding: self._feed(binding, *self._work[action.micro_batch])

    def _forward(self, place: int, action: Action, arrived: Mapping[str, DeviceValue]) -> None:
        slot = self._slot(action)
        slot.settle()
        slot.forward(self._begin(action, forward=True), self._device)
        message = self._leaving.get(place)
        if message is None:
            self._after_loss()
            return
        batch, values = self._work[action.micro_batch][0], {**slot.received, **slot.outputs}
        self._sent[message] = self._wire.send(message.link, slot.chunk.stage.sends, values, batch, message.receiver[0])

    def _both(self, place: int, action: Action, arrived: Mapping[str, DeviceValue]) -> None:
        self._backward_in(self._slot(action), place + 1, action, forward=True)
        self._after_loss()
        self._give_back(action)

    def _backward(self, place: int, action: Action, arrived: Mapping[str, DeviceValue]) -> None:
        slot = self._slot(action)
        if slot.chunk.backward:
            self._backward_in(slot, place, action, forward=False)
        else:
            self._send_from(slot, place, slot.from_next)
        self._await_sent(action)
        self._give_back(action)

    def _backward_in(self, slot: Slot, place: int, action: Action, *, forward: bool) -> None:
        slot.settle()
        stage, batch = slot.chunk.stage, self._work[action.micro_batch][0]
        shapes = self._received_shapes(stage, batch)
        start = self._begin(action, forward=forward)
        gradients = slot.backward(start, self._wire, shapes, with_forward=forward, first=not action.micro_batch)
        self._send_from(slot, place, gradients)

    def _send_from(self, slot: Slot, place: int, gradients: Mapping[str, DeviceValue]) -> None:
        self._send_back(place, slot.chunk.stage, gradients)
        if (message := self._leaving.get(place)) is not None:
            slot.sent_back = self._sent[message]
