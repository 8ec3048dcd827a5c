"""Runs this rank's stages of a pipeline's evaluation graph: only forward passes, one batch after the other.

Called by the trainer of a divided model. While a stage evaluates a batch, the previous stage has begun the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ortflow.workflow.comm import Communicator
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.parallel.stage import Stage, StageSet
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.buffer_pool import DeviceValue
from ortflow.workflow.trainer.stage_memory import bind_inputs, device_value
from ortflow.workflow.trainer.stage_wire import Arrival, Wire


@dataclass
class _Chunk:
    stage: Stage
    binding: Binding
    outputs: list[str]


class StageEvaluation:
    """See the module.

    `pipeline`: the ranks of this pipeline, in the order of the stages. `bind`: ties a graph to the trainer's parameters
    and its metrics to where the trainer wants them.
    """

    def __init__(
        self,
        stages: StageSet,
        pipeline: Communicator,
        sessions: Sessions,
        bind: Callable[[onnxruntime.InferenceSession], Binding],
    ) -> None:
        self._stages, self._device, self._ranks = stages, sessions.device, stages.ranks
        self._wire = Wire(pipeline, sessions.device, len(stages.stages))
        self._chunks: list[_Chunk] = []
        self.metrics: set[str] = set()
        """Outputs that are for no other stage."""
        for stage in stages.of_rank(pipeline.rank):
            binding = bind(sessions.open(stages.eval(stage.number)))
            outputs = sorted({value.name for value in stage.eval_sends} & binding.outputs)
            self.metrics |= binding.outputs.difference(outputs)
            self._chunks.append(_Chunk(stage, binding, outputs))
        self._sent: list[Arrival] = []

    def run(self, batch: MicroBatch, feed: Callable[[Binding], None]) -> None:
        """Evaluate one batch. Its metrics are then on the last rank. Called by all ranks of the pipeline.

        `batch`: the same on all ranks, with at least one sample. `feed`: binds the batch to the inputs of a graph.
        """
        # Each graph overwrites its outputs of the previous batch.
        self.finish()
        for chunk in self._chunks:
            number = chunk.stage.number
            arrived: Mapping[str, DeviceValue] = {}
            if number:
                link, values = ("eval", number - 1), chunk.stage.eval_receives
                arrived = self._wire.receive(link, values, batch, (number - 1) % self._ranks).wait()
            bind_inputs(chunk.binding, arrived)
            feed(chunk.binding)
            outputs = chunk.binding.run_for(chunk.outputs)
            chunk.binding.release(arrived)
            present = {**arrived, **{name: device_value(value, self._device) for name, value in outputs.items()}}
            if number < len(self._stages.stages) - 1:
                to, link = (number + 1) % self._ranks, ("eval", number)
                self._sent.append(self._wire.send(link, chunk.stage.eval_sends, present, batch, to))

    def finish(self) -> None:
        """Wait until everything is sent; called after the last batch."""
        for sent in self._sent:
            sent.wait()
        self._sent = []
