"""One step of a rank of a pipeline: its forward and backward passes, and the messages between them.

Used by `stage_runner`. Every pass takes its memory from pools; `stage_slots` has the steps whose memory stays in place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortflow.workflow.device import Device
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.parallel.messages import Message, traffic
from ortflow.workflow.parallel.schedule import Action
from ortflow.workflow.parallel.stage import Stage, gradient_from_next, gradient_of
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.buffer_pool import DeviceValue, Shape
from ortflow.workflow.trainer.stage_memory import GradientSums, Pool, bind_inputs, device_value
from ortflow.workflow.trainer.stage_wire import Arrival

if TYPE_CHECKING:
    from ortflow.workflow.trainer.stage_runner import StageRunner

Feed = Callable[[Binding, MicroBatch, int], None]
Work = Sequence[tuple[MicroBatch, int]]
"""The micro-batches of a step, each with its seed."""


@dataclass
class Chunk:
    """One stage of this rank, its graphs tied to the trainer's buffers."""

    stage: Stage
    forward: Pool
    outputs: list[str]
    """What the forward graph makes for later stages and for the backward pass."""
    backward: list[Binding]
    """For the first micro-batch of a step, and for the others; empty if nothing up to here is trained."""
    joined: list[Binding]
    """The two passes as one graph, likewise; of the last stage alone."""
    sums: GradientSums
    bind_forward: Callable[[], Binding]
    """Another binding of the forward graph."""
    bind_backward: Callable[[bool], Binding]
    """Another one like those in `backward`; for the first micro-batch of a step or not."""
    bind_both: Callable[[bool], Binding]


