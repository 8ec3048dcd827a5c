"""The files of a program's checkpoint: the temporary folder, hashes by all rank processes, and the commit by rank 0.

Nothing here blocks the loop: files are read and made durable in a thread. Until the commit, the newest checkpoint is
the previous one; a failure at any point leaves it so.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortflow.workflow.checkpoint.checkpoint_names import MANIFEST, MARKER
from ortflow.workflow.checkpoint.manifest import FileRecord, mark
from ortflow.workflow.checkpoint.program import ProgramManifest
from ortflow.workflow.checkpoint.program_save import begin_program, files_written, seal_program
from ortflow.workflow.checkpoint.retain import prune
from ortflow.workflow.checkpoint.verify import hash_file, verify
from ortflow.workflow.program.channel import Message
from ortflow.workflow.run.rundir import write_atomically
from ortflow.workflow.system.disk_space import RECORDS, Notice, OutOfDisk, has_room, is_full, out_of_disk
from ortflow.workflow.system.threads import start_or_call

if TYPE_CHECKING:
    from ortflow.workflow.program.context import ProgramContext


class Hashing:
    """Hashes a rank's share of a checkpoint's files in the background, and makes them durable."""

    def __init__(self) -> None:
        self._results: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._closed = False

    def start(self, message: Message) -> None:
        """Begin with the files of a `hash` message."""
        start_or_call("hash", lambda: self._results.put(self._hashed(message)))

    def _hashed(self, message: Message) -> Message:
        done: Message = {"kind": "hashed", "step": message["step"], "error": None, "records": []}
        for name in message["files"]:
            if self._closed:
                break
            try:
                size, digest = hash_file(Path(message["path"]) / name, sync=True)
            except OSError as error:
                return {**done, "error": f"{error.filename or name}: {error.strerror}"}
            done["records"].append({"name": name, "size": size, "hash": digest})
        return done

    def results(self) -> list[Message]:
        """What is done since the last call."""
        return drained(self._results)

    def close(self) -> None:
        """End the work in progress after the present file."""
        self._closed = True


class Commits:
    """Rank 0's part in checkpoints."""

    def __init__(self, context: ProgramContext) -> None:
        self._context = context
        self._results: queue.SimpleQueue[tuple[Message, str | None, str | None]] = queue.SimpleQueue()
        self._begun = 0.0
        self._notice = Notice(context.run_dir.heartbeat)
        self._unsaved: str | None = None
        """Why the newest save has failed, if the disk was full."""

    def make(self, step: int) -> tuple[str | None, str | None]:
        """The temporary folder of a save: its path, or why there is none."""
        context = self._context
        self._begun = context.clock.monotonic()
        try:
            context.fence.hold()
            folder = begin_program(context.store, step, context.attempt)
        except OSError as error:
            return None, self._reason(error)
        context.events.write("checkpoint_start", step=step)
        return str(folder), None

    def shares(self, step: int, ranks: Sequence[int]) -> tuple[dict[int, list[str]], str, str | None]:
        """The files of a save, divided by size among the ranks' processes; its folder; why that fails."""
        context = self._context
        folder = context.store.begin(step, context.attempt)
        try:
            names = files_written(folder)
            sizes = {name: (folder / name).stat().st_size for name in names}
        except OSError as error:
            return {}, str(folder), self._reason(error)
        if not names:
            return {}, str(folder), "the program wrote no file into it"
        return divide(sizes, ranks), str(folder), None

    def finish(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Commit in the background; `results` has the outcome."""
        start_or_call("commit", lambda: self._results.put(self._finish(step, records)))

    def _finish(self, step: int, records: Sequence[Mapping[str, Any]]) -> tuple[Message, str | None, str | None]:
        context = self._context
        store, attempt, keep = context.store, context.attempt, context.spec.checkpoint.keep
        files = tuple(sorted((FileRecord(**record) for record in records), key=lambda record: record.name))
        manifest = ProgramManifest(
            step, context.world.size, files, time.time(), context.record.environment, context.run
        )  # fmt: skip
        try:
            context.fence.hold()
            folder = store.begin(step, attempt)
            data = manifest.encode()
            # Before the mark is removed: one of the two always says that the files may be deleted.
            write_atomically(folder / MANIFEST, data)
            seal_program(folder)
            if (store.place(step) / MARKER).exists() and verify(store, step):
                store.set_aside(step, attempt)
            path = store.commit(step, attempt, mark(data))
        except OSError as error:
            return {"step": step}, None, self._reason(error)
        try:
            prune(store, keep.newest, keep.every, context.distrusted)
        except OSError as error:
            return {"step": step, "bytes": manifest.size, "warning": self._reason(error)}, str(path), None
        return {"step": step, "bytes": manifest.size}, str(path), None

    def results(self) -> list[tuple[str | None, str | None]]:
        """(path, error) of each save that has ended since the last call; it is recorded here."""
        outcomes = []
        for about, path, error in drained(self._results):
            step = int(about["step"])
            if error is not None:
                self.abandon(step, error)
            else:
                seconds = round(self._context.clock.monotonic() - self._begun, 6)
                self._context.events.write(
                    "checkpoint", step=step, seconds=seconds, stall_seconds=seconds, bytes=about["bytes"]
                )
                self._notice.clear()
                self._unsaved, self._context.newest = None, step
            outcomes.append((path, error))
        return outcomes

    def abandon(self, step: int, reason: str) -> None:
        """Remove a failed save; the previous checkpoint is kept."""
        context = self._context
        with contextlib.suppress(OSError):
            self._report_full_disk(step, reason)
        context.store.abandon(step, context.attempt)
        context.events.write("checkpoint_failed", step=step, reason=reason)
        print(f"warning: no checkpoint of step {step}: {reason}; the previous one is kept", flush=True)

    def failed(self, sentence: str) -> None:
        """The run has failed: a full disk is the cause only if the sentence has the error of the save."""
        if self._unsaved is None or names_save(sentence, self._unsaved):
            return
        self._notice.clear()

    def _report_full_disk(self, step: int, reason: str) -> None:
        """While the files of a failed save are there: report the room that it lacked. Errors of programs vary."""
        context = self._context
        folder = context.store.begin(step, context.attempt)
        names = files_written(folder)
        if not has_room(folder, RECORDS):
            self._unsaved = reason
            size = sum((folder / name).stat().st_size for name in names)
            self._notice.report(OutOfDisk(context.store.path, size + RECORDS))

    def _reason(self, error: OSError) -> str:
        if is_full(error):
            lack = out_of_disk(error, default=self._context.store.path)
            self._notice.report(lack)
            return str(lack)
        return f"{error.filename or self._context.store.path}: {error.strerror}"


def names_save(sentence: str, reason: str) -> bool:
    """Whether the sentence of a failure is about a save that failed for a reason, `rank 0: OSError: …`. Pure."""
    return "CommitFailed" in sentence or reason.partition(": ")[2][:200] in sentence


def divide(sizes: Mapping[str, int], ranks: Sequence[int]) -> dict[int, list[str]]:
    """Give files to ranks so that each has about the same number of bytes; ranks without a file are left out. Pure."""
    load = dict.fromkeys(ranks, 0)
    shares: dict[int, list[str]] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = min(load, key=lambda rank: (load[rank], rank))
        load[rank] += sizes[name] + 1
        shares.setdefault(rank, []).append(name)
    return shares


def drained(results: queue.SimpleQueue[Any]) -> list[Any]:
    """Everything in a queue."""
    items = []
    while True:
        try:
            items.append(results.get_nowait())
        except queue.Empty:
            return items
