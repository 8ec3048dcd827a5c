"""The trainer of ZeRO's stage 3 (Rajbhandari et al. 2020): parameters are sharded, too.

Like moments and gradients, the trained parameters are stored only as each rank's `layout.share`. Graphs fetch the
parameters of a layer when they need them (`graph/shards`), and ONNX Runtime frees them after their last reader. Frozen
parameters and running statistics are whole on every rank. The check of the gradient runs on all ranks, with shares. For
the export, rank 0 reads parameters one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import onnx

from ortflow.workflow.device import Buffer
from ortflow.workflow.device.shard import Shard, Sliced
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.shards.exchange import TOKEN
from ortflow.workflow.graph.shards.graphs import Sharded, sharded
from ortflow.workflow.graph.shards.program import Program
from ortflow.workflow.kernels.library import remedy
from ortflow.workflow.layout import share
from ortflow.workflow.memory import ITEM
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.parallel.runs import NOTHING, Runs
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.sessions.shards import forget, listen
from ortflow.workflow.trainer import EvaluationOutcome, MicroBatch, Report
from ortflow.workflow.trainer.bound_graphs import TAIL
from ortflow.workflow.trainer.canonical import swap
from ortflow.workflow.trainer.exchange import Exchange
from ortflow.workflow.trainer.lent_tensors import LentTensors
from ortflow.workflow.trainer.mapped_export import export_mapped
from ortflow.workflow.trainer.watched_logits import watch_logits
from ortflow.workflow.trainer.zero import ZeroTrainer

if TYPE_CHECKING:
    from ortflow.workflow.trainer.checked_part import CheckedPart

TRAINING, EVALUATION = 0, 1
"""Channels. Those above are of graphs that the check of the gradient opens."""
Range = tuple[int, int]


@dataclass(frozen=True)
class Held:
    """A rank's slice of a flat buffer: its share of the trained elements, and everything after them."""

    own: Shard
    rest: Buffer

    def slice(self, start: int, stop: int) -> Buffer:
        """See `Sliced`."""
        if start == stop:
            return self.rest.slice(0, 0)
        if start < self.own.count:
            return self.own.slice(start, stop)
        return self.rest.slice(start - self.own.count, stop - self.own.count)