class Step:
    """One step of a runner."""

    def __init__(
        self,
        runner: StageRunner,
        actions: Sequence[Sequence[Action]],
        work: Work,
        feed: Feed,
        before_forward: Callable[[], None],
        after_loss: Callable[[], None],
    ) -> None:
        self._runner, self._work, self._feed = runner, work, feed
        self._before_forward, self._after_loss = before_forward, after_loss
        self._device: Device = runner.device
        self._wire, self._actions = runner.wire, actions[runner.rank]
        own_traffic = traffic(actions, len(runner.stages.stages))[runner.rank]
        self._arriving, self._leaving = own_traffic.arriving, own_traffic.leaving
        self._to_post = sorted(own_traffic.arriving)
        self._posted: dict[int, Arrival] = {}
        self.waited = 0.0
        """Seconds in which this rank waited for messages."""
        self._sent: dict[Message, Arrival] = {}
        self._kept: dict[tuple[int, int], tuple[Binding, dict[str, DeviceValue]]] = {}
        """Chunk and micro-batch -> what its backward pass reads of what it received and made, and in whose memory."""

    def run(self) -> None:
        """All actions of this rank."""
        place = 0
        while place < len(self._actions):
            action = self._actions[place]
            arrived = self._await(place)
            if action.direction == "backward":
                self._backward(place, action, arrived)
            elif self._is_followed_by_backward(place):
                self._both(place, action, arrived)
                place += 1
            else:
                self._forward(place, action, arrived)
            place += 1
        for sent in self._sent.values():
            self._wait(sent)

    def _is_followed_by_backward(self, place: int) -> bool:
        """Whether the two passes of a micro-batch through the last stage run one behind the other, in one graph."""
        action, following = self._actions[place], self._actions[place + 1]
        is_joined = bool(self._runner.chunks[action.chunk].joined)
        return is_joined and following == Action("backward", action.micro_batch, action.chunk)

    def _await(self, place: int) -> dict[str, DeviceValue]:
        """What an action needs of another rank; posts the receives of the next ones."""
        self._post(place)
        message = self._arriving.get(place)
        if message is None:
            return {}
        arrived = self._wait(self._posted.pop(place))
        # The sender has received everything that it needed before: those sends are over, and their memory is free.
        rank, sent_at = message.sender
        for sent in [
            earlier for earlier in self._sent if earlier.receiver[0] == rank and earlier.receiver[1] <= sent_at
        ]:
            self._wait(self._sent.pop(sent))
        return arrived

    def _wait(self, arrival: Arrival) -> dict[str, DeviceValue]:
        start = time.perf_counter()
        values = arrival.wait()
        self.waited += time.perf_counter() - start
        return values

    def _post(self, place: int) -> None:
        """Post the receives of the next actions whose shapes are known, and that of this one in any case."""
        while self._to_post:
            next_one = self._to_post[0]
            message = self._arriving[next_one]
            if next_one > place and not self._may_post(place, next_one, message):
                return
            self._posted[next_one] = self._receive(next_one, message)
            self._to_post.pop(0)

    def _may_post(self, place: int, next_one: int, message: Message) -> bool:
        """Whether to post the receive of a later action now."""
        ahead, batch = sum(posted > place for posted in self._posted), self._work[message.micro_batch][0]
        return ahead < self._runner.ahead and self._wire.knows(_activations(message), batch)

    def _receive(self, place: int, message: Message, into: dict[str, DeviceValue] | None = None) -> Arrival:
        """Begin to receive the message of an action."""
        batch, activations, source = self._work[message.micro_batch][0], _activations(message), message.sender[0]
        values = self._runner.stages.stages[activations[1]].sends
        if message.direction == "forward":
            return self._wire.receive(message.link, values, batch, source, into)
        return self._wire.receive_gradients(message.link, activations, values, batch, source, into)

    def _start(self, binding: Binding, action: Action, stage: Stage, arrived: Mapping[str, DeviceValue]) -> None:
        """Prepare a forward pass."""
        bind_inputs(binding, arrived)
        self._feed_forward(binding, action, stage)

    def _feed_forward(self, binding: Binding, action: Action, stage: Stage) -> None:
        """Feed a graph whose values are bound, and prepare what it draws and updates."""
        batch, seed = self._work[action.micro_batch]
        self._before_forward()
        self._feed(binding, batch, seed)
        # Dropout's masks come from ONNX Runtime's global generator, which goes on by one with each node.
        onnxruntime.set_seed(seed + stage.dropouts)

    def _forward(self, place: int, action: Action, arrived: Mapping[str, DeviceValue]) -> None:
        chunk = self._runner.chunks[action.chunk]
        binding = chunk.forward.take()
        self._start(binding, action, chunk.stage, arrived)
        outputs = binding.run_for(chunk.outputs)
        binding.release(arrived)
        values = {**arrived, **{name: device_value(value, self._device) for name, value in outputs.items()}}
        message = self._leaving.get(place)
        if message is None:
            self._after_loss()
        else:
            batch, to = self._work[action.micro_batch][0], message.receiver[0]
            self._sent[message] = self._wire.send(message.link, chunk.stage.sends, values, batch, to)
        read = chunk.backward[0].inputs if chunk.backward else set[str]()
        read_values = {name: activation for name, activation in values.items() if name in read}
        self._kept[action.chunk, action.micro_batch] = binding, read_values

    def _both(self, place: int, action: Action, arrived: Mapping[str, DeviceValue]) -> None:
        chunk = self._runner.chunks[action.chunk]
        binding = chunk.joined[min(action.micro_batch, len(chunk.joined) - 1)]
        self._start(binding, action, chunk.stage, arrived)
        self._run_back(place + 1, action, binding, {})
        binding.release(arrived)
        self._after_loss()

    def _backward(self, place: int, action: Action, arrived: Mapping[str, DeviceValue]) -> None:
        chunk = self._runner.chunks[action.chunk]
        memory, read_values = self._kept.pop((action.chunk, action.micro_batch))
        if chunk.backward:
            binding = chunk.backward[min(action.micro_batch, len(chunk.backward) - 1)]
            gradients = {gradient_from_next(name): gradient for name, gradient in arrived.items()}
            bind_inputs(binding, {**read_values, **gradients})
            self._feed(binding, *self._work[action.micro_batch])
            self._run_back(place, action, binding, arrived)
            binding.release([*read_values, *gradients])
        else:
            self._send_back(place, chunk.stage, arrived)
        self._await_sent(action)
        chunk.forward.give_back(memory)

    def _await_sent(self, action: Action) -> None:
        """Wait for the activations of a micro-batch that a stage has sent.

        Where no gradient comes back, they may not have been received yet.
        """
        link = ("forward", self._runner.chunks[action.chunk].stage.number)
        for sent in [
            message for message in self._sent if message.link == link and message.micro_batch == action.micro_batch
        ]:
            self._wait(self._sent.pop(sent))

    def _run_back(
        self,
        place: int,
        action: Action,
        binding: Binding,
        arrived: Mapping[str, DeviceValue],
    ) -> None:
        """Run a graph that makes gradients, and send those of what the stage received."""
        chunk, batch = self._runner.chunks[action.chunk], self._work[action.micro_batch][0]
        stage, outputs = chunk.stage, dict[str, DeviceValue]()
        shapes = self._received_shapes(stage, batch)
        for value in stage.receives:
            if value.gradient and value.name not in stage.passed:
                gradient = outputs[value.name] = self._wire.memory.take(shapes[value.name], value.dtype)
                binding.write_to(gradient_of(value.name), gradient.buffer, gradient.shape)
        binding.run()
        chunk.sums.add(first=not action.micro_batch)
        self._send_back(place, stage, {**arrived, **outputs})

    def _received_shapes(self, stage: Stage, batch: MicroBatch) -> Mapping[str, Shape]:
        """Shapes of the values that a stage has received for a micro-batch."""
        return self._wire.shapes(("forward", stage.number - 1), stage.receives, batch) if stage.number else {}

    def _send_back(self, place: int, stage: Stage, gradients: Mapping[str, DeviceValue]) -> None:
        message = self._leaving.get(place)
        if message is not None:
            values = [value for value in stage.receives if value.gradient]
            self._sent[message] = self._wire.send_gradients(message.link, values, gradients, message.receiver[0])


def _activations(message: Message) -> tuple[str, int]:
    """The link of the activations whose shapes a message has."""
    return "forward", message.stage if message.direction == "forward" else message.stage - 1
