"""Folders of the user's own in which ortflow keeps what it need not make twice: compiled kernels, passed checks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def folders(purpose: str) -> Iterator[Path]:
    """Existing folders for a purpose, best first: $ORTFLOW_CACHE, the user's cache, then the temporary folder.

    Only those that nobody else may write into, since what lies there is trusted.
    """
    named = os.environ.get("ORTFLOW_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    temporary = Path(tempfile.gettempdir(), f"ortflow-{os.getuid()}")
    for folder in (*([Path(named)] if named else []), Path(home, "ortflow"), temporary):
        place = folder / purpose
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = place.stat()
        except OSError:
            continue
        if status.st_uid in (os.getuid(), 0) and not status.st_mode & 0o022:
            yield place
