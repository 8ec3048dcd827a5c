"""Where a run directory is while it is in use: somebody may rename or remove it, and make another one in its place.

Every process of a run keeps the directory open. A renamed directory is still the run's, and its files can be written
through the open descriptor; at the old path nothing may be created, because that is nobody's or another run's. Linux
only: elsewhere, nothing is noticed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


class Location:
    """A run directory, opened. Raises OSError if it cannot be."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def intact(self) -> bool:
        """Whether the path still names the directory; True if that cannot be determined."""
        try:
            status = os.stat(self.root)
        except (FileNotFoundError, NotADirectoryError):
            return sys.platform != "linux"
        except OSError:
            return True
        if os.path.samestat(status, os.fstat(self._descriptor)):
            return True
        # FUSE file systems may number a directory anew at each look-up. The kernel then still knows it by its path.
        try:
            return os.readlink(self._link) == str(self.root.resolve())
        except OSError:
            return True

    def current(self) -> Path | None:
        """The path of the directory now; None if it was removed, or renamed by another machine."""
        try:
            path = Path(os.readlink(self._link))
            # The link of a removed directory ends with ` (deleted)`, as the name of another one may.
            return path if os.path.samestat(os.stat(path), os.fstat(self._descriptor)) else None
        except OSError:
            return None

    @property
    def path(self) -> Path:
        """A path by which this process reaches the directory, also if it was renamed."""
        return self.root if self.intact() else self._link

    @property
    def _link(self) -> Path:
        return Path(f"/proc/self/fd/{self._descriptor}")

    def inside(self, path: Path) -> Path | None:
        """A path relative to the directory, also if links lead there; None if it is outside."""
        return next(
            (place.relative_to(self.root) for place in (path, path.resolve()) if place.is_relative_to(self.root)), None
        )

    def close(self) -> None:
        """Close the directory."""
        os.close(self._descriptor)