class ShardedTrainer(ZeroTrainer):
    """See the module."""

    together = True
    _on_gpus = False

    def _check_kernels(self) -> None:
        if self._sessions.library is None:
            raise UserError(
                "is 3, and this machine has no kernels of ortflow's, which fetch parameters",
                where="parallel.zero",
                fix=f"{remedy()}, or set it to 2",
            )

    def _allocate_parameters(self) -> None:
        device, comm, size, trained = self._sessions.device, self._comm, self.index.size, self.index.trained
        self._check_kernels()
        start, stop = share(trained, comm.rank, comm.world_size)
        self._shard = Shard(device.allocate(stop - start, np.float32), start, trained)
        self._rest = device.allocate(size - trained, np.float32)
        self._here = Held(self._shard, self._rest)
        if size == trained:
            self._saved = Shard(self._shard.part, start, size)
        else:
            # Shares of all parameters begin at other offsets than those of the trained ones.
            first, last = share(size, comm.rank, comm.world_size)
            self._saved = Shard(device.allocate(last - first, np.float32), first, size)

    @property
    def _gradients_held(self) -> int:
        return 0

    def _allocate_for_update(self) -> None:
        super()._allocate_for_update()
        self._token = self._sessions.device.allocate(2, np.float32)
        self._channels: set[int] = set()
        self._begin_exchange()
        self._graphs_of_run: Sharded = sharded(
            self._train_path, self._train_form, self._graphs.eval, self.index, on_gpus=self._on_gpus
        )
        if self._comm.rank == 0:
            self._note()

    def _begin_exchange(self) -> None:
        self._exchange = Exchange(self._comm, self.index, self._shard, self._own)

    def _end_exchange(self) -> None:
        for channel in [*self._channels]:
            self._forget(channel)
        del self._exchange

    def _forget(self, channel: int) -> None:
        """Serve the graph of a channel no more."""
        self._channels.discard(channel)
        self._exchange.drop(channel)
        forget(channel)

    def _take_part(self, channel: int) -> None:
        """Exchange what the graph of a channel would, without a batch."""
        self._exchange.take_part(channel)

    @property
    def _train_form(self) -> Path:
        return self._sessions.fastest_form_of(self._train_path)

    def _note(self) -> None:
        trained, ranks, plan = self.index.trained, self._comm.world_size, self._graphs_of_run
        counts = {entry.name: entry.tensor.count for entry in self.index}
        sizes = [sum(counts[name] for name in layer.tensors) for layer in plan.layers]
        self._report.note(
            f"ZeRO stage 3: parameters and gradients 2 x {ITEM} bytes x {trained} / {ranks} ranks = "
            f"{2 * ITEM * trained / ranks:.0f} bytes, {2 * self._shard.part.count * ITEM} allocated on rank 0; "
            f"{len(sizes)} layers are fetched, of {ITEM * min(sizes)} to {ITEM * max(sizes)} bytes"
        )

    def _open_train(self) -> onnxruntime.InferenceSession:
        model, program = self._graphs_of_run.train
        return self._open_exchanging(model, program, TRAINING)

    def _open_eval(self) -> onnxruntime.InferenceSession:
        model, program = self._graphs_of_run.eval
        return self._open_exchanging(model, program, EVALUATION)

    def _open_exchanging(self, model: onnx.ModelProto, program: Program, channel: int) -> onnxruntime.InferenceSession:
        exchange, library = self._exchange, self._sessions.library
        assert library is not None
        exchange.add(channel, program)
        self._channels.add(channel)
        listen(library, channel, lambda number, given, made: exchange.run(channel, number, given, made))
        return self._sessions.open(model.SerializeToString())

    def _bind_training(self, session: onnxruntime.InferenceSession, gradients: Buffer) -> Binding:
        return self._with_token(super()._bind_training(session, gradients))

    def _with_token(self, binding: Binding) -> Binding:
        binding.read_from(TOKEN, self._token.slice(0, 1), (1,))
        for name in binding.outputs:
            if name.startswith(TOKEN):
                binding.write_to(name, self._token.slice(1, 2), (1,))
        return binding

    def _bind_update(self) -> None:
        self._with_token(self._evaluation)
        super()._bind_update()

    def _add_up(self, batches: Sequence[MicroBatch], seeds: Sequence[int]) -> npt.NDArray[np.float32]:
        self._own.part.fill(0)
        tail = np.zeros(TAIL, np.float32)
        for batch, seed in zip(batches, seeds, strict=True):
            if batch.count:
                tail += self._forward_and_backward(batch, seed)
            else:
                self._take_part(TRAINING)
        return tail

    def _apply(self) -> None:
        for run in self._updates:
            run()

    def _gather_parameters(self) -> None:
        """Parameters are fetched where they are read."""

    def evaluate(
        self, batches: Iterable[MicroBatch], control_values: Callable[[], Sequence[float]]
    ) -> EvaluationOutcome:
        """See the protocol."""
        return super().evaluate(self._in_step(batches), control_values)

    def _in_step(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield batches. While another rank has one and this one has none, takes part in the fetches."""
        left, there = iter(batches), self._sessions.device.allocate(1, np.float64)
        while True:
            batch = next(left, None)
            there.fill(batch is not None)
            self._comm.all_reduce(there)
            if not there.read()[0]:
                return
            if batch is None or not batch.count:
                self._take_part(EVALUATION)
            if batch is not None:
                yield batch

    def state(self) -> Mapping[str, Buffer | Shard]:
        """This rank's shares; that of the parameters is up to date after `before_save`."""
        return {"parameters": self._saved, **self._moments}

    def load_tensors(self, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Set this rank's slice of every tensor of the index to the values given by name."""
        trained, own = self.index.trained, self._shard
        for entry in self.index:
            start, stop = (max(own.start, entry.offset), min(own.stop, entry.end))
            if entry.offset >= trained:
                start, stop = entry.offset, entry.end
            if start < stop:
                values = tensors[entry.name].reshape(-1)
                self._here.slice(start, stop).write(values[start - entry.offset : stop - entry.offset])
        self.begin_average()

    def _saved_by(self, rank: int) -> Range:
        return share(self.index.size, rank, self._comm.world_size)

    def _held_by(self, rank: int) -> Range:
        return share(self.index.trained, rank, self._comm.world_size)

    def before_save(self) -> None:
        """See the protocol."""
        if self._saved.part is self._shard.part:
            return
        me, trained = self._comm.rank, self.index.trained
        self._swap(self._held_by, self._saved_by, self._here, self._saved)
        start, stop = max(trained, self._saved.start), self._saved.stop
        if start < stop:
            self._saved.slice(start, stop).write(self._here.slice(start, stop).read())
        assert self._saved_by(me) == (self._saved.start, self._saved.stop)

    def after_load(self) -> None:
        """See the protocol."""
        if self._saved.part is not self._shard.part:
            self._swap(self._saved_by, self._held_by, self._saved, self._here)
            behind = (self.index.trained, self.index.size)
            self._swap(self._saved_by, lambda rank: behind, self._saved, self._here)

    def _swap(self, have: Callable[[int], Range], want: Callable[[int], Range], source: Sliced, to: Sliced) -> None:
        """Send elements from the ranks that have them to the ranks that need them."""
        me = self._comm.rank

        def read(runs: Runs) -> npt.NDArray[np.generic]:
            return source.slice(*_ends(runs)).read()

        def write(runs: Runs, values: npt.NDArray[np.generic]) -> None:
            to.slice(*_ends(runs)).write(values)

        swap(
            self._comm,
            lambda rank: _common(have(me), want(rank)),
            lambda rank: _common(have(rank), want(me)),
            read,
            write,
        )

    def check(self, samples: Iterable[MicroBatch]) -> None:
        """All ranks check the gradient with shares, on the same micro-batch; see the protocol."""
        from ortflow.workflow.trainer.first_gradient import check_now, has_passed, rows_of

        if not self._spec.train.check_gradient:
            return
        leads, key = self._comm.rank == 0, self.gradient_key()
        if self._comm.broadcast_object(leads and has_passed(key)):
            return
        rows = rows_of(self.index, self._graphs.inputs, self._spec.data.micro_batch)
        report = self._report if leads else Report()
        try:
            check_now(key, samples, rows, lambda batch: self.check_gradient(batch, self._spec.seed), report)
        finally:
            self._forget_checked()

    def gradient_key(self) -> str:
        """See GraphTrainer. A check without shares does not cover their exchange."""
        return f"{super().gradient_key()}-shares"

    def _checked_part(self) -> CheckedPart:
        from ortflow.workflow.trainer.checked_part import CheckedShard

        return CheckedShard(self.index, self._comm, self._shard, self._own, self._exchanging)

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Around a run of a graph that exchanges shares."""
        yield

    def _bind_checked(self, sessions: Sessions, model: Path | bytes) -> Binding:
        """See GraphTrainer: the graph with exchanges on a channel of its own."""
        channel = max(self._channels) + 1
        loaded = onnx.load(model) if isinstance(model, Path) else onnx.load_from_string(model)
        exchanging, program = self._graphs_of_run.another(loaded, channel)
        mine, self._sessions = self._sessions, sessions
        try:
            return self._bind_training(self._open_exchanging(exchanging, program, channel), self._gradients)
        finally:
            self._sessions = mine

    def _forget_checked(self) -> None:
        for channel in [each for each in self._channels if each not in (TRAINING, EVALUATION)]:
            self._forget(channel)

    @property
    def _messages(self) -> int:
        return self._exchange.buffered

    def before_export(self) -> None:
        """See the protocol."""
        behind = (self.index.trained, self.index.size)
        self.lent = LentTensors(
            self._comm, self.index, lambda rank: [self._held_by(rank), *([] if rank else [behind])], self._here
        )

    def lend(self) -> None:
        """See the protocol."""
        self.lent.lend()

    def after_export(self) -> None:
        """See the protocol."""
        self.lent.end()

    def export(
        self, path: Path, samples: Sequence[MicroBatch], tolerance: float | None, *, trial: bool = False
    ) -> float | None:
        """See the protocol."""
        watch = watch_logits(self._graphs, self._spec.onnx_model.loss, self._report) if trial else None
        return export_mapped(
            self._graphs, self.lent, self._sessions, path, samples, tolerance, trial=trial, watch=watch
        )

    def _drop_update(self) -> None:
        super()._drop_update()
        self._end_exchange()
        del self._evaluation, self._shard, self._saved, self._rest, self._here


def _common(one: Range, other: Range) -> Runs:
    first, last = max(one[0], other[0]), min(one[1], other[1])
    if first >= last:
        return NOTHING
    start = np.array([first], np.int64)
    return Runs(start, start, np.array([last - first], np.int64))


def _ends(runs: Runs) -> Range:
    """Of a single run."""
    start = int(runs.whole[0])
    return start, start + int(runs.length[0])
