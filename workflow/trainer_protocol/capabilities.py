"""Optional capabilities of a trainer besides the methods of `Trainer`: one protocol for each.

The steps test for a capability with `isinstance`. A trainer has it if it has all its members; it need not derive from
the protocol.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ortflow.workflow.data.inputs import MicroBatch
from ortflow.workflow.device.copying import Copying
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.pace import Pace

if TYPE_CHECKING:
    from ortflow.workflow.run.operator_records import Recording
    from ortflow.workflow.spec.run import TrainerRunSpec
    from ortflow.workflow.trainer_protocol.trainer import Trainer


@runtime_checkable
class Prefetching(Protocol):
    """Copies batches to a device ahead of their step."""

    prefetches: bool
    """Whether the steps call `prefetch`."""

    def prefetch(self, batches: Sequence[MicroBatch]) -> None:
        """Start to copy the micro-batches of a step to this rank's device.

        Called by another thread while an earlier step runs, with the same objects that `step` gets: the batches of each
        step in order, at most one step ahead of the one that `step` or `begin` computes. Not called once `end_training`
        has been.
        """


@runtime_checkable
class BeginningEarly(Protocol):
    """Queues the passes of the next step before the present one ends."""

    begins: bool
    """Whether `step` calls `before_wait`, and `begin` may be called then."""
    before_wait: Callable[[], None]
    """`step` must call it when its work is queued, before it waits for the loss. Step `train` sets it; until then it
    does nothing.
    """

    def begin(self, batches: Sequence[MicroBatch], *, seeds: Sequence[int], control_values: Sequence[float]) -> None:
        """Queue the passes of the next step while the present one is computed; called by `before_wait` only.

        Must not change the state, which may be saved before the next call of `step`. That call has the same batches,
        seeds and control values; it does not come if the run ends with the present step. All ranks call this, or none.
        """


@runtime_checkable
class Paced(Protocol):
    """Implements `frozen_until` of groups and, with `Averaging`, `train.average`."""

    def at(self, pace: Pace, average_rate: float = 0.0) -> None:
        """Take note of the run's position and of how much of the new weights goes into their average.

        Called by all ranks before each step of a run with `train.average`, or with groups that are frozen at first.
        """


@runtime_checkable
class Averaging(Protocol):
    """Implements `train.average`."""

    def exchange_average(self) -> None:
        """Exchange the weights and their average, of a run with `train.average`.

        Called by all ranks before and after an evaluation, and before `before_export`.
        """


@runtime_checkable
class StoringNumbers(Protocol):
    """Has a state besides the buffers."""

    def numbers(self) -> Mapping[str, float]:
        """Return small numbers that a checkpoint stores besides the buffers, equal on all ranks; called between
        steps."""

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


@runtime_checkable
class CopyingState(Protocol):
    """Returns copies in `state`."""

    def before_save(self) -> None:
        """Bring what `state` returned up to date, if it is a copy; called by all ranks before each save. Until the next
        call it must not change."""

    def after_load(self) -> None:
        """Use what was loaded into `state`, if that is a copy; called by all ranks."""


@runtime_checkable
class DeviceState(Protocol):
    """Has its state in the memory of a device."""

    def copying(self, room: int) -> Copying:
        """Return how to copy the state before it is saved. `room`: bytes of the host's memory that this may take, where
        it takes more than a state in that memory does."""


@runtime_checkable
class Lending(Protocol):
    """Reads parameters from all ranks while rank 0 exports."""

    def before_export(self) -> None:
        """Prepare for `export`; called by all ranks before it, and before `end_training`."""

    def lend(self) -> None:
        """Send rank 0 what it asks for while it exports, until it has called `after_export`; called by the others."""

    def after_export(self) -> None:
        """Let the ranks that `lend` go on; called by rank 0 after its last `export`, also if that failed."""


@runtime_checkable
class Releasing(Protocol):
    """Releases memory."""

    def give_memory_back(self) -> None:
        """Return memory that steps do not need to the system; called between steps."""

    def end_training(self) -> None:
        """Release the memory that only steps need, after the last step. `state` then has only the parameters."""


@runtime_checkable
class Measuring(Protocol):
    """Measures its memory."""

    def memory(self) -> Mapping[str, int]:
        """Return the bytes that this rank stores for training, by part, with the names of
        `ortflow.workflow.memory.buffers`."""

    def device_memory(self) -> Mapping[str, int]:
        """Return what was measured on this rank's GPU, in bytes: `gpu_buffers`, allocated now for what `memory` lists,
        and `gpu_peak`, the most that was in use so far. Empty if the rank computes in the host's memory."""


@runtime_checkable
class Pipelined(Protocol):
    """Measures how long ranks of a pipeline wait."""

    def pass_seconds(self) -> tuple[float, float] | None:
        """Return the seconds in which this rank of a pipeline computed in its passes, and those that the passes took
        with the waits for other ranks; called after the last step. None on every rank of a run that has no pipeline or
        measured nothing."""


@runtime_checkable
class Profiling(Protocol):
    """Implements `monitor.profile`."""

    def record(self) -> Recording | None:
        """Begin to record the times of the operators on this rank, until `Recording.end`; called between steps, for
        `monitor.profile`. None if the trainer has no ONNX Runtime sessions."""

    def flops(self) -> int | None:
        """Return the floating-point operations of the model in both passes over the last micro-batch, counted for the
        products alone, as is usual for the MFU. None if they are not known."""


CAPABILITIES: tuple[type[Any], ...] = (
    Prefetching, BeginningEarly, Paced, Averaging, StoringNumbers, CopyingState, DeviceState, Lending, Releasing,
    Measuring, Pipelined, Profiling,
)  # fmt: skip


def members(capability: type[Any]) -> list[str]:
    """The names that a capability consists of."""
    return sorted(name for name in {*vars(capability), *capability.__annotations__} if not name.startswith("_"))


def exchange_average(trainer: Trainer, spec: TrainerRunSpec) -> None:
    """Exchange the weights and their average, if the run has one."""
    if spec.train.average is not None:
        assert isinstance(trainer, Averaging)
        trainer.exchange_average()


def check_capabilities(trainer: Trainer, spec: TrainerRunSpec) -> None:
    """Raise UserError if a trainer lacks a capability that the run needs, or has only a part of one.

    The steps would call none of the methods of a part, without a word.
    """
    name = spec.trainer.name
    for capability in CAPABILITIES:
        present = [member for member in members(capability) if hasattr(trainer, member)]
        if present and not isinstance(trainer, capability):
            # From CPython 3.12 on, isinstance() with a protocol looks for no members by __getattr__.
            missing = [m for m in members(capability) if inspect.getattr_static(trainer, m, None) is None]
            raise UserError(
                f"trainer {name!r} has {', '.join(present)} and no {', '.join(missing)}",
                where="trainer.name",
                fix=f"{capability.__name__} of {__name__} has all of them; a member that __getattr__ returns is none",
            )
    if spec.train.average is not None and not (isinstance(trainer, Averaging) and isinstance(trainer, Paced)):
        raise UserError(f"trainer {name!r} cannot average weights", where="train.average", fix="remove it")
    if any(group.frozen_until for group in spec.train.groups) and not isinstance(trainer, Paced):
        raise UserError(
            f"trainer {name!r} cannot freeze groups at first", where="train.groups", fix="remove frozen_until"
        )
