"""The location of checkpoints, and the order of operations that create and delete one.

Called by the writers of all ranks (`begin`), by rank 0 (everything that changes names) and by readers. It does not read
the files. It must not delete a committed checkpoint without a request, nor a folder that contains other files than a
checkpoint's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from pathlib import Path
from typing import Protocol

from ortflow.workflow.checkpoint.manifest import format_of
from ortflow.workflow.checkpoint.program import FORMAT, decode_program
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.location import Location
from ortflow.workflow.run.rundir import sync_directory, write_atomically
from ortflow.workflow.system import own_files
from ortflow.workflow.system.files import read_whole

MARKER = "COMMITTED"
MANIFEST = "manifest.json"

_STEP = re.compile(r"step-([0-9]{8,})")
_TEMPORARY = ".tmp-"
_TRASH = ".trash-"
_REPLACED = ".replaced-"
"""The checkpoint of a step that is being saved again: what a kill before the commit leaves of it."""
_ASIDE = "rejected-"
_UNMARKED = ".unmarked"
_FILES = re.compile(
    rf"{MARKER}|{re.escape(MANIFEST)}|{re.escape(_UNMARKED)}|rank-\d{{4,}}\.safetensors|{own_files.TEMPORARY}"
)
_PROGRAM = ".program"
"""In the temporary folder of a program's save: all that is in it is the save's. Removed before the commit."""
_LEFT = re.compile(r"\.tmp-step-\d{8,}-\d{2,}|\.trash-step-\d{8,}(\.\d+)?")
_LEFT_REPLACED = re.compile(r"\.replaced-step-([0-9]{8,})")
LOCK = ".run.lock"
"""Name of the lock of a folder outside its run directory, see `folder_lock`."""
_LOCK = re.compile(re.escape(LOCK))
_SET_ASIDE = re.compile(r"rejected-step-\d{8,}-\d{2,}(\.\d+)?")


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


class DirectoryStore:
    """Checkpoints in a folder of a file system where rename is atomic.

    Parameters
    ----------
    path
        The folder; made when something is saved.
    location
        The run directory. If the folder is inside it, it follows the directory to another name.
    """

    def __init__(self, path: Path, location: Location | None = None) -> None:
        self._path, self._location = Path(path), location
        self._inside = None if location is None else location.inside(self._path)

    @property
    def path(self) -> Path:
        """The folder."""
        if self._location is None or self._inside is None:
            return self._path
        return self._location.path / self._inside

    def steps(self) -> list[int]:
        """Steps with a folder or file, ascending."""
        try:
            names = os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        folders = [(int(match[1]), match[0]) for match in map(_STEP.fullmatch, names) if match]
        return sorted(step for step, name in folders if name == step_name(step))

    def place(self, step: int) -> Path:
        """Folder of a step's checkpoint."""
        return self.path / step_name(step)

    def folders(self) -> list[tuple[int, Path]]:
        """Steps and their folders, the newest step first; also of checkpoints that a killed save was to replace."""
        folders = [(step, self.place(step)) for step in self.steps()]
        folders += [(step, self._replaced(step)) for step in self._replaced_steps()]
        return sorted(folders, reverse=True)

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
        folder = self._temporary(step, attempt)
        if self._inside is None:
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        inside = (*Path(self._inside).parts, folder.name)
        root = folder.parents[len(inside) - 1]
        for part in inside:
            root = root / part
            root.mkdir(exist_ok=True)
        return folder

    def begin_program(self, step: int, attempt: int) -> Path:
        """Empty temporary folder of a program's save: the program writes what it likes there."""
        self.abandon(step, attempt)
        folder = self.begin(step, attempt)
        (folder / _PROGRAM).touch()
        return folder

    def written(self, step: int, attempt: int) -> list[str]:
        """The files that a program has written, as paths in the folder. Raises OSError for anything but a file."""
        folder = self._temporary(step, attempt)
        paths = []
        for root, folders, files in os.walk(folder):
            for name in sorted((*folders, *files)):
                path = Path(root, name)
                if path.is_symlink() or not (path.is_dir() or path.is_file()):
                    raise OSError(errno.EINVAL, "is not a file, and cannot be saved", str(path))
            paths += [Path(root, name).relative_to(folder).as_posix() for name in files]
        reserved = [name for name in paths if _FILES.fullmatch(name) and not name.startswith("rank-")]
        if reserved:
            raise OSError(errno.EEXIST, "has a name that checkpoints use themselves", str(folder / reserved[0]))
        return sorted(name for name in paths if name != _PROGRAM)

    def seal_program(self, step: int, attempt: int) -> None:
        """Before the commit of a program's save: its folders are durable, and its mark is removed."""
        folder = self._temporary(step, attempt)
        (folder / _PROGRAM).unlink()
        for root, _, _ in os.walk(folder, topdown=False):
            sync_directory(Path(root))

    def commit(self, step: int, attempt: int, mark: bytes) -> Path:
        """Rename the folder, then add the marker: a folder without a marker is not a checkpoint.

        An existing checkpoint of the step is deleted when this one is committed; set it aside first to keep it.
        Anything else of that name is set aside.
        """
        folder, replaced = self.place(step), self._replaced(step)
        temporary = self._temporary(step, attempt)
        # The marker's blocks are written before its name, so that a full disk cannot prevent the commit.
        write_atomically(temporary / _UNMARKED, mark)
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
        _delete(self._temporary(step, attempt))

    def is_own(self, step: int) -> bool:
        """Whether a step's folder is a real folder that contains only a checkpoint's files."""
        return _is_own(self.place(step))

    def foreign(self) -> Path | None:
        """The first name in the folder that the store does not give; the folder itself if it is a file."""
        try:
            names = sorted(os.listdir(self.path))
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            return self.path if os.path.lexists(self.path) else None
        patterns = (_STEP, _LEFT, _LEFT_REPLACED, _SET_ASIDE, _LOCK)
        foreign = (name for name in names if not any(pattern.fullmatch(name) for pattern in patterns))
        return next((self.path / name for name in foreign), None)

    def remove(self, step: int) -> None:
        """Delete a checkpoint. It is renamed first, so that a partly deleted one is not taken for an incomplete one."""
        if not self.is_own(step):
            raise _not_own(self.place(step))
        self._discard(self.place(step))

    def set_aside(self, step: int, attempt: int) -> Path:
        """Rename a damaged checkpoint to `rejected-step-…`."""
        aside = self._unused(f"{_ASIDE}{step_name(step)}-{attempt:02d}")
        os.rename(self.place(step), aside)
        return aside

    def set_asides(self) -> list[Path]:
        """Damaged checkpoints that were set aside."""
        try:
            return sorted(path for path in self.path.iterdir() if _SET_ASIDE.fullmatch(path.name))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove_set_asides(self) -> list[Path]:
        """Delete those set aside that contain only a checkpoint's files; returns their names."""
        return [path for path in self.set_asides() if _is_own(path) and _delete(path)]

    def clean(self) -> list[Path]:
        """Remove unfinished saves and deletions and return them; a save that lacks only its marker is completed.

        A checkpoint that an unfinished save was to replace gets its name back.
        """
        if not self.path.is_dir():
            return []
        removed = [path for path in self.path.iterdir() if _LEFT.fullmatch(path.name) and _delete(path)]
        for step in self.steps():
            if (self.place(step) / _UNMARKED).exists():
                self._mark(step)
        for step in self._replaced_steps():
            self._restore(step)
        return removed

    def free_bytes(self) -> int:
        """Bytes that this user can still write on the file system."""
        self.path.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(self.path).free

    def _mark(self, step: int) -> None:
        folder = self.place(step)
        os.rename(folder / _UNMARKED, folder / MARKER)
        sync_directory(folder)

    def _replaced_steps(self) -> list[int]:
        try:
            names = os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [int(match[1]) for match in map(_LEFT_REPLACED.fullmatch, names) if match]

    def _restore(self, step: int) -> None:
        """Leave one checkpoint of a step whose save has ended: the new one if it is committed, else the one before."""
        folder, replaced = self.place(step), self._replaced(step)
        if (folder / MARKER).is_file():
            self._discard(replaced)
            return
        if self.is_own(step):
            self.remove(step)
        if _is_own(replaced) and not os.path.lexists(folder):
            os.rename(replaced, folder)
            sync_directory(self.path)

    def _discard(self, folder: Path) -> None:
        """Rename a checkpoint that nobody needs any more, and delete it. On NFS, files that are open elsewhere stay."""
        if _is_own(folder):
            trash = self._unused(_TRASH + folder.name.removeprefix(_REPLACED))
            os.rename(folder, trash)
            _delete(trash)

    def _replaced(self, step: int) -> Path:
        return self.path / f"{_REPLACED}{step_name(step)}"

    def _temporary(self, step: int, attempt: int) -> Path:
        return self.path / f"{_TEMPORARY}{step_name(step)}-{attempt:02d}"

    def _unused(self, name: str) -> Path:
        path, number = self.path / name, 1
        while os.path.lexists(path):
            path, number = self.path / f"{name}.{number}", number + 1
        return path


