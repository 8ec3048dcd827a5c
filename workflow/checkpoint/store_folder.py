"""The folder of checkpoints as names: where each lies, and what else is there. Changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

from ortflow.workflow.checkpoint import checkpoint_names as names
from ortflow.workflow.checkpoint.own_checkpoints import is_own_checkpoint
from ortflow.workflow.run.location import Location


class StoreFolder:
    """A folder of checkpoints.

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
            entries = os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        folders = [(int(match[1]), match[0]) for match in map(names.STEP.fullmatch, entries) if match]
        return sorted(step for step, name in folders if name == names.step_name(step))

    def place(self, step: int) -> Path:
        """Folder of a step's checkpoint."""
        return self.path / names.step_name(step)

    def folders(self) -> list[tuple[int, Path]]:
        """Steps and their folders, the newest step first; also of checkpoints that a killed save was to replace."""
        folders = [(step, self.place(step)) for step in self.steps()]
        folders += [(step, self.replaced(step)) for step in self.replaced_steps()]
        return sorted(folders, reverse=True)

    def is_own(self, step: int) -> bool:
        """Whether a step's folder is a real folder that contains only a checkpoint's files."""
        return is_own_checkpoint(self.place(step))

    def foreign(self) -> Path | None:
        """The first name in the folder that the store does not give; the folder itself if it is a file."""
        try:
            entries = sorted(os.listdir(self.path))
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            return self.path if os.path.lexists(self.path) else None
        return next((self.path / name for name in entries if not names.is_given(name)), None)

    def set_asides(self) -> list[Path]:
        """Damaged checkpoints that were set aside."""
        try:
            return sorted(path for path in self.path.iterdir() if names.SET_ASIDE.fullmatch(path.name))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def replaced_steps(self) -> list[int]:
        """Steps whose checkpoint a killed save was to replace."""
        try:
            entries = os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [int(match[1]) for match in map(names.LEFT_REPLACED.fullmatch, entries) if match]

    def replaced(self, step: int) -> Path:
        """Folder of a checkpoint that is being replaced."""
        return self.path / f"{names.REPLACED}{names.step_name(step)}"

    def temporary(self, step: int, attempt: int) -> Path:
        """Folder of a save that is not committed."""
        return self.path / f"{names.TEMPORARY}{names.step_name(step)}-{attempt:02d}"

    def unused(self, name: str) -> Path:
        """The first free of `name`, `name.1`, `name.2`, …"""
        path, number = self.path / name, 1
        while os.path.lexists(path):
            path, number = self.path / f"{name}.{number}", number + 1
        return path
