"""Checks machines, creates what all ranks read, and opens a trainer on each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from ortflow.workflow.comm import Communicator
from ortflow.workflow.data.inputs import MicroBatch
from ortflow.workflow.device import Device

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from ortflow.workflow.data.inputs import BatchInput, Limits
    from ortflow.workflow.data.samples import Samples
    from ortflow.workflow.spec.base import Section
    from ortflow.workflow.spec.run import TrainerRunSpec
    from ortflow.workflow.trainer_protocol.trainer import Trainer


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
    """Hash of each file in the folder, by name, as `ortflow.workflow.run.graph_hashes.hashes_of` returns them. If a
    file has changed, an export of a checkpoint calls `prepare` again.
    """


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
