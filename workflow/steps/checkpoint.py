"""Step 5: saves the state while training continues. `resume` finds it again at the start.

Called throughout `train`. Each rank writes its own file in a background thread that does not communicate. Control
values in the step's all-reduce tell the ranks whether all have written, so no step waits for a disk. Rank 0 then
commits the files as a checkpoint, also in a thread, because that waits for the disk, too.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ortflow.workflow.checkpoint.commit import SaveFailed, commit, no_room
from ortflow.workflow.checkpoint.identity import Identity
from ortflow.workflow.checkpoint.manifest import FileRecord
from ortflow.workflow.checkpoint.retain import prune
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.checkpoint.writer import Writer, specs
from ortflow.workflow.device.copying import Copying
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.memory import KEPT
from ortflow.workflow.steps.best import best_of
from ortflow.workflow.steps.context import Context
from ortflow.workflow.steps.identity import take_folder
from ortflow.workflow.steps.resume import resume
from ortflow.workflow.steps.save_period import save_period
from ortflow.workflow.system.disk_space import (
    POLL_PERIOD,
    RECORDS,
    Notice,
    OutOfDisk,
    file_size_limit,
    has_room,
    is_full,
    too_large,
)
from ortflow.workflow.system.host_memory import available
from ortflow.workflow.system.threads import start_or_call
from ortflow.workflow.trainer_protocol.capabilities import CopyingState, DeviceState, StoringNumbers

CONTROL_VALUES = 3
"""Control values that a rank adds to the step's all-reduce: still writing, failed, time for a save."""


@dataclass
class Save:
    """A save in progress."""

    step: int
    progress: dict[str, Any]
    started: float
    """When the copy of the state began."""
    begun: float
    """When training was first held up for it."""


