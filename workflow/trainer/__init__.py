"""Interface of trainers. ortflow's trainer, `graph`, trains ONNX graphs; packages may provide others.

A run file names a trainer (`trainer.name`); an entry point of the group `ortflow.trainers` names its `TrainerBuilder`.
The seven steps use only these two protocols. A builder checks machines (`check_machine`), creates what all ranks read
(`prepare`) and opens the `Trainer`, which trains (`step`), evaluates (`evaluate`) and writes the model (`export`).
docs/trainers.md shows the order of the calls and a trainer of 150 lines. A class that derives from a protocol inherits
its optional methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from ortflow.workflow.comm import Communicator
from ortflow.workflow.data.inputs import MicroBatch as MicroBatch
from ortflow.workflow.device import Buffer, Device
from ortflow.workflow.device.copying import Copying
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.pace import Pace

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from ortflow.workflow.data.inputs import BatchInput, Limits
    from ortflow.workflow.data.samples import Samples
    from ortflow.workflow.recording import Recording
    from ortflow.workflow.spec.base import Section
    from ortflow.workflow.spec.run import TrainerRunSpec


@dataclass(frozen=True)
class Report:
    """Callbacks for a trainer's messages; they do nothing unless set."""

    note: Callable[[str], None] = lambda line: None
    """Write a line to the log."""
    warn: Callable[[str], None] = lambda message: None
    """Write a warning that does not end the run, to the log and the events."""
    record: Callable[..., None] = lambda event, **fields: None
    """`record(EVENT, field=value, ...)`: write an event of plain data."""


@dataclass(frozen=True)
class TrainerContext:
    """Arguments of a builder, on every rank."""

    spec: TrainerRunSpec
    """The run file, with absolute paths."""
    options: Any
    """`trainer.options`, an instance of the builder's `Options`."""
    folder: Path
    """Folder for files of `prepare` that all ranks read; it may not exist yet."""
    export_path: Path | None
    """Path of the exported model; None if it is not exported."""
    report: Report = Report()
    starting: bool = False
    """Whether the ranks of the run are starting: `prepare` may measure on this machine for some seconds."""


@dataclass(frozen=True)
class Prepared:
    """Result of `prepare`; stored in the run directory's plan."""

    parameters: int
    """Number of trained elements."""
    fingerprint: str = ""
    """Hash of all inputs of `prepare`, compared by the next `prepare`."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Hash of each file in the folder, by name, as `ortflow.workflow.graph_hashes.hashes_of` returns them. If a
    file has changed, an export of a checkpoint calls `prepare` again.
    """


@dataclass(frozen=True)
class StepOutcome:
    """Result of one step over all ranks; equal on all ranks."""

    loss: float
    grad_norm: float
    samples: int
    """Real samples over all ranks."""
    control_values: npt.NDArray[np.float32]
    """Sums of the control values over the ranks, fp32 [control values]."""
    skipped: str | None
    """Why the parameters were not updated; None if they were."""
    overflow: bool = False
    """Whether the update was skipped because the loss scale was too large for fp16. The next step has a smaller one."""


@dataclass(frozen=True)
class EvaluationOutcome:
    """Metrics over the whole evaluation set; equal on all ranks."""

    metrics: Mapping[str, float]
    """Values by name, including `loss`."""
    samples: int
    """Real samples over all ranks."""
    control_values: npt.NDArray[np.float64]
    """Sums of the control values over the ranks, fp64 [control values]."""
    not_finite: int | None = None
    """This rank's first batch, counted from 0, whose loss is NaN or infinite; None if unknown, or if there is none."""
    tables: Mapping[str, list[list[int]]] = field(default_factory=dict)
    """Results that are not a number, by name: confusion matrices."""


class Metrics(Protocol):
    """Loss and metrics of a model's outputs."""

    def of(
        self, names: Sequence[str], results: Iterable[tuple[Sequence[npt.NDArray[Any]], MicroBatch]]
    ) -> Mapping[str, float] | None:
        """Values by name, of the outputs `names` of each batch; None if they do not determine them."""


@runtime_checkable
class Scoring(Protocol):
    """A builder that can evaluate the outputs of a model file; optional."""

    def output_metrics(self) -> Metrics:
        """Return what evaluates them; called after `prepare`."""


