"""How a kind of device does the work of a step: the forms of graphs, their inputs, and how work is repeated.

`HostWork` computes at once; `queued_work` queues on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import onnx

from ortflow.workflow.comm import Communicator
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.kernels.graph import with_kernels
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.optim.gradient import gradient_graph, square_sum_graph, square_sums_graph
from ortflow.workflow.optim.guard import GRADIENTS
from ortflow.workflow.optim.segments import Segment
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.trainer.context import StepContext
from ortflow.workflow.trainer.parameters import Parameters

if TYPE_CHECKING:
    from ortflow.workflow.trainer.overlap import Overlap
    from ortflow.workflow.trainer.rounded import Rounded


class Repeating(Protocol):
    """Work that every step repeats on the same memory."""

    def run(self, memory: Hashable = None) -> None:
        """Do it. `memory` identifies the memory of the batch."""

    def skip(self) -> None:
        """Called in place of `run` by a rank that has no samples."""
        return


@dataclass(frozen=True)
class Repetition:
    """How passes over a micro-batch are repeated."""

    sessions: Sessions
    obstacle: str
    """Why they cannot be captured; empty if they may be."""
    over: Communicator | None
    """The ranks over which they sum."""
    deferred: bool = False
    """Whether they are captured only where no message is awaited."""


@dataclass(frozen=True)
class TrainGraph:
    """The training graph of a step, opened."""

    session: onnxruntime.InferenceSession
    rounded: Rounded | None = None
    """Parameters in 16 bits, if the graph reads them so."""
    overlap: Overlap | None = None
    """Sums of the gradients over the ranks while the graph computes others."""


class Work(Protocol):
    """See the module."""

    queued: bool
    """Whether work is queued, so that what is read on the host must be awaited."""
    own_kernels: bool
    """Whether graphs of the update may contain ortflow's operators for the CPU."""

    def open_train(self, sessions: Sessions, parameters: Parameters) -> TrainGraph:
        """Open the training graph of a step."""

    def tie_training(self, binding: Binding) -> None:
        """Tie what only this kind of device has of a training graph."""
        return

    def tie_update(self, binding: Binding, cuts: Sequence[Segment]) -> None:
        """The same of an update of some segments."""
        return

    def tie_scaling(self, scaling: Binding) -> None:
        """Tie the numbers that the graph of the scaling reads and writes."""

    def shared_scaling(self) -> onnx.ModelProto:
        """The graph that scales gradients whose squares are summed over ranks."""

    def form_of(self, model: onnx.ModelProto, change: str = GRADIENTS) -> onnx.ModelProto:
        """A graph of the update as it is opened. Its inputs `change` + number are NaN if the step must be skipped."""

    def whole_form_of(self, model: onnx.ModelProto, *, multiplied: bool) -> onnx.ModelProto:
        """The same where each rank holds everything. `multiplied`: the update scales the gradients by FACTOR."""

    def squares_graph(self, pieces: int | None = None) -> onnx.ModelProto:
        """The graph that sums the squares of a buffer, or of several."""

    def repeat(self, name: str, run: Callable[[], None], passes: Repetition | None = None) -> Repeating:
        """Work that every step repeats on the same memory. `name`: in the log. `passes`: if it is passes."""

    def obstacle(self, sessions: Sessions, binding: Binding, graphs: Sequence[Path]) -> str:
        """Why passes of these graphs cannot be captured; empty if they may, or if nobody asks."""


class Once(Repeating):
    """Work that is done at once."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def run(self, memory: Hashable = None) -> None:
        """See `Repeating`."""
        self._run()


class HostWork(Work):
    """Work on the CPU."""

    queued = False

    def __init__(self, context: StepContext) -> None:
        self._context, device = context, context.device
        self.own_kernels = bool(context.sessions.kernels)
        self._scale, self._norm = device.allocate(2, np.float32), device.allocate(1, np.float32)

    def open_train(self, sessions: Sessions, parameters: Parameters) -> TrainGraph:
        """See the protocol."""
        return TrainGraph(sessions.open_fastest(self._context.train_graph))

    def tie_scaling(self, scaling: Binding) -> None:
        """See the protocol."""
        scaling.read_from("inverse_weight", self._scale.slice(0, 1), (1,))
        scaling.read_from("max_norm", self._scale.slice(1, 2), (1,))
        scaling.write_to("norm", self._norm, (1,))

    def scale(self, scaling: Callable[[], None], weight: float) -> float:
        """Average and clip the summed gradients. Returns the norm before clipping."""
        clip = self._context.spec.train.clip_norm
        self._scale.write(np.array([1.0 / weight, math.inf if clip is None else clip], np.float32))
        scaling()
        return float(self._norm.read()[0])

    def shared_scaling(self) -> onnx.ModelProto:
        """See the protocol."""
        return gradient_graph(shared=True)

    def form_of(self, model: onnx.ModelProto, change: str = GRADIENTS) -> onnx.ModelProto:
        """See the protocol. The host does not run the update of a step that is skipped."""
        return compose(with_kernels(model) if self.own_kernels else model)

    def whole_form_of(self, model: onnx.ModelProto, *, multiplied: bool) -> onnx.ModelProto:
        """See the protocol. The host scales before it runs the update."""
        return self.form_of(model)

    def squares_graph(self, pieces: int | None = None) -> onnx.ModelProto:
        """See the protocol."""
        return square_sum_graph() if pieces is None else square_sums_graph(pieces)

    def repeat(self, name: str, run: Callable[[], None], passes: Repetition | None = None) -> Repeating:
        """See the protocol."""
        return Once(run)

    def obstacle(self, sessions: Sessions, binding: Binding, graphs: Sequence[Path]) -> str:
        """See the protocol."""
        return ""