class Saver:
    """The checkpoints of one rank's run."""

    def __init__(self, context: Context) -> None:
        self._context, self._clock = context, context.clock
        self._section = context.spec.checkpoint
        self._store = DirectoryStore(context.run_dir.root / self._section.directory, context.location)
        trainer = context.trainer
        self._buffers = trainer.state()
        world = context.world
        room = available() // (2 * context.place.local_size)
        self._writer = Writer(
            self._store, self._buffers, rank=world.rank, world_size=world.world_size, attempt=context.attempt,
            copying=trainer.copying(room) if isinstance(trainer, DeviceState) else Copying(),
        )  # fmt: skip
        trainer.before_update = self._writer.wait_copied
        self._save: Save | None = None
        self.saves = 0
        """Saves that were tried in this attempt, equal on all ranks."""
        self._time_due = False
        self._requested = False
        self._last_save = self._clock.monotonic()
        self._save_seconds = 0.0
        """Seconds from the start of the newest save to its end; on rank 0."""
        self._saved_step = 0
        self._distrusted: Collection[int] = ()
        self._commit: threading.Thread | None = None
        self._outcome: dict[str, Any] | None = None
        self.lack: OutOfDisk | None = None
        """The error of the newest save if the disk was full; rank 0."""
        self._notice = Notice(context.run_dir.heartbeat)

    def resume(self) -> None:
        """Fill the state from the newest complete checkpoint, if there is one. Called by all ranks.

        Raises UserError, on all ranks, if the folder is in use or has checkpoints of another run, or if the limit of a
        file's size does not allow a checkpoint.
        """
        trouble = self._context.first_trouble(self._too_large())
        if trouble is not None:
            raise trouble
        run_dir, run = self._context.run_dir, Identity.from_json(self._context.plan.run)
        self._context.try_on_rank_0(lambda: take_folder(self._store, run_dir, run))
        self._saved_step, self._distrusted = resume(self._context, self._store)

    def _too_large(self) -> UserError | None:
        """Whether this rank may write its file, and rank 0 the inference model; found before the first step."""
        limit, size = file_size_limit(), self._writer.size
        model = self._buffers.get("parameters")
        if self._context.leads and self._context.spec.export.enabled and model is not None:
            size = max(size, model.count * model.dtype.itemsize)
        return None if limit is None or size <= limit else too_large(self._store.path, size)

    def control_values(self) -> Sequence[float]:
        """This rank's control values for the all-reduce of the next step."""
        every = save_period(self._section, self._save_seconds)
        time_due = self._context.leads and every is not None and self._clock.monotonic() - self._last_save >= every
        status = self._writer.poll()
        return (float(status.state == "writing"), float(status.state == "failed"), float(time_due))

    def count(self, control_values: Sequence[float], saves: int) -> None:
        """Act on the sum of all ranks' control values: commit a save that all have written, or abandon one that a rank
        could not write.

        `saves`: their number when these values were taken. Values from before the newest save do not speak of it.
        """
        if saves == self.saves:
            writing, _, time_due = control_values
            self._time_due = time_due > 0
            if self._save is not None and writing == 0:
                self._settle(self._save)
        self._tell()

    @property
    def more_copied(self) -> int:
        """Bytes by which the copy of a save is larger than that of a state in the host's memory."""
        return max(0, self._writer.copied - KEPT)

    @property
    def due(self) -> bool:
        """Whether the run file requests a save after the last step."""
        return self._time_due or self._requested or self.due_after(self._context.progress.step)

    def request(self) -> None:
        """Let a save be due after this step, on all ranks."""
        self._requested = True

    def due_after(self, step: int) -> bool:
        """Whether the run file requests a save after a step for the step's number."""
        every = self._section.every_steps
        return every is not None and step % every == 0

    def save(self) -> None:
        """Save after this step. Waits for a save in progress first, so that none is skipped."""
        context = self._context
        self.wait()
        step = context.progress.step
        self._requested = False
        if step == self._saved_step:
            return
        self._last_save = self._clock.monotonic()
        self._time_due = False
        self.saves += 1
        trouble = context.world.broadcast_object(self._trouble() if context.leads else None)
        if trouble is not None:
            self._failed(step, trouble)
            return
        if isinstance(context.trainer, StoringNumbers):
            context.progress.trainer.update(context.trainer.numbers())
        if isinstance(context.trainer, CopyingState):
            context.trainer.before_save()
        context.events.write("checkpoint_start", step=step)
        context.monitor.flush()
        self._save = Save(step, context.progress.to_json(), self._clock.monotonic(), self._last_save)
        self._writer.start(step, urgent=not self._section.asynchronous)
        if not self._section.asynchronous:
            self.wait()

    def _trouble(self) -> str | None:
        """Why a save cannot begin; None if it can. Rank 0."""
        world = self._context.world
        trouble = no_room(self._store, specs(self._buffers), world.world_size, self._context.trainer.index)
        if isinstance(trouble, OutOfDisk):
            self.lack = trouble
            return str(trouble)
        return None if trouble is None else f"{trouble.filename or self._store.path}: {trouble.strerror}"

    def save_in_the_end(self) -> None:
        """Like `save_and_wait`. On a full disk, wait for space and try again, as long as the run file permits.

        Called by all ranks. Raises Preempted if they are asked to exit meanwhile.
        """
        context, seconds = self._context, self._section.wait_for_room
        end = self._clock.monotonic() + seconds
        waits = False
        while not (saved := self.save_and_wait()) or not self._all_reported():
            lack: OutOfDisk | None = context.world.broadcast_object(
                self.lack if not saved else OutOfDisk(context.events.path, RECORDS)
            )
            if lack is None:
                return
            if context.leads and not waits:
                context.monitor.warn(f"{lack}: training is done; waiting {seconds:g} s for disk space to save")
            waits = True
            if context.leads:
                self._notice.report(lack)
            while not context.world.broadcast_object(
                has_room(lack.path, lack.needed_bytes) or self._clock.monotonic() > end
            ):
                context.leave_if_asked(saved=saved)
                self._clock.sleep(POLL_PERIOD)
            if context.world.broadcast_object(self._clock.monotonic() > end):
                return
        if context.leads:
            self._notice.clear()

    def _all_reported(self) -> bool:
        """Whether every event of every rank is on the disk."""
        flushes = self._context.world.gather(self._context.events.flush())
        return bool(self._context.world.broadcast_object(flushes is not None and all(flushes)))

    def save_and_wait(self) -> bool:
        """Save after this step, and return when it is complete. Returns False if it failed; the record contains the
        reason.
        """
        self.wait()
        if self._context.progress.step not in (0, self._saved_step):
            self.save()
            self.wait()
        return self._context.progress.step in (0, self._saved_step)

    def wait(self) -> None:
        """Return when no save is in progress on any rank. Called by all ranks together."""
        if self._save is not None:
            self._writer.wait()
            self._settle(self._save)
        if self._commit is not None:
            self._commit.join()
        self._tell()
        # Only rank 0 knows the result of a commit.
        self._saved_step = self._context.world.broadcast_object(self._saved_step)

    def _settle(self, save: Save) -> None:
        """Called when all ranks have written or failed. Rank 0 commits the checkpoint or removes it."""
        context = self._context
        status = self._writer.wait()
        self._save = None
        stall = self._writer.stall_seconds
        self._save_seconds = self._clock.monotonic() - save.begun
        answers = context.world.gather((status.record, status.reason, stall, status.full))
        if context.leads and answers is not None:
            context.monitor.stall(save.step, stall)
            reasons = [reason for record, reason, *_ in answers if record is None]
            if reasons:
                if any(full for *_, full in answers):
                    self.lack = OutOfDisk(self._store.path, self._writer.size * context.world.world_size + RECORDS)
                self._store.abandon(save.step, context.attempt)
                self._failed(save.step, reasons[0])
                return
            records = [record for record, *_ in answers]
            if self._commit is not None:
                self._commit.join()
            longest = max(stall for _, _, stall, _ in answers)
            self._commit = start_or_call("commit", partial(self._make, save, records, longest))

    def _make(self, save: Save, records: list[FileRecord], stall: float) -> None:
        context = self._context
        context.fence.hold()
        try:
            manifest = commit(
                self._store, save.step, context.attempt, records,
                buffers=specs(self._buffers), index=context.trainer.index, progress=save.progress,
                environment=context.environment, run=context.plan.run,
            )  # fmt: skip
            keep = self._section.keep
            best = best_of(self._section.best, save.progress)
            if best is not None and best["step"] not in self._store.steps():
                best = None  # it could not be saved
            prune(self._store, keep.newest, keep.every, self._distrusted, () if best is None else (best["step"],))
        except (SaveFailed, OSError) as error:
            full = is_full(error)
            self._outcome = {"step": save.step, "reason": str(error), "full": full}
            return
        seconds = self._clock.monotonic() - save.started
        self._save_seconds = self._clock.monotonic() - save.begun
        self._outcome = {
            "step": save.step, "seconds": round(seconds, 6), "stall_seconds": round(stall, 6), "bytes": manifest.size,
            **({} if best is None else {"best": best}),
        }  # fmt: skip

    def _tell(self) -> None:
        """Record the results of the commit thread, from the thread that writes events."""
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return
        if "reason" in outcome:
            if outcome["full"]:
                self.lack = OutOfDisk(self._store.path, self._writer.size * self._context.world.world_size + RECORDS)
            self._failed(outcome["step"], outcome["reason"])
            return
        self._saved_step = outcome["step"]
        if self.lack is not None:
            self.lack = None
            self._notice.clear()
        self._context.events.write("checkpoint", **outcome)

    def _failed(self, step: int, reason: str) -> None:
        if self.lack is not None:
            self._notice.report(self.lack)
        self._context.events.write("checkpoint_failed", step=step, reason=reason)
        print(f"warning: no checkpoint of step {step}: {reason}; the previous one is kept", flush=True)


def checkpoint(context: Context) -> None:
    """The step's own turn: save the end of training before anything is made from it.

    Raises OrtflowError if it cannot be saved: the result of a finished run must not be lost.
    """
    context.saver.save_in_the_end()
    if (
        context.leads
        and context.progress.step
        not in DirectoryStore(context.run_dir.root / context.spec.checkpoint.directory).steps()
    ):
        cause = f": {context.saver.lack}" if context.saver.lack else ""
        raise OrtflowError(f"the final state, step {context.progress.step}, could not be saved{cause}")
