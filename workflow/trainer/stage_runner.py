"""Runs the stages that one rank has of a pipeline: the forward and backward passes of a step, in the schedule's order.

Called by the trainer of a divided model. Receives are posted ahead of the passes that need them, sends go on while the
next pass runs, and gradients are added up in the order of the micro-batches. `stage_wire` carries the values. Steps
whose passes a GPU repeats are those of `stage_slots`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ortflow.workflow.comm import Communicator
from ortflow.workflow.device import Buffer
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.parallel.schedule import Kind, schedule
from ortflow.workflow.parallel.stage import Stage, StageSet
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.stage_memory import GradientSums, Pool, handed_out
from ortflow.workflow.trainer.stage_slots import Repeat, Slots
from ortflow.workflow.trainer.stage_step import Chunk, Feed, Step, Work
from ortflow.workflow.trainer.stage_wire import Wire, signature

AHEAD = 2
"""Messages whose receives are posted before the passes that need them."""

Bind = Callable[[onnxruntime.InferenceSession, Buffer], Binding]


class StageRunner:
    """See the module.

    `pipeline`: the ranks of this pipeline, in the order of the stages. `index`: where what this rank holds lies in its
    flat buffers. `bind`: ties a graph to the trainer's parameters, running statistics and sums of the loss.
    `gradients`: the rank's flat gradients. `scratch`: as large, for gradients that are added; None if steps have one
    micro-batch and the rank one stage.
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
        """Receives posted ahead: none in the first step, in which memory grows."""
        self.seconds, self.busy = 0.0, 0.0
        """Of the passes of all steps but the first, and of them without waits for messages."""
        self._timed = False
        self._run_before: set[object] = set()
        """Shapes and numbers of micro-batches with which all kernels have been loaded."""
        self.repeat: Repeat | None = None
        """Makes work that a GPU repeats of a pass; None if passes are not repeated on the same memory."""
        self._slots: Slots | None = None
        self._shapes: tuple[object, object] = None, None
        """Shapes of the micro-batches of the last step, if they are all alike, and those that the slots are for."""
        own_stages = stages.of_rank(self.rank)
        # The last chunk's backward pass is the first of all: what it has a gradient of, other chunks add to.
        first = {name: number for number, stage in enumerate(own_stages) for name in stage.trained}
        self.chunks = [
            self._open(stage, {name for name in stage.trained if first[name] == number})
            for number, stage in enumerate(own_stages)
        ]
        trained = [entry for entry in index if entry.end <= gradients.count and entry.name not in first]
        self._unwritten = [gradients.slice(entry.offset, entry.end) for entry in trained]
        """Gradients that no stage of this rank has: other stages that hold the weight may."""

    def _open(self, stage: Stage, fresh: set[str]) -> Chunk:
        stages, number = self.stages, stage.number
        sums = GradientSums(self._index, stage.trained, fresh, self._gradients, self._scratch)

        def binder(session: onnxruntime.InferenceSession) -> Callable[[bool], Binding]:
            def bind(first: bool) -> Binding:
                binding = self._bind(session, self._gradients)
                sums.tie(binding, first=first)
                return binding

            return bind

        ways = (True, False) if self._scratch is not None else (True,)
        session = self._sessions.open_fastest(stages.forward(number))
        outputs = handed_out((output.name for output in session.get_outputs()), self._index)

        def bind_forward() -> Binding:
            return self._bind(session, self._gradients)

        forward = Pool(bind_forward, outputs)
        bind_backward = bind_both = binder(session)
        backward: list[Binding] = []
        if stages.backward(number).exists():
            bind_backward = binder(self._sessions.open_fastest(stages.backward(number)))
            backward = [bind_backward(first) for first in ways]
        joined: list[Binding] = []
        if number == len(stages.stages) - 1 and self._kind != "gpipe":
            bind_both = binder(self._sessions.open_fastest(stages.both(number)))
            joined = [bind_both(first) for first in ways]
        return Chunk(stage, forward, outputs, backward, joined, sums, bind_forward, bind_backward, bind_both)

    def graphs(self) -> list[Path]:
        """The graphs of this rank's passes."""
        paths = [
            path(chunk.stage.number)
            for chunk in self.chunks
            for path in (self.stages.forward, self.stages.backward, self.stages.both)
        ]
        return [path for path in paths if path.exists()]

    def reads(self, name: str) -> bool:
        """Whether a graph of this rank has an input of this name."""
        return any(name in binding.inputs for chunk in self.chunks for binding in (*chunk.backward, *chunk.joined))

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

        `batches`, `seeds`: as of `Trainer.step`, and the same on all ranks of the pipeline. Batches of no sample are
        left out. `feed`: feeds a micro-batch to what a graph reads of it. `before_forward`: called before each forward
        pass: running statistics move on. `after_loss`: called on the last stage when the loss of a micro-batch is
        there, in the order of the micro-batches.
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
        kind = frozenset(signature(batch) for batch, _ in work), len(work)
        self.wire.pass_through_host(through=kind not in self._run_before)
        self._run_before.add(kind)
        arguments = self, actions, work, feed, before_forward, after_loss
        slots = self._slots_for(work)
        step, start = Step(*arguments) if slots is None else slots.step(*arguments), time.perf_counter()
        step.run()
        if self._timed:
            elapsed = time.perf_counter() - start
            self.seconds, self.busy = self.seconds + elapsed, self.busy + elapsed - step.waited
        self.ahead, self._timed = AHEAD, True

    def forget_seconds(self) -> None:
        """Measure from anew: the next step is the first."""
        self.seconds, self.busy, self._timed = 0.0, 0.0, False

    def _slots_for(self, work: Work) -> Slots | None:
        """The memory for a step like the one before; None if this is not one, or if passes are not repeated.

        The first step of its kind finds out the shapes of all values.
        """
        if self.repeat is None:
            return None
        shapes = {signature(batch) for batch, _ in work}
        last, fitting = self._shapes
        current = next(iter(shapes)) if len(shapes) == 1 else None
        if current is not None and current == last != fitting:
            self.forget_slots()
            fitting, self._slots = current, Slots(self.chunks, self.repeat)
        self._shapes = current, fitting
        return self._slots if current is not None and current == fitting else None

    def prepare(self) -> None:
        """Capture passes that will be repeated; called where no message is awaited."""
        if self._slots is not None:
            self._slots.prepare()

    def forget_slots(self) -> None:
        """Give back the memory in which passes are repeated; the next step of the same shapes takes other memory."""
        if self._slots is not None:
            self._slots.forget()
        self._slots, self._shapes = None, (self._shapes[0], None)