class TrainerBuilder(Protocol):
    """The class that an entry point names, called with a `TrainerContext` on every rank."""

    Options: ClassVar[type[Section]]
    """The keys of `trainer.options`; `Section` itself if there are none."""

    def __init__(self, context: TrainerContext) -> None: ...

    def check_machine(self) -> Any:
        """Check whether this machine can train; called before `prepare` by one rank of each machine.

        Returns
        -------
        Any
            A small plain value; `open` receives the values of all machines.

        Raises
        ------
        UserError
            If the machine cannot train.
        """
        return None

    def prepare(self, dataset: Samples, before: Prepared | None) -> Prepared:
        """Check the run and create the files that all ranks read.

        Called only by rank 0, in every attempt, and by `validate`.

        Parameters
        ----------
        dataset
            The training set.
        before
            Result of an earlier attempt; None in the first.

        Raises
        ------
        UserError
            If the run file, the data or the export path is invalid; raised before any file is changed.
        """

    def inputs(self) -> tuple[Sequence[BatchInput], Limits]:
        """Return the inputs of every micro-batch and the limits of their values; called on all ranks after
        `prepare`."""

    def open(
        self,
        communicator: Communicator,
        device: Device,
        threads: int,
        machines: Sequence[Any],
        *,
        training: bool = True,
    ) -> Trainer:
        """Open the trainer of this rank, with the initial parameters of a new run.

        Parameters
        ----------
        communicator
            The connected ranks.
        device
            This rank's device.
        threads
            Number of cores of this rank.
        machines
            Results of `check_machine`, by machine.
        training
            False to export a checkpoint on one rank: the trainer is in the state after `end_training`.

        Raises
        ------
        OrtflowError
            If the trainer cannot be opened.
        """