def step_name(step: int) -> str:
    """Folder name of a checkpoint."""
    return f"step-{step:08d}"


def _is_own(path: Path) -> bool:
    return own_files.is_folder(path) and not any(own_files.foreign_files(path, _names_in(path)))


def _names_in(path: Path) -> re.Pattern[str]:
    """The names of a checkpoint's files: of a program's, those that its manifest has."""
    try:
        data = read_whole(path / MANIFEST, 256 << 20)
        if format_of(data) != FORMAT:
            return _FILES
        names = [re.escape(file.name) for file in decode_program(data).files]
    except (OSError, ValueError):
        return _FILES
    return re.compile("|".join((_FILES.pattern, *names)))


def _not_own(path: Path) -> UserError:
    return UserError(
        "is not deleted, because it contains other files than a checkpoint's",
        where=str(path),
        fix="remove it yourself",
    )


def _delete(path: Path) -> bool:
    """Delete a checkpoint's files and its folder; returns whether the folder was deleted."""
    with contextlib.suppress(OSError):
        if own_files.is_folder(path) and (path / _PROGRAM).is_file():
            # The mark, which allows it, is the last.
            for entry in path.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name != _PROGRAM:
                    entry.unlink()
            (path / _PROGRAM).unlink()
            path.rmdir()
            return True
        names = _names_in(path)
        if names is not _FILES:
            # The manifest, which names the others, is the last.
            own_files.clear(path, re.compile(f"(?!{re.escape(MANIFEST)}$)(?:{names.pattern})"))
        return own_files.remove(path, names)
    return False
