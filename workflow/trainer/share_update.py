"""The update of the elements that a rank has the gradients of, with graphs that each rank makes itself.

Under ZeRO these are its `layout.share` of the flat parameters, and it has the moments of that share only. From stage 2,
it also accumulates the gradients of its share only. The loss curve differs from that of `WholeUpdate` by rounding only.
Moments lie in memory, or are streamed from the host's (`streamed_moments`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import onnx

from ortflow.workflow.device import Buffer
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.layout import ALIGNMENT, share
from ortflow.workflow.memory import ITEM
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.optim.graph import optimizer_graph
from ortflow.workflow.optim.guard import CHANGES, GRADIENTS
from ortflow.workflow.optim.segments import Piece, by_thaw, pieces, segments_of
from ortflow.workflow.optim.whole_tensors import NormGraphs, norm_graphs
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.spec.optimizers import OPTIMIZERS
from ortflow.workflow.trainer.buffers import StepBuffers, UpdateMemory
from ortflow.workflow.trainer.context import StepContext
from ortflow.workflow.trainer.reduction import Reduction
from ortflow.workflow.trainer.thaw import Thaw
from ortflow.workflow.trainer.update import Moments, PieceBinder, bound_scaling, thawing
from ortflow.workflow.trainer.work import Work

Bind = Callable[[Sequence[Piece], Moments], Binding]
Span = tuple[int, int]


class MomentStore(Protocol):
    """Where the moments of a rank's elements are."""

    moments: Moments
    staging: int | None
    """See `Update`."""

    def begin(self) -> None:
        """Called before the passes of a step."""
        return

    def runs(self, name: str, own_pieces: Sequence[Piece], bind: Bind, work: Work) -> list[Callable[[], None]]:
        """Runs of a graph that updates moments. `bind` opens it for some pieces and binds it to their moments."""

    def check_norms(self, graphs: NormGraphs, own_pieces: Sequence[Piece]) -> None:
        """Raise UserError if an optimizer cannot read the norms that it needs."""
        return


class ResidentMoments(MomentStore):
    """In the memory of the device."""

    staging: int | None = None

    def __init__(self, context: StepContext, start: int, stop: int) -> None:
        device, trained = context.device, context.index.trained
        self.moments: Moments = {
            name: Shard(device.allocate(stop - start, np.float32), start, trained)
            for name in context.spec.train.buffers
        }

    def runs(self, name: str, own_pieces: Sequence[Piece], bind: Bind, work: Work) -> list[Callable[[], None]]:
        """See the protocol."""
        return [work.repeat(name, bind(own_pieces, self.moments).run).run] if own_pieces else []


def share_memory(
    context: StepContext, buffers: StepBuffers, store: MomentStore, span: Span, *, added_up: bool
) -> UpdateMemory:
    """The gradients of the elements `span`. `added_up`: those of each micro-batch are, in memory of their own."""
    device, trained, (start, stop) = context.device, context.index.trained, span
    gradients = device.allocate(stop - start, np.float32) if added_up else buffers.gradients.slice(start, stop)
    # With few parameters and many ranks, a rank without a share scales zeros.
    scaled = gradients if gradients.count else device.allocate(ALIGNMENT, np.float32)
    scratch = None if added_up or context.spec.accumulation == 1 else device.allocate(trained, np.float32)
    return UpdateMemory(store.moments, Shard(gradients, start, trained), scaled, scratch)


def span_of(context: StepContext) -> Span:
    """The elements that this rank updates: its share, or all in stage 0."""
    ranks, trained = context.replicas, context.index.trained
    return share(trained, ranks.rank, ranks.world_size) if context.spec.parallel.zero else (0, trained)


def note_shares(context: StepContext, memory: UpdateMemory, buffers: StepBuffers, *, added_up: bool) -> None:
    """Write to the log what ZeRO saves."""
    zero, ranks, trained = context.spec.parallel.zero, context.replicas.world_size, context.index.trained
    if not zero or context.replicas.rank:
        return
    shards = [moment for moment in memory.moments.values() if isinstance(moment, Shard)]
    line = (
        f"ZeRO stage {zero}: {len(shards)} moments x {ITEM} bytes x {trained} parameters "
        f"/ {ranks} ranks = {len(shards) * ITEM * trained / ranks:.0f} bytes, "
        f"{sum(moment.part.count for moment in shards) * ITEM} allocated on rank 0"
    )
    if zero == 2:
        formula, share_of = (f"({trained} + {trained} / {ranks} ranks)", 1 / ranks) if added_up else (str(trained), 0)
        allocated = buffers.gradients.count + (memory.gradients.part.count if added_up else 0)
        line += (
            f"; gradients {ITEM} bytes x {formula} = {ITEM * trained * (1 + share_of):.0f} bytes, "
            f"{allocated * ITEM} allocated on rank 0"
        )
    context.report.note(line)


