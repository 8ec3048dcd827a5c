"""Runs the stages that one rank has of a pipeline: the forward and backward passes of a step, in the schedule's order.

Called by the trainer of a divided model. Receives are posted ahead of the passes that need them, sends go on while the
next pass runs, and gradients are added up in the order of the micro-batches. `stage_wire` carries the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ortflow.workflow.comm import Communicator
from ortflow.workflow.device import Buffer, Device
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.parallel.messages import Message, traffic
from ortflow.workflow.parallel.schedule import Action, Kind, schedule
from ortflow.workflow.parallel.stage import Stage, StageSet, gradient_from_next, gradient_of
from ortflow.workflow.sessions.session import Binding, Sessions
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.recycled import Held
from ortflow.workflow.trainer.stage_memory import GradientSums, Pool, give, handed_out, held
from ortflow.workflow.trainer.stage_wire import Arrival, Wire

AHEAD = 2
"""Messages whose receives are posted before the passes that need them."""

Bind = Callable[[onnxruntime.InferenceSession, Buffer], Binding]
Feed = Callable[[Binding, MicroBatch, int], None]


@dataclass
class Chunk:
    """One stage of this rank, its graphs tied to the trainer's buffers."""

    stage: Stage
    forward: Pool
    made: list[str]
    """What the forward graph makes for later stages and for the backward pass."""
    backward: list[Binding]
    """For the first micro-batch of a step, and for the others; empty if nothing up to here is trained."""
    both: list[Binding]
    """The two passes as one graph, likewise; of the last stage alone."""
    sums: GradientSums


class StageRunner:
    """See the module.

    Parameters
    ----------
    stages
        The stages of the whole pipeline.
    kind
        The schedule.
    pipeline
        The ranks of this pipeline, in the order of the stages.
    sessions
        Of this rank.
    index
        Where what this rank holds lies in its flat buffers.
    bind
        Ties a graph to the trainer's parameters, running statistics and sums of the loss.
    gradients
        The rank's flat gradients.
    scratch
        As large, for gradients that are added; None if steps have one micro-batch and the rank one stage.
    """

    def __init__(
        self,
        stages: StageSet,
        kind: Kind,
        pipeline: Communicator,
        sessions: Sessions,
        index: FlatIndex,
        bind: Bind,
        gradients: Buffer,
        scratch: Buffer | None,
    ) -> None:
        self.stages, self._kind, self.rank = stages, kind, pipeline.rank
        self.wire, self.device = Wire(pipeline, sessions.device, len(stages.stages)), sessions.device
        self._sessions, self._index, self._bind = sessions, index, bind
        self._gradients, self._scratch = gradients, scratch
        self.ahead = 0
        """Receives posted ahead: none in the first step, in which memory grows and kernels are loaded.

        A GPU may have to be idle for both, and a message in progress keeps it busy.
        """
        mine = stages.of_rank(self.rank)
        # The last chunk's backward pass is the first of all: what it has a gradient of, other chunks add to.
        first = {name: number for number, stage in enumerate(mine) for name in stage.trained}
        self.chunks = [
            self._open(stage, {name for name in stage.trained if first[name] == number})
            for number, stage in enumerate(mine)
        ]
        trained = [entry for entry in index if entry.end <= gradients.count and entry.name not in first]
        self._unwritten = [gradients.slice(entry.offset, entry.end) for entry in trained]
        """Gradients that no stage of this rank has: other stages that hold the weight may."""

    def _open(self, stage: Stage, fresh: set[str]) -> Chunk:
        stages, number = self.stages, stage.number
        sums = GradientSums(self._index, stage.trained, fresh, self._gradients, self._scratch)

        def passes(session: onnxruntime.InferenceSession) -> list[Binding]:
            found = []
            for first in (True, False) if self._scratch is not None else (True,):
                found.append(self._bind(session, self._gradients))
                sums.tie(found[-1], first=first)
            return found

        session = self._sessions.open_fastest(stages.forward(number))
        made = handed_out((output.name for output in session.get_outputs()), self._index)
        forward = Pool(lambda: self._bind(session, self._gradients), made)
        backward: list[Binding] = []
        if stages.backward(number).exists():
            backward = passes(self._sessions.open_fastest(stages.backward(number)))
        both: list[Binding] = []
        if number == len(stages.stages) - 1 and self._kind != "gpipe":
            both = passes(self._sessions.open_fastest(stages.both(number)))
        return Chunk(stage, forward, made, backward, both, sums)

    def reads(self, name: str) -> bool:
        """Whether a graph of this rank has an input of this name."""
        return any(name in each.inputs for chunk in self.chunks for each in (*chunk.backward, *chunk.both))

    def run(
        self,
        batches: Sequence[MicroBatch],
        seeds: Sequence[int],
        *,
        feed: Feed,
        before_forward: Callable[[], None],
        after_loss: Callable[[], None],
    ) -> None:
        """All passes of a step; the gradient buffer then holds the sums over the micro-batches.

        Parameters
        ----------
        batches, seeds
            As of `Trainer.step`, and the same on all ranks of the pipeline. Batches of no sample are left out.
        feed
            Feeds a micro-batch to what a graph reads of it.
        before_forward
            Called before each forward pass: running statistics move on.
        after_loss
            Called on the last stage when the loss of a micro-batch is there, in the order of the micro-batches.
        """
        work = [(batch, seed) for batch, seed in zip(batches, seeds, strict=True) if batch.count]
        if not work:
            self._gradients.fill(0)
            return
        if len(work) > 1 and self._scratch is None:
            raise ValueError("several micro-batches need a scratch buffer")
        for unwritten in self._unwritten:
            unwritten.fill(0)
        actions = schedule(self._kind, self.stages.ranks, len(work), self.stages.chunks)
        Step(self, actions, work, feed, before_forward, after_loss).run()
        self.ahead = AHEAD