class Trainer(Protocol):
    """Interface that the steps use. Its state is in flat buffers; except for shards, they are equal on all ranks
    between steps."""

    index: FlatIndex
    """Position of each tensor in the buffer `parameters`."""
    together: bool = False
    """Whether no rank can train alone, because each has a part of the model: all ranks then call `check`."""
    prefetches: bool = False
    """Whether the steps call `prefetch`."""
    begins: bool = False
    """Whether `step` calls `before_wait`, and `begin` may be called then."""
    before_update: Callable[[], None]
    """`step` must call it before it changes anything in `state`, because a save may still be reading. Step `runtime`
    sets it; until then it does nothing.
    """

    before_wait: Callable[[], None] = staticmethod(lambda: None)
    """If `begins` is set, `step` must call it when its work is queued, before it waits for the loss. Step `train` sets
    it.
    """

    def state(self) -> Mapping[str, Buffer | Shard]:
        """Return the flat buffers of a checkpoint by name, including `parameters`; the same objects at each call.

        A buffer that is sharded over the ranks is returned as a `Shard` with this rank's `layout.share`.
        """

    def before_save(self) -> None:
        """Bring what `state` returned up to date, if it is a copy; called by all ranks before each save. Until the next
        call it must not change."""
        return

    def after_load(self) -> None:
        """Use what was loaded into `state`, if that is a copy; called by all ranks."""
        return

    def environment(self) -> Mapping[str, str]:
        """Return everything besides the run file that bit-identical results depend on, as short texts by name.

        A run resumes from a checkpoint only if these are equal, except `device`, `instructions`, `library` and
        `threads`, which may differ between machines.
        """
        return {}

    def check(self, samples: Iterable[MicroBatch]) -> None:
        """Try training on real samples; called before the first step of every attempt, by all ranks if `together` is
        set, otherwise only by rank 0.

        Must not change the state. If `together` is set, an error of any rank ends all of them.

        Raises
        ------
        UserError
            If training would give wrong results.
        """
        return

    def step(
        self,
        batches: Sequence[MicroBatch],
        *,
        learning_rate: float,
        update: int,
        seeds: Sequence[int],
        control_values: Sequence[float],
    ) -> StepOutcome:
        """Run one optimizer step over this rank's micro-batches.

        If loss or gradient is not finite, the state is not changed.

        Parameters
        ----------
        batches
            Micro-batches; some may have no real sample.
        learning_rate
            Learning rate of this step.
        update
            Number of the parameter update, from 1.
        seeds
            One seed per micro-batch.
        control_values
            At most 16 numbers, summed over the ranks with the gradients.

        Returns
        -------
        StepOutcome
            Equal on all ranks.
        """

    def at(self, pace: Pace, average_rate: float = 0.0) -> None:
        """Take note of the run's position and of how much of the new weights goes into their average.

        Called by all ranks before each step of a run with `train.average`, or with groups that are frozen at first.
        """
        return

    def exchange_average(self) -> None:
        """Exchange the weights and their average, of a run with `train.average`.

        Called by all ranks before and after an evaluation, and before `before_export`.
        """
        return

    def begin(self, batches: Sequence[MicroBatch], *, seeds: Sequence[int], control_values: Sequence[float]) -> None:
        """Queue the passes of the next step while the present one is computed; called by `before_wait` only.

        Must not change the state, which may be saved before the next call of `step`. That call has the same batches,
        seeds and control values; it does not come if the run ends with the present step. All ranks call this, or none.
        """
        return

    def prefetch(self, batches: Sequence[MicroBatch]) -> None:
        """Start to copy the micro-batches of a step to this rank's device.

        Called by another thread while an earlier step runs, with the same objects that `step` gets: the batches of each
        step in order, at most one step ahead of the one that `step` or `begin` computes. Not called once `end_training`
        has been.
        """
        return

    def numbers(self) -> Mapping[str, float]:
        """Return small numbers that a checkpoint stores besides the buffers, equal on all ranks; called between
        steps."""
        return {}

    def restore(self, numbers: Mapping[str, float]) -> None:
        """Set the numbers of the checkpoint that training resumes from.

        Parameters
        ----------
        numbers
            Values by name; some may be missing in checkpoints of other trainers or earlier versions.

        Raises
        ------
        ValueError
            If a value is invalid.
        """
        return

    def evaluate(
        self, batches: Iterable[MicroBatch], control_values: Callable[[], Sequence[float]]
    ) -> EvaluationOutcome:
        """Compute the metrics over the batches of all ranks.

        Parameters
        ----------
        batches
            This rank's micro-batches.
        control_values
            Called after the last batch; its numbers are summed over the ranks with the metrics.

        Returns
        -------
        EvaluationOutcome
            Equal on all ranks.
        """

    def memory(self) -> Mapping[str, int]:
        """Return the bytes that this rank stores for training, by part, with the names of
        `ortflow.workflow.memory.buffers`."""
        return {}

    def device_memory(self) -> Mapping[str, int]:
        """Return what was measured on this rank's GPU, in bytes: `gpu_buffers`, allocated now for what `memory` lists,
        and `gpu_peak`, the most that was in use so far. Empty if the rank computes in the host's memory."""
        return {}

    def copying(self, room: int) -> Copying:
        """Return how to copy the state before it is saved. `room`: bytes of the host's memory that this may take, where
        it takes more than a state in that memory does."""
        return Copying()

    def pass_seconds(self) -> tuple[float, float] | None:
        """Return the seconds in which this rank of a pipeline computed in its passes, and those that the passes took
        with the waits for other ranks; called after the last step. None on every rank of a run that has no pipeline or
        measured nothing."""
        return None

    def record(self) -> Recording | None:
        """Begin to record the times of the operators on this rank, until `Recording.end`; called between steps, for
        `monitor.profile`. None if the trainer has no ONNX Runtime sessions."""
        return None

    def flops(self) -> int | None:
        """Return the floating-point operations of the model in both passes over the last micro-batch, counted for the
        products alone, as is usual for the MFU. None if they are not known."""
        return None

    def give_memory_back(self) -> None:
        """Return memory that steps do not need to the system; called between steps."""
        return

    def end_training(self) -> None:
        """Release the memory that only steps need, after the last step. `state` then has only the parameters."""
        return

    def before_export(self) -> None:
        """Prepare for `export`; called by all ranks before it, and before `end_training`."""
        return

    def lend(self) -> None:
        """Send rank 0 what it asks for while it exports, until it has called `after_export`; called by the others."""
        return

    def after_export(self) -> None:
        """Let the ranks that `lend` go on; called by rank 0 after its last `export`, also if that failed."""
        return

    def export(
        self, path: Path, samples: Sequence[MicroBatch], tolerance: float | None, *, trial: bool = False
    ) -> float | None:
        """Write the inference model; called only by rank 0.

        Parameters
        ----------
        path
            File to write.
        samples
            Real samples for the comparison with the trained model.
        tolerance
            Largest allowed difference; if None, it is derived from the model's rounding.
        trial
            Check the export without writing the file.

        Returns
        -------
        float or None
            Largest difference from the trained model on the samples; None if they could not be compared.

        Raises
        ------
        UserError
            If the model is invalid or the difference is larger than the tolerance. An earlier export is then kept.
        """
