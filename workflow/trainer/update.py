"""The update of all parameters by each rank, with the graphs that the run file's optimizer has, or the user's own.

`share_update` has that of a rank's share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ortflow.workflow.device import Buffer
from ortflow.workflow.device.shard import Shard, Sliced
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.optim.average import RATE
from ortflow.workflow.optim.gradient import FACTOR
from ortflow.workflow.optim.graph import optimizer_graph
from ortflow.workflow.optim.segments import Segment, by_thaw, segments_of
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.trainer.buffers import StepBuffers, UpdateInputs, UpdateMemory
from ortflow.workflow.trainer.context import StepContext
from ortflow.workflow.trainer.thaw import Thaw
from ortflow.workflow.trainer.work import Work

if TYPE_CHECKING:
    from ortflow.workflow.trainer.rounded import Rounded

Moments = Mapping[str, Buffer | Shard]


class Update(Protocol):
    """Scales the gradients, and changes parameters and moments."""

    scaling: Binding
    memory: UpdateMemory
    skips_cleanly: bool
    """Whether a queued step whose gradient is unusable leaves nothing to the next one."""
    staging: int | None
    """Elements of device memory through which moments pass that lie on the host; None if they do not."""

    def begin(self) -> None:
        """Called before the passes of a step."""
        return

    def sum_squares(self) -> None:
        """Sum the squares of the gradients over the ranks, if the scaling reads them."""
        return

    def run(self) -> None:
        """New parameters and moments."""

    def forget_gradients(self) -> None:
        """Leave nothing of an unusable gradient to the next step."""

    def give_memory_back(self) -> None:
        """See `Releasing.give_memory_back`."""

    def close(self) -> None:
        """Release what only steps need."""


def whole_memory(context: StepContext, buffers: StepBuffers) -> UpdateMemory:
    """The moments of all elements, and the buffer for the gradients of further micro-batches."""
    device, spec, trained = context.device, context.spec, context.index.trained
    moments = {name: device.allocate(trained, np.float32) for name in spec.train.buffers}
    scratch = device.allocate(trained, np.float32) if spec.accumulation > 1 else None
    return UpdateMemory(moments, Shard(buffers.gradients, 0, trained), buffers.gradients, scratch)


class PieceBinder:
    """Binds graphs of an update to pieces of the flat buffers, which are frozen together if any is."""

    def __init__(
        self,
        context: StepContext,
        parameters: Sliced,
        gradients: Sliced,
        inputs: UpdateInputs,
        work: Work,
        rounded: Rounded | None = None,
    ) -> None:
        self._context, self._parameters, self.gradients = context, parameters, gradients
        self.inputs, self._work, self._rounded = inputs, work, rounded

    def bind(self, session: onnxruntime.InferenceSession, cuts: Sequence[Segment], moments: Moments) -> Binding:
        """A graph bound to some pieces. It may leave some unread or unwritten."""
        update, inputs = Binding(session, self._context.device), self.inputs
        update.read_from("learning_rate", inputs.rate, (1,))
        update.read_from("step", inputs.number_of(cuts[0].frozen if cuts else None), (1,))
        if self._context.spec.train.average is not None:
            update.read_from(RATE, inputs.average_rate, (1,))
        flat: dict[str, Sliced] = {"parameters": self._parameters, "gradients": self.gradients, **moments}
        for number, piece in enumerate(cuts):
            for name, buffer in flat.items():
                part, value = buffer.slice(piece.start, piece.stop), f"{name}.{number}"
                update.read_from(value, part, (piece.count,))
                if f"{value}.out" in update.outputs:
                    update.write_to(f"{value}.out", part, (piece.count,))
        self._work.tie_update(update, cuts)
        if self._rounded is not None:
            self._rounded.bind_update(update, cuts)
        return update


def thawing(
    thaw: Thaw, group: int | None, cuts: Sequence[Segment], run: Callable[[], None], binder: PieceBinder
) -> Callable[[], None]:
    """The update of a group's segments, which is skipped while the group is frozen."""
    if group is None:
        return run
    thaw.hold(group, [binder.gradients.slice(cut.start, cut.stop) for cut in cuts])
    return thaw.skipping(group, run)


class WholeUpdate(Update):
    """See the module."""

    staging: int | None = None

    def __init__(
        self,
        context: StepContext,
        memory: UpdateMemory,
        buffers: StepBuffers,
        binder: PieceBinder,
        thaw: Thaw,
        work: Work,
    ) -> None:
        self.memory, self._gradients = memory, buffers.gradients
        self.scaling, self.skips_cleanly = bound_scaling(
            context, context.sessions.open_fastest(context.graphs.gradient), buffers.gradients, work
        )
        cuts = segments_of(context.spec.train, context.index)
        if not thaw:
            update = binder.bind(context.sessions.open_fastest(context.graphs.optimizer), cuts, memory.moments)
            self._updates: list[Callable[[], None]] = [work.repeat("the update", update.run).run]
            return
        self._updates = []
        for group, group_cuts in by_thaw(cuts).items():
            model = optimizer_graph(context.spec.train.optimizer, group_cuts, kernels=work.own_kernels)
            form = work.whole_form_of(model, multiplied=FACTOR in self.scaling.outputs)
            session = context.sessions.open(form.SerializeToString())
            bound = binder.bind(session, group_cuts, memory.moments)
            run = work.repeat("the update", bound.run).run
            self._updates.append(thawing(thaw, group, group_cuts, run, binder))

    def run(self) -> None:
        """See the protocol."""
        for run in self._updates:
            run()

    def forget_gradients(self) -> None:
        """See the protocol. Scaling by what is NaN or infinite reached the padding, which no later step writes and
        every norm reads."""
        self._gradients.fill(0)

    def give_memory_back(self) -> None:
        """See the protocol."""
        # Any graph whose results are not read will do: gradients are unused between two steps.
        self.scaling.run(give_back=True)

    def close(self) -> None:
        """See the protocol."""
        del self._updates, self.scaling, self.memory, self._gradients


def bound_scaling(
    context: StepContext, session: onnxruntime.InferenceSession, gradients: Buffer, work: Work
) -> tuple[Binding, bool]:
    """The scaling of gradients, and whether it leaves these as they are. It may only compute a factor for the update.

    Scaling in place leaves NaN in the gradients' padding, which no pass writes and every norm reads.
    """
    scaling, shape = Binding(session, context.device), (gradients.count,)
    scaling.read_from("gradients", gradients, shape)
    work.tie_scaling(scaling)
    in_place = "gradients.out" in scaling.outputs
    if in_place:
        scaling.write_to("gradients.out", gradients, shape)
    return scaling, not in_place
