"""A save never makes the run directory again that was renamed while it began."""

from __future__ import annotations

from pathlib import Path

from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.run.location import Location


class _RenamedMeanwhile(Location):
    """Renamed after its path was asked for the first time."""

    def __init__(self, root: Path, there: Path) -> None:
        super().__init__(root)
        self._there: Path | None = there

    @property
    def path(self) -> Path:
        path, there = super().path, self._there
        if there is not None:
            self.root.rename(there)
            self._there = None
        return path


def test_a_save_begins_where_the_directory_went(tmp_path: Path) -> None:
    root, there = tmp_path / "run", tmp_path / "other"
    root.mkdir()
    location = _RenamedMeanwhile(root, there)
    folder = DirectoryStore(root / "kept" / "checkpoints", location).begin(7, 0)
    assert folder.is_dir()
    assert folder.samefile(there / "kept" / "checkpoints" / folder.name)
    assert not root.exists()
    location.close()
