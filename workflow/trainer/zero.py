"""The trainer of ZeRO stages 1 and 2 (Rajbhandari et al. 2020): moments and accumulated gradients are sharded.

Each rank updates its `layout.share` of the flat parameters and keeps the moments of that share only (stage 1). From
stage 2, it also accumulates the gradients of its share only: those of a micro-batch are reduced over the ranks
immediately. Opened by `builder` in place of `GraphTrainer`; its loss curve differs from that trainer's by rounding
only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnx

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.kernels.graph import with_kernels
from ortflow.workflow.layout import ALIGNMENT, share
from ortflow.workflow.memory import ITEM
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.optim.gradient import gradient_graph, square_sum_graph, square_sums_graph
from ortflow.workflow.optim.graph import optimizer_graph
from ortflow.workflow.optim.guard import CHANGES, GRADIENTS
from ortflow.workflow.optim.segments import Piece, by_thaw, pieces, segments_of
from ortflow.workflow.optim.whole_tensors import NormGraphs, norm_graphs
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.spec.optimizers import OPTIMIZERS
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.bound_graphs import TAIL
from ortflow.workflow.trainer.graph import GraphTrainer

Moments = Mapping[str, Buffer | Shard]


class ZeroTrainer(GraphTrainer):
    """See the module. Each rank makes its own graphs of the update here."""

    def _allocate_for_update(self) -> None:
        device, spec, trained = self._sessions.device, self._spec, self.index.trained
        start, stop = share(trained, self._sharers.rank, self._sharers.world_size)
        kept = spec.train.buffers
        self._moments = self._allocate_moments(kept, start, stop)
        self._each = spec.parallel.zero == 3 or (spec.parallel.zero == 2 and spec.accumulation > 1)
        """Gradients are reduced over the ranks after each micro-batch, not after the last."""
        own = device.allocate(stop - start, np.float32) if self._each else self._gradients.slice(start, stop)
        self._own = Shard(own, start, trained)
        # With few parameters and many ranks, a rank without a share scales zeros.
        self._scaled = own if own.count else device.allocate(ALIGNMENT, np.float32)
        self._scratch = None if self._each or spec.accumulation == 1 else device.allocate(trained, np.float32)
        if spec.parallel.zero and self._comm.rank == 0:
            ranks = self._comm.world_size
            self._report.note(
                f"ZeRO stage {spec.parallel.zero}: {len(kept)} moments x {ITEM} bytes x {trained} parameters "
                f"/ {ranks} ranks = {len(kept) * ITEM * trained / ranks:.0f} bytes, "
                f"{sum(moment.part.count for moment in self._shards) * ITEM} allocated on rank 0"
                + (self._gradients_noted() if spec.parallel.zero == 2 else "")
            )

    def _gradients_noted(self) -> str:
        """The bytes of the gradients under stage 2: those of a micro-batch, and the accumulated ones of a share."""
        trained, ranks = self.index.trained, self._comm.world_size
        formula, share_of = (f"({trained} + {trained} / {ranks} ranks)", 1 / ranks) if self._each else (str(trained), 0)
        allocated = self._gradients.count + (self._own.part.count if self._each else 0)
        return (
            f"; gradients {ITEM} bytes x {formula} = {ITEM * trained * (1 + share_of):.0f} bytes, "
            f"{allocated * ITEM} allocated on rank 0"
        )

    def _allocate_moments(self, kept: Sequence[str], start: int, stop: int) -> Mapping[str, Shard]:
        """The named moments of this rank's share, elements [start, stop)."""
        device, trained = self._sessions.device, self.index.trained
        return {name: Shard(device.allocate(stop - start, np.float32), start, trained) for name in kept}

    @property
    def _sharers(self) -> Communicator:
        """The ranks over which the moments are sharded; in stage 0 this rank alone."""
        return self._comm if self._spec.parallel.zero else SoloCommunicator()

    @property
    def _shards(self) -> list[Shard]:
        return [moment for moment in self._moments.values() if isinstance(moment, Shard)]

    def _open(self, model: onnx.ModelProto, change: str = GRADIENTS) -> onnxruntime.InferenceSession:
        """A session of a graph of the update, whose inputs `change` + number are NaN if the step must be skipped."""
        own = with_kernels(model) if self._own_kernels else model
        return self._sessions.open(compose(own).SerializeToString())

    @property
    def _own_kernels(self) -> bool:
        """Whether graphs of the update may contain our operators for the CPU."""
        return bool(self._sessions.kernels)

    def squares_graph(self, pieces: int | None = None) -> onnx.ModelProto:
        """The graph that sums the squares of a buffer, or of several."""
        return square_sum_graph() if pieces is None else square_sums_graph(pieces)

    def _bind_squaring(self) -> None:
        self._squares = self._sessions.device.allocate(1, np.float64)
        squaring = Binding(self._open(self.squares_graph()), self._sessions.device)
        squaring.read_from("gradients", self._scaled, (self._scaled.count,))
        squaring.write_to("squares", self._squares, (1,))
        self._square = self._repeated("the norm of the gradient", squaring.run)

    def _bind_scaling(self) -> Binding:
        device, shape = self._sessions.device, (self._scaled.count,)
        self._bind_squaring()
        self._scale, self._norm = device.allocate(2, np.float32), device.allocate(1, np.float32)
        scaling = Binding(self._sessions.open(gradient_graph(shared=True).SerializeToString()), device)
        scaling.read_from("gradients", self._scaled, shape)
        scaling.read_from("squares", self._squares, (1,))
        scaling.read_from("inverse_weight", self._scale.slice(0, 1), (1,))
        scaling.read_from("max_norm", self._scale.slice(1, 2), (1,))
        scaling.write_to("gradients.out", self._scaled, shape)
        scaling.write_to("norm", self._norm, (1,))
        return scaling

    def _bind_update(self) -> None:
        device, optimizer = self._sessions.device, self._spec.train.optimizer
        self._scaling = self._bind_scaling()
        self._rate = device.allocate(1, np.float32)
        self._update_number = device.allocate(1, np.int64)
        whole = segments_of(self._spec.train, self.index)
        mine = pieces(whole, self._own.start, self._own.stop)
        self._changes_kept = False
        known = OPTIMIZERS[optimizer.name]
        # Rules that read shapes have their tensors whole on each rank (`spec.checks`): there is nothing to add up.
        if known.whole_tensors and not known.shapes:
            self._updates = self._by_norms(norm_graphs(optimizer, whole), mine, len(whole))
            return

        def bind(some: Sequence[Piece], kept: Moments) -> Binding:
            session = self._open(optimizer_graph(optimizer, some, kernels=self._own_kernels))
            return self._bind_pieces(session, some, self._own, kept)

        for group, some in by_thaw(mine).items():
            runs = self._passes("the update", some, bind)
            self._updates += [self._thawing(group, some, run, self._own) for run in runs]

    def _passes(
        self, name: str, mine: Sequence[Piece], bind: Callable[[Sequence[Piece], Moments], Binding]
    ) -> list[Callable[[], None]]:
        """Runs of a graph that updates moments. `bind` opens it for some pieces and binds it to their moments."""
        return [self._repeated(name, bind(mine, self._moments).run)] if mine else []

    def _by_norms(self, graphs: NormGraphs, mine: Sequence[Piece], tensors: int) -> list[Callable[[], None]]:
        """Norms are of whole tensors, and a rank may have a piece of one: their squares are summed over the ranks."""
        self._changes_kept = graphs.keeps_changes
        sums = self._sessions.device.allocate(len(graphs.norms) * tensors, np.float64)
        add = [lambda: sums.fill(0), lambda: self._sum_norms(sums)]
        if not mine:
            return add
        places = {name: number * tensors for number, name in enumerate(graphs.norms)}

        def tie_changes(some: Sequence[Piece], tie: Callable[[str, Buffer, tuple[int, ...]], None]) -> None:
            for number, piece in enumerate(some if graphs.keeps_changes else ()):
                tie(f"change.{number}", self._own.slice(piece.start, piece.stop), (piece.count,))

        def bind_first(some: Sequence[Piece], kept: Moments) -> Binding:
            first = self._bind_pieces(self._open(graphs.first(some)), some, self._own, kept)
            tie_changes(some, first.write_to)
            for name, place in places.items():
                start = place + some[0].number
                first.write_to(name, sums.slice(start, start + len(some)), (len(some),))
            return first

        def bind_second(some: Sequence[Piece], kept: Moments) -> Binding:
            form = self._open(graphs.second(some, tensors), CHANGES if graphs.keeps_changes else GRADIENTS)
            second = self._bind_pieces(form, some, self._own, kept)
            tie_changes(some, second.read_from)
            for name, place in places.items():
                second.read_from(name, sums.slice(place, place + tensors), (tensors,))
            return second

        if graphs.keeps_changes:
            first = self._passes("the change", mine, bind_first)
            second = [self._repeated("the update", bind_second(mine, self._moments).run)]
        else:
            first = [self._repeated("the norms", bind_first(mine, self._moments).run)]
            second = self._passes("the update", mine, bind_second)
        return [add[0], *first, add[1], *second]

    def _sum_norms(self, sums: Buffer) -> None:
        """Squares of one norm of all tensors after those of another, over the ranks."""
        self._sharers.all_reduce(sums)

    def _add_up(self, batches: Sequence[MicroBatch], seeds: Sequence[int]) -> npt.NDArray[np.float32]:
        if not self._each:
            tail = self._pass(batches, seeds)
            self._reduce_gradients()
            return tail
        self._own.part.fill(0)
        tail = np.zeros(TAIL, np.float32)
        for batch, seed in zip(batches, seeds, strict=True):
            tail += self._pass([batch], [seed])
            self._reduce_gradients()
            self._own.part.add(self._gradients.slice(self._own.start, self._own.stop))
        return tail

    def _pass(self, batches: Sequence[MicroBatch], seeds: Sequence[int]) -> npt.NDArray[np.float32]:
        """Gradients of this rank's micro-batches, without those of others, and their sums."""
        return super()._add_up(batches, seeds)

    def _reduce_gradients(self) -> None:
        """The sum over the ranks of the elements that this rank updates."""
        if self._spec.parallel.zero:
            self._comm.reduce_scatter(self._gradients)
        else:
            self._comm.all_reduce(self._gradients)

    def _sum_over_ranks(self) -> None:
        self._comm.all_reduce(self._sync.slice(self._gradients_held, self._sync.count))

    def _scale_gradients(self, weight: float) -> float:
        self._sum_squares()
        return super()._scale_gradients(weight)

    def _sum_squares(self) -> None:
        """Squares of the gradients over all ranks."""
        self._square()
        self._sharers.all_reduce(self._squares)

    def _apply(self) -> None:
        super()._apply()
        self._gather_parameters()

    def exchange_average(self) -> None:
        """See the protocol."""
        super().exchange_average()
        if self._spec.train.average is not None:
            self._gather_parameters()

    def _gather_parameters(self) -> None:
        """Let every rank have the parameters that the others update."""
        self._sharers.all_gather(self._parameters.slice(0, self.index.trained))

    def _forget_gradients(self) -> None:
        self._gradients.fill(0)
        self._scaled.fill(0)

    def give_memory_back(self) -> None:
        """See the protocol."""
        # Squares of a skipped step would make the gradients of the next one NaN, where no step writes the padding.
        self._squares.fill(0)
        super().give_memory_back()

    def _drop_update(self) -> None:
        super()._drop_update()
        del self._own, self._scaled, self._square
