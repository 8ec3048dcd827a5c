"""The trainer of ZeRO's stage 3 on GPUs: what `ShardedTrainer` does, queued as `QueuedTrainer` does it.

Layers are gathered and gradients reduced with NCCL on a second stream, while the layer before is computed
(`queued_exchange`); in half precision rounded parameters are gathered from fp32 shares. A pass is captured as a CUDA
graph with all that it exchanges. Opened by `builder`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import onnx

from ortflow.workflow.comm.nccl import NcclCommunicator
from ortflow.workflow.device.capture import Agreement
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.shards.program import Program
from ortflow.workflow.kernels.library import remedy
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.bound_graphs import TAIL
from ortflow.workflow.trainer.offloaded import OffloadedTrainer
from ortflow.workflow.trainer.overlap import OverRanks
from ortflow.workflow.trainer.queued_exchange import QueuedExchange
from ortflow.workflow.trainer.queued_zero import QueuedZeroTrainer
from ortflow.workflow.trainer.sharded import TRAINING, ShardedTrainer


class QueuedShardedTrainer(QueuedZeroTrainer, ShardedTrainer):
    """See the module."""

    _on_gpus = True

    def _check_kernels(self) -> None:
        if self._sessions.operators is None:
            raise UserError(
                "is 3, and this machine has no kernels of ortflow's for GPUs, which gather parameters",
                where="parallel.zero",
                fix=f"{remedy()}, or set it to 2",
            )

    def _begin_exchange(self) -> None:
        operators = self._sessions.operators
        assert operators is not None
        self._queue = QueuedExchange(self._comm, self._device, operators, self.index, self._shard, self._own)

    def _end_exchange(self) -> None:
        for channel in [*self._channels]:
            self._forget(channel)
        del self._queue

    def _forget(self, channel: int) -> None:
        self._channels.discard(channel)
        self._queue.drop(channel)

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        self._queue.begin_pass(fresh=True)
        yield
        self._queue.end_pass()
        self._queue.watch()

    def _take_part(self, channel: int) -> None:
        self._queue.take_part(channel)
        self._queue.end_pass()
        self._queue.watch()

    def _open_exchanging(self, model: onnx.ModelProto, program: Program, channel: int) -> onnxruntime.InferenceSession:
        self._queue.add(channel, program, accumulated=channel == TRAINING and self._spec.accumulation > 1)
        self._channels.add(channel)
        return self._sessions.open(model.SerializeToString())

    def _agreement(self) -> Agreement | None:
        return OverRanks(self._comm) if isinstance(self._comm, NcclCommunicator) else None

    def _run_first(self) -> None:
        self._queue.begin_pass(fresh=True)
        super()._run_first()
        self._queue.end_pass()

    def _run_further(self) -> None:
        self._running.copy_from(self._statistics)
        self._queue.begin_pass(fresh=False)
        self._first.run()
        self._loss.add(self._sums)
        self._queue.end_pass()

    def _add_up(self, batches: Sequence[MicroBatch], seeds: Sequence[int]) -> npt.NDArray[np.float32]:
        for number, (batch, seed) in enumerate(zip(batches, seeds, strict=True)):
            if batch.count:
                self._forward_and_backward(batch, seed, fresh=number == 0)
                self._queue.watch()
            else:
                (self._first_run if number == 0 else self._further_run).skip()
                self._queue.begin_pass(fresh=number == 0)
                self._take_part(TRAINING)
        return np.zeros(TAIL, np.float32)

    def check(self, samples: Iterable[MicroBatch]) -> None:
        """See ShardedTrainer. Ranks wait for each other here: NCCL would take a long check for a rank that hangs."""
        super().check(samples)
        self._comm.barrier()

    @property
    def _messages(self) -> int:
        return self._queue.buffered


class OffloadedShardedTrainer(OffloadedTrainer, QueuedShardedTrainer):
    """The same with moments in the host's memory."""
