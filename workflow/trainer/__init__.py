"""The seam to what trains. ortflow's own trainer, `graph`, trains ONNX graphs; a package may bring another.

A run file names a trainer (`trainer.name`), an entry point of the group `ortflow.trainers` names its `TrainerBuilder`.
The seven steps know these two protocols alone: a builder checks machines (`check_machine`), makes what all ranks read
(`prepare`) and opens the `Trainer`, which trains (`step`), measures (`evaluate`) and writes the model (`export`).
docs/trainers.md shows the order of the calls and a trainer of 150 lines. A class that derives from a protocol inherits
what may be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ortflow.workflow.comm import Communicator
from ortflow.workflow.data.inputs import MicroBatch as MicroBatch
from ortflow.workflow.device import Buffer, Device
from ortflow.workflow.layout import FlatIndex

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from ortflow.workflow.data.dataset import Dataset
    from ortflow.workflow.data.inputs import BatchInput, Limits
    from ortflow.workflow.spec.base import Section
    from ortflow.workflow.spec.run import RunSpec


@dataclass(frozen=True)
class Report:
    """Where a trainer says what people and programs should know; nowhere unless it is given."""

    note: Callable[[str], None] = lambda line: None
    """A line for the log."""
    warn: Callable[[str], None] = lambda message: None
    """Something a person should know, which the run survives: in the log and in the events."""
    record: Callable[..., None] = lambda event, **fields: None
    """`record(EVENT, field=value, ...)`: a line of the events, plain data."""


@dataclass(frozen=True)
class TrainerContext:
    """What a builder is made from, on every rank."""

    spec: RunSpec
    """The run file, paths absolute."""
    options: Any
    """`trainer.options`, an instance of the builder's `Options`."""
    folder: Path
    """Where `prepare` may leave files for all ranks; it may not exist yet."""
    export_path: Path | None
    """Where the model is exported to; None where it is not."""
    report: Report = Report()


@dataclass(frozen=True)
class Prepared:
    """What `prepare` has made; kept in the run directory's plan."""

    parameters: int
    """Trained elements."""
    fingerprint: str = ""
    """Hash of everything it was made from, for the next `prepare` to compare."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Hash of each file in the folder, by name, as `ortflow.workflow.kept.hashes_of` gives them. Where a file of a
    run is another one, an export of a checkpoint prepares again."""


@dataclass(frozen=True)
class StepOutcome:
    """What one step over all ranks gave; equal on all ranks."""

    loss: float
    grad_norm: float
    samples: int
    """Real samples of all ranks."""
    votes: npt.NDArray[np.float32]
    """Sums over the ranks of what each put in, fp32 [votes]."""
    skipped: str | None
    """Why the parameters were left as they are; None if they were updated."""
    overflow: bool = False
    """They were left because the loss scale was too large for fp16, and the next step has a smaller one: no fault."""


@dataclass(frozen=True)
class EvaluationOutcome:
    """Metrics over the whole evaluation set; equal on all ranks."""

    metrics: Mapping[str, float]
    """By name, `loss` among them."""
    samples: int
    """Real samples of all ranks."""
    votes: npt.NDArray[np.float64]
    """Sums over the ranks of what each put in, fp64 [votes]."""


class TrainerBuilder(Protocol):
    """What an entry point names: a class that is called with a `TrainerContext`, on every rank."""

    Options: ClassVar[type[Section]]
    """The keys of `trainer.options`; `Section` itself where there are none."""

    def __init__(self, context: TrainerContext) -> None: ...

    def check_machine(self) -> Any:
        """Look whether this machine can train; called before `prepare` by one rank of each machine.

        Returns a small plain value, which `open` gets from all machines. Raises UserError where it cannot.
        """
        return None

    def prepare(self, dataset: Dataset, before: Prepared | None) -> Prepared:
        """Check the run and make what all ranks read; called by rank 0 alone, in every attempt and by `validate`.

        `dataset` is the training set, `before` what an earlier attempt prepared. Raises UserError for what is wrong
        with the run file, the data or the place of the export, before any file is changed.
        """

    def inputs(self) -> tuple[Sequence[BatchInput], Limits]:
        """What every micro-batch holds, and the values that it may; called on all ranks behind `prepare`."""

    def open(
        self,
        communicator: Communicator,
        device: Device,
        threads: int,
        machines: Sequence[Any],
        *,
        training: bool = True,
    ) -> Trainer:
        """The trainer of this rank, with the parameters that a new run begins with.

        `threads` are the cores of this rank, `machines` what `check_machine` returned, by machine. Without `training`
        it is opened to export a checkpoint on one rank: as it is behind `end_training`. Raises OrtflowError.
        """


class Trainer(Protocol):
    """What the steps drive: a state in flat buffers that are equal on all ranks between two steps."""

    index: FlatIndex
    """Where each tensor lies in the buffer `parameters`."""
    before_update: Callable[[], None]
    """`step` calls it before it changes anything that a checkpoint holds: a save may still be reading. Step `runtime`
    sets it; until then it does nothing."""

    def state(self) -> Mapping[str, Buffer]:
        """The flat buffers a checkpoint holds, by name; `parameters` is one. The same objects at each call."""

    def environment(self) -> Mapping[str, str]:
        """What the bits of the curve depend on besides the run file, in a few words each, by name.

        A run goes on from a checkpoint only where these are the same, except `device`, `instructions`, `library` and
        `threads`, which another machine may have otherwise.
        """
        return {}

    def check(self, samples: Iterable[MicroBatch]) -> None:
        """Try training on real samples; called by rank 0 alone, before the first step of every attempt.

        Leaves the state as it is. Raises UserError where training would go wrong.
        """
        return

    def step(
        self,
        batches: Sequence[MicroBatch],
        *,
        learning_rate: float,
        update: int,
        seeds: Sequence[int],
        votes: Sequence[float],
    ) -> StepOutcome:
        """One optimizer step over this rank's micro-batches, some of which may have no real sample.

        `update` counts parameter updates from 1; `seeds` are one a micro-batch; `votes`, at most 16, are summed over
        the ranks with the gradients. Where loss or gradient is no number the state stays as it is.
        """

    def numbers(self) -> Mapping[str, float]:
        """Small numbers that a checkpoint holds besides the buffers, equal on all ranks; asked between two steps."""
        return {}

    def restore(self, numbers: Mapping[str, float]) -> None:
        """The numbers of the checkpoint that training goes on from; another trainer's or an earlier version's may lack
        some. Raises ValueError where they cannot be such numbers."""
        return

    def evaluate(self, batches: Iterable[MicroBatch], votes: Callable[[], Sequence[float]]) -> EvaluationOutcome:
        """Metrics over all ranks' batches.

        `votes` is asked when the batches are through; the answers are summed over the ranks with the metrics.
        """

    def memory(self) -> Mapping[str, int]:
        """Bytes of what this rank keeps for training, by part, as `ortflow.workflow.memory.buffers` names them."""
        return {}

    def give_memory_back(self) -> None:
        """Between two steps: return to the system what only other work than steps has needed."""
        return

    def end_training(self) -> None:
        """No step follows: give back the memory that only steps need. `state` holds the parameters alone then."""
        return

    def export(
        self, path: Path, samples: Sequence[MicroBatch], tolerance: float | None, *, trial: bool = False
    ) -> float | None:
        """Write the inference model, or with `trial` only try to; called by rank 0 alone.

        Returns its largest difference to the trained model on the samples; None where it could not be compared.
        Raises UserError where the model is unusable, or where the difference is larger than the tolerance; then the
        file of an earlier export stays. Without a tolerance, the model's own rounding counts.
        """
