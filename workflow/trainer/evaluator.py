"""An evaluation: sums of every metric over this rank's batches, then over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.grid import GridRanks
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.run.progress import evaluation_seed
from ortflow.workflow.trainer import EvaluationOutcome, MicroBatch
from ortflow.workflow.trainer.buffers import TAIL
from ortflow.workflow.trainer.context import StepContext
from ortflow.workflow.trainer.evaluation import Tables, evaluated, gathered_metrics, joined
from ortflow.workflow.trainer.passes import Passes, Scores

Batches = Iterable[MicroBatch]


@dataclass(frozen=True)
class BatchSums:
    """What one micro-batch adds to an evaluation."""

    sums: npt.NDArray[np.float32]
    """Of all metrics, one after the other."""
    count: int
    """Samples."""
    scores: Mapping[str, Sequence[npt.NDArray[np.float32]]]
    """Outputs that are gathered, by name."""


class Evaluator:
    """See the module.

    `counts`: whether no other rank counts the same samples because both hold parts of one replica. `in_step`: the
    batches, in step with ranks that take part in the same passes.
    """

    def __init__(
        self,
        context: StepContext,
        passes: Passes,
        world: Communicator,
        *,
        counts: bool = True,
        in_step: Callable[[Batches], Batches] = lambda batches: batches,
    ) -> None:
        self._context, self._passes, self._world, self._counts, self._in_step = context, passes, world, counts, in_step
        self._totals = context.device.allocate(passes.graphs.metrics.count + TAIL, np.float64)

    def run(self, batches: Batches, control_values: Callable[[], Sequence[float]]) -> EvaluationOutcome:
        """See `Trainer.evaluate`."""
        metrics, replicas = self._passes.graphs.metrics, self._context.replicas
        sums, scores = np.zeros(self._totals.count, np.float64), Scores()
        count, not_finite = metrics.count, None
        for number, batch in enumerate(self._in_step(batches)):
            if batch.count:
                values = self._sums(batch, number * replicas.world_size + replicas.rank, scores)
                if not_finite is None and not np.isfinite(values).all():
                    not_finite = number
                sums[:count] += values
                sums[count] += batch.count
        self._passes.graphs.end_evaluation()
        control = control_values()
        sums[count + 1 : count + 1 + len(control)] = control
        if not self._counts:
            sums[: count + 1] = 0
        self._totals.write(sums)
        self._world.all_reduce(self._totals)
        totals = self._totals.read()
        values_by_name, tables = self._evaluated(metrics.by_name(totals), scores)
        control_sums = totals[count + 1 : count + 1 + len(control)]
        return EvaluationOutcome(values_by_name, round(totals[count]), control_sums, not_finite, tables)

    def batch_sums(self, batch: MicroBatch, place: int) -> BatchSums:
        """The metrics' sums over one micro-batch of an evaluation, the `place`-th of all."""
        scores = Scores()
        return BatchSums(np.array(self._sums(batch, place, scores)), batch.count, scores)

    def of_sums(self, parts: Iterable[BatchSums]) -> EvaluationOutcome:
        """The evaluation of the micro-batches whose sums these are, in order: as `run` of one rank."""
        metrics, count, scores = self._passes.graphs.metrics, 0, Scores()
        sums, not_finite = np.zeros(metrics.count, np.float64), None
        for number, part in enumerate(parts):
            if not_finite is None and not np.isfinite(part.sums).all():
                not_finite = number
            sums += part.sums
            count += part.count
            for name, arrays in part.scores.items():
                scores.setdefault(name, []).extend(arrays)
        values_by_name, tables = self._evaluated(metrics.by_name(sums), scores)
        return EvaluationOutcome(values_by_name, count, np.zeros(0), not_finite, tables)

    def _sums(self, batch: MicroBatch, place: int, scores: Scores) -> npt.NDArray[np.float32]:
        return self._passes.graphs.evaluate(batch, evaluation_seed(self._context.spec.seed, place), scores)

    def _evaluated(
        self, totals: Mapping[str, npt.NDArray[np.float64]], scores: Scores
    ) -> tuple[dict[str, float], Tables]:
        """The results of an evaluation. Collective if scores are gathered: rank 0 then computes them for all."""
        model = self._context.spec.onnx_model
        keys = gathered_metrics(model)
        if not keys:
            return evaluated(totals, {}, model)
        pieces = self._world.gather(scores if self._counts else {})
        own_results = None if pieces is None else evaluated(totals, joined(pieces, keys), model)
        results: tuple[dict[str, float], Tables] = self._world.broadcast_object(own_results)
        return results


def together(ranks: GridRanks, batches: Batches) -> Iterator[MicroBatch]:
    """Yield batches until the first rank of the replica has no more. A rank that was asked to exit has none."""
    source, ended = iter(batches), HostBuffer(np.zeros(1))
    while True:
        batch = next(source, None)
        ended.fill(batch is None)
        ranks.replica.all_reduce(ended)
        if batch is None or ended.array[0]:
            return
        yield batch
