"""The trainer of ONNX graphs over flat buffers: ONNX Runtime runs the training, evaluation and optimizer graph.

One buffer holds all parameters followed by the running statistics, one all gradients. In the same memory, the gradients
are followed by the running statistics and a short tail of sums, so that one all-reduce per step carries everything that
the ranks must agree on. Called by the training loop. Reads no files except its graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ortflow.workflow.comm import Communicator
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.copying import Copying
from ortflow.workflow.device.shard import Shard, Sliced
from ortflow.workflow.graph.types import LOSS_SUM, LOSS_WEIGHT, SEED, VALID, GraphSet, synced_of
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.memory import buffers, trim
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.optim.segments import Segment, segments
from ortflow.workflow.progress import evaluation_seed
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.optimizers import moments
from ortflow.workflow.spec.run import RunSpec
from ortflow.workflow.trainer import EvaluationOutcome, MicroBatch, Report, StepOutcome, Trainer
from ortflow.workflow.trainer.evaluation import evaluated
from ortflow.workflow.trainer.inference import export_checked
from ortflow.workflow.trainer.watched_logits import watch_logits

if TYPE_CHECKING:
    from ortflow.workflow.trainer.checked_part import CheckedPart
    from ortflow.workflow.trainer.first_gradient import Checked

SILENT = Report()
TAIL = 64
"""Elements of the tail: loss, weight, samples, then the control values."""
CONTROL_VALUES = 3


class GraphTrainer(Trainer):
    """Drives the three graphs of a run; see the module. Without `training` it holds the parameters and exports."""

    def __init__(
        self,
        graphs: GraphSet,
        spec: RunSpec,
        sessions: Sessions,
        communicator: Communicator,
        report: Report = SILENT,
        *,
        training: bool = True,
    ) -> None:
        self.index: FlatIndex = graphs.index
        self.before_update: Callable[[], None] = lambda: None
        self._graphs, self._spec, self._sessions, self._comm = graphs, spec, sessions, communicator
        self._report = report
        self._allocate_parameters()
        self._moments: Mapping[str, Buffer | Shard] = {}
        if training:
            self._open_for_training()

    def _allocate_parameters(self) -> None:
        """The whole flat buffer, and this rank's part of it: all of it."""
        self._parameters = self._sessions.device.allocate(self.index.size, np.float32)
        self._here: Sliced = self._parameters

    def _open_for_training(self) -> None:
        device = self._sessions.device
        state_start, state_end = self.index.span("state")
        self._state_span = (state_start, state_end)
        held, states = self._gradients_held, state_end - state_start
        # Gradients, running statistics and tail in one piece: one collective call per step.
        self._sync = device.allocate(held + states + TAIL, np.float32)
        self._gradients = self._sync.slice(0, held)
        self._statistics = self._sync.slice(held, held + states)
        self._tail = self._sync.slice(held + states, held + states + TAIL)
        # The running statistics that a micro-batch starts from: the state itself changes only with an update.
        self._running = device.allocate(states, np.float32)
        self._sums = device.allocate(2, np.float32)
        self._updates: list[Callable[[], None]] = []
        self._allocate_for_update()

        self._open_passes()
        self._metric_sums = device.allocate(len(self._metric_outputs), np.float32)
        self._totals = device.allocate(len(self._metric_outputs) + TAIL, np.float64)
        self._tie_metrics()
        self._bind_update()

    def _open_passes(self) -> None:
        """The graphs of training and evaluation, bound to the buffers, and the names of the metrics' sums."""
        training = self._open_train()
        self._first = self._bind_training(training, self._gradients)
        self._further = self._bind_training(training, self._scratch) if self._scratch else self._first
        self._evaluation = Binding(self._open_eval(), self._sessions.device)
        self._evaluation.read_tensors(self.index, self._here)
        self._metric_outputs = sorted(name for name in self._evaluation.outputs if name.startswith("ortflow."))

    def _tie_metrics(self) -> None:
        for place, name in enumerate(self._metric_outputs):
            self._evaluation.write_to(name, self._metric_sums.slice(place, place + 1), ())

    @property
    def _gradients_held(self) -> int:
        """Elements of the gradients that a training graph writes."""
        return self.index.trained

    def _open_train(self) -> onnxruntime.InferenceSession:
        return self._sessions.open_fastest(self._train_path)

    @property
    def _train_path(self) -> Path:
        """The training graph of a step; that of the check has the statistics of one rank."""
        return synced_of(self._graphs.train) if self._spec.synced_ranks else self._graphs.train

    def _open_eval(self) -> onnxruntime.InferenceSession:
        return self._sessions.open(self._graphs.eval)

    def _allocate_for_update(self) -> None:
        """The moments, and the buffer for the gradients of further micro-batches."""
        device, spec, trained = self._sessions.device, self._spec, self.index.trained
        self._moments = {name: device.allocate(trained, np.float32) for name in moments(spec.train.optimizer)}
        self._scratch = device.allocate(trained, np.float32) if spec.accumulation > 1 else None

    def _bind_training(self, session: onnxruntime.InferenceSession, gradients: Buffer) -> Binding:
        binding = Binding(session, self._sessions.device)
        binding.read_tensors(self.index, self._here)
        for entry in self.index:
            gradient, new = f"{entry.name}_grad", f"{entry.name}_new"
            if gradient in binding.outputs:
                binding.write_to(gradient, gradients.slice(entry.offset, entry.end), entry.tensor.shape)
            if new in binding.outputs:
                start = entry.offset - self._state_span[0]
                end = start + entry.tensor.count
                binding.read_from(entry.name, self._running.slice(start, end), entry.tensor.shape)
                binding.write_to(new, self._statistics.slice(start, end), entry.tensor.shape)
        for place, name in enumerate((LOSS_SUM, LOSS_WEIGHT)):
            if name in binding.outputs:
                binding.write_to(name, self._sums.slice(place, place + 1), ())
        return binding

    def _bind_scaling(self) -> Binding:
        device, count = self._sessions.device, self._gradients.count
        self._scale = device.allocate(2, np.float32)
        self._norm = device.allocate(1, np.float32)
        scaling = Binding(self._sessions.open_fastest(self._graphs.gradient), device)
        scaling.read_from("gradients", self._gradients, (count,))
        scaling.read_from("inverse_weight", self._scale.slice(0, 1), (1,))
        scaling.read_from("max_norm", self._scale.slice(1, 2), (1,))
        scaling.write_to("gradients.out", self._gradients, (count,))
        scaling.write_to("norm", self._norm, (1,))
        return scaling

    def _bind_update(self) -> None:
        device = self._sessions.device
        self._scaling = self._bind_scaling()
        self._rate = device.allocate(1, np.float32)
        self._update_number = device.allocate(1, np.int64)
        cuts = segments(self._spec.train.optimizer, self.index)
        update = self._bind_pieces(self._sessions.open_fastest(self._graphs.optimizer), cuts, self._gradients)
        self._updates = [self._repeated("the update", update.run)]

    def _repeated(self, name: str, run: Callable[[], None]) -> Callable[[], None]:
        """Work that every step repeats on the same memory; `name` is its name in the log."""
        return run

    def _bind_pieces(
        self,
        session: onnxruntime.InferenceSession,
        cuts: Sequence[Segment],
        gradients: Buffer | Shard,
        moments_: Mapping[str, Buffer | Shard] | None = None,
    ) -> Binding:
        """An update's graph, bound to pieces of the flat buffers. It may leave some unread or unwritten.

        `moments_` are the trainer's unless they are given.
        """
        update = Binding(session, self._sessions.device)
        update.read_from("learning_rate", self._rate, (1,))
        update.read_from("step", self._update_number, (1,))
        flat: dict[str, Sliced] = {"parameters": self._here, "gradients": gradients, **(moments_ or self._moments)}
        for number, piece in enumerate(cuts):
            for name, buffer in flat.items():
                part, value = buffer.slice(piece.start, piece.stop), f"{name}.{number}"
                update.read_from(value, part, (piece.count,))
                if f"{value}.out" in update.outputs:
                    update.write_to(f"{value}.out", part, (piece.count,))
        return update

    def state(self) -> Mapping[str, Buffer | Shard]:
        """Parameters (with running statistics) and the optimizer's moments."""
        return {"parameters": self._parameters, **self._moments}

    def load_tensors(self, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Set every tensor of the index to the values given by name."""
        for entry in self.index:
            self._here.slice(entry.offset, entry.end).write(tensors[entry.name])

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

        loss, norm = loss_sum / weight, self._scale_gradients(weight)
        outcome = StepOutcome(loss, norm, round(samples), summed_control_values, fault_in(loss, norm))
        self.before_update()
        if outcome.skipped is None:
            self._adopt_statistics()
            self._rate.write(np.array([learning_rate], np.float32))
            self._update_number.write(np.array([update], np.int64))
            self._apply()
        else:
            # Scaling by what is NaN or infinite reached the padding, which no later step writes and every norm reads.
            self._forget_gradients()
        return outcome

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

    def _feed(self, binding: Binding, batch: MicroBatch, seed: int) -> None:
        for name, array in batch.arrays.items():
            if name in binding.inputs:
                binding.feed(name, array)
        if VALID in binding.inputs:
            binding.feed(VALID, np.array([batch.count], np.int64))
        if SEED in binding.inputs:
            binding.feed(SEED, np.array([seed], np.int64))

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
        from ortflow.workflow.trainer.gradient_check import GradientCheck

        self._running.copy_from(self._here.slice(*self._state_span))
        exact = self._sessions.exact()
        training = self._first
        # Other ranks take no part in the check, so it is that of the graph with this rank's statistics.
        if exact is not self._sessions or self._spec.synced_ranks:
            training = self._bind_checked(exact, exact.fastest_form_of(self._graphs.train))
        part = self._checked_part()
        check = GradientCheck(
            self._graphs,
            exact,
            lambda model: self._bind_checked(exact, model),
            lambda binding: self._feed(binding, batch, seed),
            part=part,
            sums=self._sums,
            seed=seed,
        )
        checked = check.run(training)
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
        names = self._metric_outputs
        for number, batch in enumerate(batches):
            if batch.count:
                place = number * self._comm.world_size + self._comm.rank
                sums[: len(names)] += self._metrics_of(batch, evaluation_seed(self._spec.seed, place))
                sums[len(names)] += batch.count
        self.give_memory_back()
        mine = control_values()
        sums[len(names) + 1 : len(names) + 1 + len(mine)] = mine
        self._totals.write(sums)
        self._sum_totals()
        return evaluated(self._totals.read(), names, self._spec.onnx_model.metrics, len(mine))

    def _metrics_of(self, batch: MicroBatch, seed: int) -> npt.NDArray[np.float32]:
        self._feed(self._evaluation, batch, seed)
        self._evaluation.run()
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