class ShareUpdate:
    """See the module.

    `reduction`: sums squares over the ranks. `counted`: the elements whose squares this rank counts; None for all that
    it updates.
    """

    def __init__(
        self,
        context: StepContext,
        memory: UpdateMemory,
        buffers: StepBuffers,
        store: MomentStore,
        binder: PieceBinder,
        reduction: Reduction,
        thaw: Thaw,
        work: Work,
        counted: Sequence[Span] | None = None,
    ) -> None:
        self._context, self.memory, self._gradients, self._store = context, memory, buffers.gradients, store
        self._binder, self._reduction, self._work = binder, reduction, work
        self.staging = store.staging
        self._opened: dict[bytes, onnxruntime.InferenceSession] = {}
        self._squares = context.device.allocate(1, np.float64)
        self._square = self._squaring(counted)
        scaling = context.sessions.open(work.shared_scaling().SerializeToString())
        self.scaling, cleanly = bound_scaling(context, scaling, memory.scaled, work)
        self.scaling.read_from("squares", self._squares, (1,))
        train = context.spec.train
        segments = segments_of(train, context.index)
        own_pieces = pieces(segments, memory.gradients.start, memory.gradients.stop)
        rule = OPTIMIZERS[train.optimizer.name]
        # Rules that read shapes have their tensors whole on each rank (`spec.checks`): there is nothing to add up.
        if rule.whole_tensors and not rule.shapes:
            graphs = norm_graphs(train.optimizer, segments)
            self.skips_cleanly = cleanly and not graphs.keeps_changes
            self._updates = self._by_norms(graphs, own_pieces, len(segments))
            return
        self.skips_cleanly, self._updates = cleanly, []

        def bind(subset: Sequence[Piece], moments: Moments) -> Binding:
            model = optimizer_graph(train.optimizer, subset, kernels=work.own_kernels)
            return binder.bind(self._open(model), subset, moments)

        for group, group_pieces in by_thaw(own_pieces).items():
            runs = store.runs("the update", group_pieces, bind, work)
            self._updates += [thawing(thaw, group, group_pieces, run, binder) for run in runs]

    def _open(self, model: onnx.ModelProto, change: str = GRADIENTS) -> onnxruntime.InferenceSession:
        """A session of a graph of the update. Pieces of one length and one weight decay share one."""
        content = model.SerializeToString(deterministic=True)
        if content not in self._opened:
            form = self._work.form_of(model, change).SerializeToString()
            self._opened[content] = self._context.sessions.open(form)
        return self._opened[content]

    def _squaring(self, counted: Sequence[Span] | None) -> Callable[[], None]:
        """The squares of this rank's gradients."""
        gradients, scaled, work = self.memory.gradients, self.memory.scaled, self._work
        if counted is not None and not counted:
            return lambda: self._squares.fill(0)
        model = work.squares_graph(None if counted is None else len(counted))
        squaring = Binding(self._open(model), self._context.device)
        squaring.read_from("gradients", scaled, (scaled.count,))
        for number, (start, stop) in enumerate(counted or ()):
            squaring.read_from(f"piece.{number}", gradients.slice(start, stop), (stop - start,))
        squaring.write_to("squares", self._squares, (1,))
        return work.repeat("the norm of the gradient", squaring.run).run

    def _by_norms(self, graphs: NormGraphs, own_pieces: Sequence[Piece], tensors: int) -> list[Callable[[], None]]:
        """Norms are of whole tensors, and a rank may have a piece of one: their squares are summed over the ranks."""
        self._store.check_norms(graphs, own_pieces)
        binder, gradients, work = self._binder, self.memory.gradients, self._work
        sums = self._context.device.allocate(len(graphs.norms) * tensors, np.float64)
        add: list[Callable[[], None]] = [lambda: sums.fill(0), lambda: self._reduction.sum_norms(sums)]
        if not own_pieces:
            return add
        places = {name: number * tensors for number, name in enumerate(graphs.norms)}

        def tie_changes(subset: Sequence[Piece], tie: Callable[[str, Buffer, tuple[int, ...]], None]) -> None:
            for number, piece in enumerate(subset if graphs.keeps_changes else ()):
                tie(f"change.{number}", gradients.slice(piece.start, piece.stop), (piece.count,))

        def bind_first(subset: Sequence[Piece], moments: Moments) -> Binding:
            first = binder.bind(self._open(graphs.first(subset)), subset, moments)
            tie_changes(subset, first.write_to)
            for name, place in places.items():
                start = place + subset[0].number
                first.write_to(name, sums.slice(start, start + len(subset)), (len(subset),))
            return first

        def bind_second(subset: Sequence[Piece], moments: Moments) -> Binding:
            form = self._open(graphs.second(subset, tensors), CHANGES if graphs.keeps_changes else GRADIENTS)
            second = binder.bind(form, subset, moments)
            tie_changes(subset, second.read_from)
            for name, place in places.items():
                second.read_from(name, sums.slice(place, place + tensors), (tensors,))
            return second

        moments = self.memory.moments
        if graphs.keeps_changes:
            first = self._store.runs("the change", own_pieces, bind_first, work)
            second: list[Callable[[], None]] = [work.repeat("the update", bind_second(own_pieces, moments).run).run]
        else:
            first = [work.repeat("the norms", bind_first(own_pieces, moments).run).run]
            second = self._store.runs("the update", own_pieces, bind_second, work)
        return [add[0], *first, add[1], *second]

    def begin(self) -> None:
        """See `Update`. The first moments arrive during the passes."""
        self._store.begin()

    def sum_squares(self) -> None:
        """See `Update`."""
        self._square()
        self._reduction.sum_squares(self._squares)

    def run(self) -> None:
        """See `Update`."""
        for run in self._updates:
            run()

    def forget_gradients(self) -> None:
        """See `Update`."""
        self._gradients.fill(0)
        self.memory.scaled.fill(0)

    def give_memory_back(self) -> None:
        """See `Update`."""
        # Squares of a skipped step would make the gradients of the next one NaN, where no step writes the padding.
        self._squares.fill(0)
        self.scaling.run(give_back=True)

    def close(self) -> None:
        """See `Update`."""
        del self._updates, self.scaling, self.memory, self._gradients, self._store, self._square, self._opened
