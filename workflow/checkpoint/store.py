"""The location of checkpoints, and the order of operations that create and delete one.

Called by the writers of all ranks (`begin`), by rank 0 (everything that changes names) and by readers. It does not read
the files: `store_folder` has their places, `own_checkpoints` deletes them. It must not delete a committed checkpoint
without a request, nor a folder that contains other files than a checkpoint's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Protocol

from ortflow.workflow.checkpoint.checkpoint_names import ASIDE, LEFT, MARKER, REPLACED, TRASH, UNMARKED, step_name
from ortflow.workflow.checkpoint.own_checkpoints import delete, is_own_checkpoint, not_own
from ortflow.workflow.checkpoint.store_folder import StoreFolder
from ortflow.workflow.run.rundir import sync_directory, write_atomically


class CheckpointStore(Protocol):
    """The location of checkpoints, the same for all ranks."""

    def steps(self) -> list[int]:
        """Steps with a folder, ascending: complete, incomplete or corrupt."""

    def place(self, step: int) -> Path:
        """Folder of a step's checkpoint, for reading and for messages; it may not exist."""

    def begin(self, step: int, attempt: int) -> Path:
        """Return the temporary folder of a save; create it if it does not exist."""

    def commit(self, step: int, attempt: int, mark: bytes) -> Path:
        """Commit a save as the checkpoint of its step. Called by rank 0 when all files are on the disk."""

    def abandon(self, step: int, attempt: int) -> None:
        """Remove a failed save. Called by rank 0 when no rank is writing."""

    def is_own(self, step: int) -> bool:
        """Whether what is kept under a step holds files of a checkpoint only."""

    def foreign(self) -> Path | None:
        """Something in the location that is not a checkpoint or a part of one; None if there is nothing else."""

    def remove(self, step: int) -> None:
        """Delete a checkpoint, so that a kill leaves no incomplete one. Raises UserError unless `is_own`."""

    def set_aside(self, step: int, attempt: int) -> Path:
        """Rename a damaged checkpoint whose folder name is needed."""

    def clean(self) -> list[Path]:
        """Remove files of dead attempts. Called by rank 0 at the start, when no other attempt is running."""

    def free_bytes(self) -> int:
        """Bytes that can still be written."""


class DirectoryStore(StoreFolder):
    """Checkpoints in a folder of a file system where rename is atomic."""

    def begin(self, step: int, attempt: int) -> Path:
        """Temporary folder of a save, beside the checkpoints, so that a rename can move it there."""
        try:
            return self._made(step, attempt)
        except FileNotFoundError:
            if self._inside is None:
                raise
            return self._made(step, attempt)  # the run directory was renamed meanwhile

    def _made(self, step: int, attempt: int) -> Path:
        """Make the temporary folder; never the run directory, which may have another name by now."""
        folder = self.temporary(step, attempt)
        if self._inside is None:
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        inside = (*Path(self._inside).parts, folder.name)
        root = folder.parents[len(inside) - 1]
        for part in inside:
            root = root / part
            root.mkdir(exist_ok=True)
        return folder

    def commit(self, step: int, attempt: int, mark: bytes) -> Path:
        """Rename the folder, then add the marker: a folder without a marker is not a checkpoint.

        An existing checkpoint of the step is deleted when this one is committed; set it aside first to keep it.
        Anything else of that name is set aside.
        """
        folder, replaced = self.place(step), self.replaced(step)
        temporary = self.temporary(step, attempt)
        # The marker's blocks are written before its name, so that a full disk cannot prevent the commit.
        write_atomically(temporary / UNMARKED, mark)
        if self.is_own(step):
            self._discard(replaced)  # what a deletion that failed has left
            if os.path.lexists(replaced):
                self.remove(step)  # a stranger's folder has the other name
            else:
                os.rename(folder, replaced)
        elif os.path.lexists(folder):
            self.set_aside(step, attempt)
        try:
            os.rename(temporary, folder)
            sync_directory(self.path)
            sync_directory(self.path.parent)
            self._mark(step)
        except OSError:
            with contextlib.suppress(OSError):
                self._restore(step)
            raise
        with contextlib.suppress(OSError):  # the next start tries again
            self._discard(replaced)
        return folder

    def abandon(self, step: int, attempt: int) -> None:
        """Remove a failed save."""
        delete(self.temporary(step, attempt))

    def remove(self, step: int) -> None:
        """Delete a checkpoint."""
        if not self.is_own(step):
            raise not_own(self.place(step))
        self._discard(self.place(step))

    def set_aside(self, step: int, attempt: int) -> Path:
        """Rename a damaged checkpoint to `rejected-step-…`."""
        aside = self.unused(f"{ASIDE}{step_name(step)}-{attempt:02d}")
        os.rename(self.place(step), aside)
        return aside

    def remove_set_asides(self) -> list[Path]:
        """Delete those set aside that contain only a checkpoint's files; returns their names."""
        return [path for path in self.set_asides() if is_own_checkpoint(path) and delete(path)]

    def clean(self) -> list[Path]:
        """Remove unfinished saves and deletions and return them; a save that lacks only its marker is completed.

        A checkpoint that an unfinished save was to replace gets its name back.
        """
        if not self.path.is_dir():
            return []
        removed = [path for path in self.path.iterdir() if LEFT.fullmatch(path.name) and delete(path)]
        for step in self.steps():
            if (self.place(step) / UNMARKED).exists():
                self._mark(step)
        for step in self.replaced_steps():
            self._restore(step)
        return removed

    def free_bytes(self) -> int:
        """Bytes that this user can still write on the file system."""
        self.path.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(self.path).free

    def _mark(self, step: int) -> None:
        folder = self.place(step)
        os.rename(folder / UNMARKED, folder / MARKER)
        sync_directory(folder)

    def _restore(self, step: int) -> None:
        """Leave one checkpoint of a step whose save has ended: the new one if it is committed, else the one before."""
        folder, replaced = self.place(step), self.replaced(step)
        if (folder / MARKER).is_file():
            self._discard(replaced)
            return
        if self.is_own(step):
            self.remove(step)
        if is_own_checkpoint(replaced) and not os.path.lexists(folder):
            os.rename(replaced, folder)
            sync_directory(self.path)

    def _discard(self, folder: Path) -> None:
        """Rename a checkpoint that nobody needs any more, and delete it."""
        if is_own_checkpoint(folder):
            # A partly deleted one must not be taken for an incomplete one; on NFS, files that are open elsewhere stay.
            trash = self.unused(TRASH + folder.name.removeprefix(REPLACED))
            os.rename(folder, trash)
            delete(trash)