class Step:
    """One step of a runner."""

    def __init__(
        self,
        runner: StageRunner,
        actions: Sequence[Sequence[Action]],
        work: Sequence[tuple[MicroBatch, int]],
        feed: Feed,
        before_forward: Callable[[], None],
        after_loss: Callable[[], None],
    ) -> None:
        self._runner, self._work, self._feed = runner, work, feed
        self._before_forward, self._after_loss = before_forward, after_loss
        self._device: Device = runner.device
        self._wire, self._actions = runner.wire, actions[runner.rank]
        mine = traffic(actions, len(runner.stages.stages))[runner.rank]
        self._arriving, self._leaving = mine.arriving, mine.leaving
        self._to_post = sorted(mine.arriving)
        self._posted: dict[int, Arrival] = {}
        self._sent: dict[Message, Arrival] = {}
        self._kept: dict[tuple[int, int], tuple[Binding, dict[str, Held]]] = {}
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
            sent.wait()

    def _is_followed_by_backward(self, place: int) -> bool:
        """Whether the two passes of a micro-batch through the last stage run one behind the other, in one graph."""
        action, following = self._actions[place], self._actions[place + 1]
        whole = bool(self._runner.chunks[action.chunk].both)
        return whole and following == Action("backward", action.micro_batch, action.chunk)

    def _await(self, place: int) -> dict[str, Held]:
        """What an action needs of another rank; posts the receives of the next ones."""
        self._post(place)
        message = self._arriving.get(place)
        if message is None:
            return {}
        arrived = self._posted.pop(place).wait()
        # The sender has received everything that it needed before: those sends are over, and their memory is free.
        rank, sent_at = message.sender
        for sent in [each for each in self._sent if each.receiver[0] == rank and each.receiver[1] <= sent_at]:
            self._sent.pop(sent).wait()
        return arrived

    def _post(self, place: int) -> None:
        """Post the receives of the next actions whose shapes are known, and that of this one in any case."""
        while self._to_post:
            next_one = self._to_post[0]
            message = self._arriving[next_one]
            batch, forward = self._work[message.micro_batch][0], message.direction == "forward"
            activations = ("forward", message.stage if forward else message.stage - 1)
            ahead = sum(posted > place for posted in self._posted)
            if next_one > place and (ahead >= self._runner.ahead or not self._wire.knows(activations, batch)):
                return
            values, source = self._runner.stages.stages[activations[1]].sends, message.sender[0]
            if forward:
                self._posted[next_one] = self._wire.receive(message.link, values, batch, source)
            else:
                self._posted[next_one] = self._wire.receive_gradients(message.link, activations, values, batch, source)
            self._to_post.pop(0)

    def _start(self, binding: Binding, action: Action, stage: Stage, arrived: Mapping[str, Held]) -> None:
        """Prepare a forward pass."""
        batch, seed = self._work[action.micro_batch]
        self._before_forward()
        give(binding, arrived)
        self._feed(binding, batch, seed)
        # Dropout's masks come from ONNX Runtime's global generator, which goes on by one with each node.
        onnxruntime.set_seed(seed + stage.dropouts)

    def _forward(self, place: int, action: Action, arrived: Mapping[str, Held]) -> None:
        chunk = self._runner.chunks[action.chunk]
        binding = chunk.forward.take()
        self._start(binding, action, chunk.stage, arrived)
        made = binding.run_for(chunk.made)
        binding.release(arrived)
        values = {**arrived, **{name: held(value, self._device) for name, value in made.items()}}
        message = self._leaving.get(place)
        if message is None:
            self._after_loss()
        else:
            batch, to = self._work[action.micro_batch][0], message.receiver[0]
            self._sent[message] = self._wire.send(message.link, chunk.stage.sends, values, batch, to)
        read = chunk.backward[0].inputs if chunk.backward else set[str]()
        kept = {name: each for name, each in values.items() if name in read}
        self._kept[action.chunk, action.micro_batch] = binding, kept

    def _both(self, place: int, action: Action, arrived: Mapping[str, Held]) -> None:
        chunk = self._runner.chunks[action.chunk]
        binding = chunk.both[min(action.micro_batch, len(chunk.both) - 1)]
        self._start(binding, action, chunk.stage, arrived)
        self._run_back(place + 1, action, binding, {})
        binding.release(arrived)
        self._after_loss()

    def _backward(self, place: int, action: Action, arrived: Mapping[str, Held]) -> None:
        chunk = self._runner.chunks[action.chunk]
        memory, kept = self._kept.pop((action.chunk, action.micro_batch))
        if chunk.backward:
            binding = chunk.backward[min(action.micro_batch, len(chunk.backward) - 1)]
            gradients = {gradient_from_next(name): each for name, each in arrived.items()}
            give(binding, {**kept, **gradients})
            self._feed(binding, *self._work[action.micro_batch])
            self._run_back(place, action, binding, arrived)
            binding.release([*kept, *gradients])
        else:
            self._send_back(place, chunk.stage, arrived)
        # Where no gradient comes back, what the stage has sent may not have been received yet.
        for sent in [each for each in self._sent if each.link == ("forward", chunk.stage.number)]:
            if sent.micro_batch == action.micro_batch:
                self._sent.pop(sent).wait()
        chunk.forward.give_back(memory)

    def _run_back(
        self,
        place: int,
        action: Action,
        binding: Binding,
        arrived: Mapping[str, Held],
    ) -> None:
        """Run a graph that makes gradients, and send those of what the stage received."""
        chunk, batch = self._runner.chunks[action.chunk], self._work[action.micro_batch][0]
        stage, made = chunk.stage, dict[str, Held]()
        shapes = self._wire.shapes(("forward", stage.number - 1), stage.receives, batch) if stage.number else {}
        for value in stage.receives:
            if value.gradient and value.name not in stage.passed:
                mine = made[value.name] = self._wire.memory.take(shapes[value.name], value.dtype)
                binding.write_to(gradient_of(value.name), mine.buffer, mine.shape)
        binding.run()
        chunk.sums.add(first=not action.micro_batch)
        self._send_back(place, stage, {**arrived, **made})

    def _send_back(self, place: int, stage: Stage, gradients: Mapping[str, Held]) -> None:
        message = self._leaving.get(place)
        if message is not None:
            values = [value for value in stage.receives if value.gradient]
            self._sent[message] = self._wire.send_gradients(message.link, values, gradients, message.receiver[0])
