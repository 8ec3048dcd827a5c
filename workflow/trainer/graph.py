"""The trainer of ONNX graphs over flat buffers: ONNX Runtime runs the training, evaluation and optimizer graph.

Called by the training loop. The buffers and the graphs are those of `bound_graphs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ortflow.workflow.comm import Communicator
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.copying import Copying
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.memory import buffers, trim
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.pace import Pace
from ortflow.workflow.progress import evaluation_seed
from ortflow.workflow.recording import Recording
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.averages import BUFFER
from ortflow.workflow.trainer import EvaluationOutcome, MicroBatch, StepOutcome
from ortflow.workflow.trainer.averaged import exchange
from ortflow.workflow.trainer.bound_graphs import GATHERED, TAIL, BoundGraphs
from ortflow.workflow.trainer.evaluation import Tables, evaluated, gathered_metrics, joined
from ortflow.workflow.trainer.inference import export_checked
from ortflow.workflow.trainer.watched_logits import watch_logits

if TYPE_CHECKING:
    from ortflow.workflow.trainer.checked_part import CheckedPart
    from ortflow.workflow.trainer.first_gradient import Checked

CONTROL_VALUES = 3
"""Place of the control values in the tail."""


@dataclass(frozen=True)
class BatchSums:
    """What one micro-batch adds to an evaluation."""

    sums: npt.NDArray[np.float32]
    """Of all metrics, one after the other."""
    count: int
    """Samples."""
    scores: Mapping[str, Sequence[npt.NDArray[np.float32]]]
    """Outputs that are gathered, by name."""


class GraphTrainer(BoundGraphs):
    """Drives the three graphs of a run; see the module. Without `training` it holds the parameters and exports."""

    def state(self) -> Mapping[str, Buffer | Shard]:
        """Parameters (with running statistics) and the optimizer's moments."""
        return {"parameters": self._parameters, **self._moments}

    def load_tensors(self, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Set every tensor of the index to the values given by name."""
        for entry in self.index:
            self._here.slice(entry.offset, entry.end).write(tensors[entry.name])
        self.begin_average()

    def begin_average(self) -> None:
        """Let the average equal the weights."""
        if (both := self._averaged_here()) is not None:
            weights, average = both
            average.copy_from(weights)

    def _averaged_here(self) -> tuple[Buffer, Buffer] | None:
        """The weights that this rank averages, and their average; None if the run has none."""
        average = self._moments.get(BUFFER)
        if average is None:
            return None
        if isinstance(average, Shard):
            return self._here.slice(average.start, average.stop), average.part
        return self._here.slice(0, average.count), average

    def exchange_average(self) -> None:
        """See the protocol."""
        if (both := self._averaged_here()) is not None:
            self.before_update()
            exchange(*both)

    def step(
        self,
        batches: Sequence[MicroBatch],
        *,
        learning_rate: float,
        update: int,
        seeds: Sequence[int],
        control_values: Sequence[float],
    ) -> StepOutcome:
        """Forward and backward over the micro-batches, one all-reduce, one optimizer update."""
        tail = self._accumulate(batches, seeds)
        tail[CONTROL_VALUES : CONTROL_VALUES + len(control_values)] = control_values
        self._tail.write(tail)
        self._sum_over_ranks()
        tail = self._tail.read()
        loss_sum, weight, samples = (float(value) for value in tail[:CONTROL_VALUES])
        summed_control_values = tail[CONTROL_VALUES : CONTROL_VALUES + len(control_values)].copy()
        if weight <= 0:
            return StepOutcome(math.nan, math.nan, int(samples), summed_control_values, "no label of the batch counts")

        self._thaw.silence()
        loss, norm = loss_sum / weight, self._scale_gradients(weight)
        outcome = StepOutcome(loss, norm, round(samples), summed_control_values, fault_in(loss, norm))
        self.before_update()
        if outcome.skipped is None:
            self._adopt_statistics()
            self._rate.write(np.array([learning_rate], np.float32))
            self._update_number.write(np.array([update], np.int64))
            self._thaw.count()
            self._apply()
        else:
            # Scaling by what is NaN or infinite reached the padding, which no later step writes and every norm reads.
            self._forget_gradients()
        return outcome

    def at(self, pace: Pace, average_rate: float = 0.0) -> None:
        """See the protocol."""
        self._average_rate.write(np.array([average_rate], np.float32))
        self._thaw.at(pace)

    def numbers(self) -> Mapping[str, float]:
        """See the protocol."""
        return self._thaw.numbers()

    def restore(self, numbers: Mapping[str, float]) -> None:
        """See the protocol."""
        self._thaw.restore(numbers)

    def _sum_over_ranks(self) -> None:
        self._comm.all_reduce(self._sync)

    def _scale_gradients(self, weight: float) -> float:
        """Average and clip the summed gradients. Returns the norm before clipping."""
        clip = self._spec.train.clip_norm
        self._scale.write(np.array([1.0 / weight, math.inf if clip is None else clip], np.float32))
        self._scaling.run()
        return float(self._norm.read()[0])

    def _apply(self) -> None:
        """New parameters and moments, on all ranks."""
        for run in self._updates:
            run()

    def _forget_gradients(self) -> None:
        self._gradients.fill(0)

    def _accumulate(self, batches: Sequence[MicroBatch], seeds: Sequence[int]) -> npt.NDArray[np.float32]:
        """Compute gradients and running statistics of this rank's micro-batches. Returns their tail."""
        self._statistics.copy_from(self._here.slice(*self._state_span))
        return self._add_up(batches, seeds)

    def _add_up(self, batches: Sequence[MicroBatch], seeds: Sequence[int]) -> npt.NDArray[np.float32]:
        tail = np.zeros(TAIL, np.float32)
        fresh = True
        for batch, seed in zip(batches, seeds, strict=True):
            if batch.count == 0:
                continue
            tail += self._forward_and_backward(batch, seed, fresh=fresh)
            fresh = False
        if fresh:
            self._without_samples()
        return tail

    def _without_samples(self) -> None:
        """Take part in a step as a rank that has no samples."""
        self._gradients.fill(0)

    def _forward_and_backward(self, batch: MicroBatch, seed: int, *, fresh: bool = True) -> npt.NDArray[np.float32]:
        """Run the training graph on a micro-batch. Returns its contribution to the tail.

        `fresh` gradients replace those in the buffer; others are added to them.
        """
        binding = self._first if fresh else self._further
        # Running statistics are updated by each micro-batch, as in PyTorch.
        self._running.copy_from(self._statistics)
        self._feed(binding, batch, seed)
        # Dropout's masks come from ONNX Runtime's global generator: seeded each run, a resumed run repeats them.
        onnxruntime.set_seed(seed)
        binding.run()
        if not fresh and self._scratch is not None:
            self._gradients.add(self._scratch)
        tail = np.zeros(TAIL, np.float32)
        tail[:2] = self._sums.read()
        tail[2] = batch.count
        return tail

    def _adopt_statistics(self) -> None:
        state = self._here.slice(*self._state_span)
        if self._comm.world_size == 1:
            state.copy_from(self._statistics)
        elif state.count:
            state.write(self._statistics.read() / np.float32(self._comm.world_size))

    def environment(self) -> Mapping[str, str]:
        """See the protocol."""
        from ortflow.workflow.trainer.environment import environment_of

        return environment_of(self._graphs, self._spec.kernels, self._sessions)

    def check(self, samples: Iterable[MicroBatch]) -> None:
        """Check the gradient on a micro-batch, if the run file requests it and the same check has not passed before."""
        if not self._spec.train.check_gradient:
            return
        from ortflow.workflow.trainer.first_gradient import check_once, rows_of

        key, rows = self.gradient_key(), rows_of(self.index, self._graphs.inputs, self._spec.data.micro_batch)
        check_once(key, samples, rows, lambda batch: self.check_gradient(batch, self._spec.seed), self._report)

    def gradient_key(self) -> str:
        """A hash of everything that determines the gradient: while it is unchanged, one check is enough."""
        from ortflow.workflow.trainer.gradient_check import key_of

        return key_of(self._graphs, self._sessions.kernels)

    def check_gradient(self, batch: MicroBatch, seed: int) -> Checked | None:
        """Check on a real micro-batch that the gradient is the loss's.

        On this rank alone, if it holds all parameters. None if the micro-batch has no finite loss. Parameters are as
        before afterwards, but not behind an error, which ends the run: to write them might wait for other ranks.
        Raises UserError if the gradient is wrong, naming tensors and node.
        """
        from ortflow.workflow.trainer.checked_graph import CheckedGraph
        from ortflow.workflow.trainer.gradient_check import GradientCheck

        self._running.copy_from(self._here.slice(*self._state_span))
        exact = self._sessions.exact()
        training = self._first
        # Other ranks take no part in the check, so it is that of the graph with this rank's statistics.
        if exact is not self._sessions or self._spec.synced_ranks:
            training = self._bind_checked(exact, exact.fastest_form_of(self._graphs.train))
        part = self._checked_part()
        graph = CheckedGraph(
            self._graphs,
            exact,
            lambda model: self._bind_checked(exact, model),
            lambda binding: self._feed(binding, batch, seed),
            part=part,
            sums=self._sums,
            seed=seed,
        )
        checked = GradientCheck(self._graphs, exact, graph).run(training)
        if checked is not None and training is not self._first:
            self._compare_precision(part, training, batch, seed)
        part.gradients.fill(0)
        return checked

    def _checked_part(self) -> CheckedPart:
        """What the check of the gradient compares on this rank."""
        from ortflow.workflow.trainer.checked_part import CheckedPart

        return CheckedPart(self.index, self._parameters, self._gradients)

    def _bind_checked(self, sessions: Sessions, model: Path | bytes) -> Binding:
        """A training graph for the check of the gradient."""
        return self._bind_training(sessions.open(model), self._gradients)

    def _compare_precision(self, part: CheckedPart, exact: Binding, batch: MicroBatch, seed: int) -> None:
        """Warn if the gradient of training is far from that of `exact`, the training graph in fp32."""

    def evaluate(
        self, batches: Iterable[MicroBatch], control_values: Callable[[], Sequence[float]]
    ) -> EvaluationOutcome:
        """Sums of every metric over this rank's batches, then over the ranks."""
        # Values of the two graphs differ in size: memory that one leaves in the arena hardly serves the other.
        self.give_memory_back()
        sums = np.zeros(self._totals.count, np.float64)
        count, not_finite = self._metric_count, None
        self._scores: dict[str, list[npt.NDArray[np.float32]]] = {}
        for number, batch in enumerate(batches):
            if batch.count:
                place = number * self._comm.world_size + self._comm.rank
                found = self._metrics_of(batch, evaluation_seed(self._spec.seed, place))
                if not_finite is None and not np.isfinite(found).all():
                    not_finite = number
                sums[:count] += found
                sums[count] += batch.count
        self.give_memory_back()
        mine = control_values()
        sums[count + 1 : count + 1 + len(mine)] = mine
        self._totals.write(sums)
        self._sum_totals()
        totals = self._totals.read()
        pieces = np.split(totals[:count], np.cumsum([math.prod(shape) for shape in self._metric_outputs.values()]))
        by_name = dict(zip(self._metric_outputs, pieces, strict=False))
        metrics, tables = self._evaluated(by_name)
        control = totals[count + 1 : count + 1 + len(mine)]
        return EvaluationOutcome(metrics, round(totals[count]), control, not_finite, tables)

    def batch_sums(self, batch: MicroBatch, place: int) -> BatchSums:
        """The metrics' sums over one micro-batch of an evaluation, the `place`-th of all."""
        self._scores = {}
        found = self._metrics_of(batch, evaluation_seed(self._spec.seed, place))
        return BatchSums(np.array(found), batch.count, self._scores)

    def evaluate_sums(self, parts: Iterable[BatchSums]) -> EvaluationOutcome:
        """The evaluation of the micro-batches whose sums these are, in order: as `evaluate` of one rank."""
        sums, count, scores = np.zeros(self._metric_count, np.float64), 0, dict[str, list[npt.NDArray[np.float32]]]()
        not_finite = None
        for number, part in enumerate(parts):
            if not_finite is None and not np.isfinite(part.sums).all():
                not_finite = number
            sums += part.sums
            count += part.count
            for name, arrays in part.scores.items():
                scores.setdefault(name, []).extend(arrays)
        self._scores = scores
        pieces = np.split(sums, np.cumsum([math.prod(shape) for shape in self._metric_outputs.values()]))
        metrics, tables = self._evaluated(dict(zip(self._metric_outputs, pieces, strict=False)))
        return EvaluationOutcome(metrics, count, np.zeros(0), not_finite, tables)

    def _evaluated(self, totals: Mapping[str, npt.NDArray[np.float64]]) -> tuple[dict[str, float], Tables]:
        """The results of an evaluation. Collective if scores are gathered: rank 0 then computes them for all."""
        model, keys = self._spec.onnx_model, gathered_metrics(self._spec.onnx_model)
        if not keys:
            return evaluated(totals, {}, model)
        own, self._scores = self._scores, {}
        pieces = self._world.gather(own if self._gives_scores else {})
        found = None if pieces is None else evaluated(totals, joined(pieces, keys), model)
        results: tuple[dict[str, float], Tables] = self._world.broadcast_object(found)
        return results

    @property
    def _world(self) -> Communicator:
        """All ranks of the run."""
        return self._comm

    @property
    def _gives_scores(self) -> bool:
        """Whether no other rank has the same samples because both hold parts of one replica."""
        return True

    def _metrics_of(self, batch: MicroBatch, seed: int) -> npt.NDArray[np.float32]:
        self._feed(self._evaluation, batch, seed)
        names = sorted(name for name in self._evaluation.outputs if name.endswith(GATHERED))
        for name, value in self._evaluation.run_for(names).items():
            self._scores.setdefault(name, []).append(np.array(value.numpy()))
        self._evaluation.forget(names)
        return self._metric_sums.read()

    def _sum_totals(self) -> None:
        self._comm.all_reduce(self._totals)

    def memory(self) -> Mapping[str, int]:
        """Bytes of the flat buffers and of a checkpoint's copy, by part."""
        trained = self.index.trained
        return buffers(
            trained,
            self.index.size - trained,
            len(self._moments),
            accumulation=self._spec.accumulation,
            world_size=self._comm.world_size,
            zero=self._spec.parallel.zero,
            rank=self._comm.rank,
            messages=self._messages,
            chunks=self._spec.parallel.chunks,
            staging=self._staging,
        )

    @property
    def _staging(self) -> int | None:
        """Elements of device memory through which moments pass that lie on the host; None if they do not."""
        return None

    def device_memory(self) -> Mapping[str, int]:
        """See the protocol."""
        return self._sessions.device.memory()

    def copying(self, room: int) -> Copying:
        """See the protocol."""
        return self._sessions.device.copying(room)

    @property
    def _messages(self) -> int:
        """Elements of the buffers through which parameters and gradients pass."""
        return 0

    def record(self) -> Recording | None:
        """See the protocol."""
        return self._sessions.record()

    def flops(self) -> int | None:
        """See the protocol. With recomputed values the graph has products that are not the model's."""
        import onnx

        from ortflow.workflow.graph.stages.flops import flops_in

        if self._spec.onnx_model.recompute:
            return None
        return flops_in(onnx.load(self._graphs.train), {name: shape for name, _, shape in self._first.fed})

    def give_memory_back(self) -> None:
        """See the protocol."""
        # Any graph whose results are not read will do: gradients are unused between two steps.
        self._scaling.run(give_back=True)
        trim()

    def end_training(self) -> None:
        """Release the memory that only steps need; see the protocol."""
        self.give_memory_back()
        self.before_update = lambda: None
        self._moments = {}
        self._drop_passes()
        self._drop_update()
        del self._sync, self._gradients, self._statistics, self._tail, self._scratch

    def _drop_passes(self) -> None:
        del self._first, self._further

    def _drop_update(self) -> None:
        del self._updates, self._scaling

    def export(
        self, path: Path, samples: Sequence[MicroBatch], tolerance: float | None, *, trial: bool = False
    ) -> float | None:
        """Write the inference model with the trained parameters, checked; see the protocol."""
        exact = self._sessions.exact()
        watch = watch_logits(self._graphs, self._spec.onnx_model.loss, self._report) if trial else None
        return export_checked(self._graphs, self._parameters, exact, path, samples, tolerance, trial=trial, watch=watch)


def fault_in(loss: float, norm: float) -> str | None:
    """Why a step is skipped; None if it is not."""
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(norm):
        return f"the gradient norm is {norm}"
    return None
