"""Folders of the user's cache, by purpose: compiled kernels, passed checks, indexes of data sets."""

from __future__ import annotations

import functools
import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path


def cache_folders(purpose: str) -> Iterator[Path]:
    """Existing folders for a purpose, best first: $ORTFLOW_CACHE, the user's cache, then the temporary folder.

    Only folders that no other user can write to or replace, including their parents: their contents are trusted.
    Missing ones are created for the user alone, whatever the umask.
    """
    return (place for place in _places(purpose) if _unusable(place) is None)


def no_cache(purpose: str) -> str | None:
    """Why there is no folder for a purpose; None if there is one."""
    reasons = [_unusable(place) for place in _places(purpose)]
    return None if None in reasons else "; ".join(filter(None, reasons))


def _places(purpose: str) -> list[Path]:
    override = os.environ.get("ORTFLOW_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    temporary = Path(tempfile.gettempdir(), f"ortflow-{os.getuid()}")
    return [folder / purpose for folder in (*([Path(override)] if override else []), Path(home, "ortflow"), temporary)]


def _unusable(place: Path) -> str | None:
    """Create a cache folder if it is missing; returns why its contents cannot be trusted, or None."""
    try:
        _create(place)
        real = Path(os.path.realpath(place))
        _take_back(real)
        exposed = next((folder for folder in (real, *real.parents) if _others_may_replace(folder)), None)
    except OSError as error:
        return f"{place}: {error.strerror}"
    return None if exposed is None else f"other users may write to {exposed}"


def _create(folder: Path) -> None:
    """Create a folder and its parents for the user alone: `mkdir` gives parents the umask's mode."""
    if not folder.is_dir():
        _create(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def _take_back(place: Path) -> None:
    """Make an empty cache folder of ours, and the folder `ortflow` that it is in, unwritable for other users.

    Earlier versions created both with the umask's mode, and wrote nothing where others may write.
    """
    above = place.parent
    if above.name not in ("ortflow", f"ortflow-{os.getuid()}"):
        return
    if _is_exposed(above):
        above.chmod(above.stat().st_mode & ~0o022)
    # Files may have the umask's mode, too, so nobody else may reach them.
    if _is_exposed(place) and not any(place.iterdir()):
        place.chmod(0o700)


def _is_exposed(folder: Path) -> bool:
    status = folder.stat()
    return status.st_uid == os.getuid() and bool(status.st_mode & 0o022) and not status.st_mode & stat.S_ISVTX


def _others_may_replace(folder: Path) -> bool:
    """Whether another user can replace the contents of this folder."""
    status = folder.stat()
    if status.st_uid not in (os.getuid(), 0):
        return True
    writable = status.st_mode & (stat.S_IWOTH if _is_private_group(status.st_gid) else 0o022)
    # In a folder with the sticky bit, such as /tmp, only the owner of a file may rename or remove it.
    return bool(writable and not status.st_mode & stat.S_ISVTX)


@functools.cache
def _is_private_group(group: int) -> bool:
    """Whether a group is the user's own and has no other member, as Debian's and Red Hat's user private groups.

    They go with a umask of 002, which makes the user's folders writable to this group.
    """
    try:
        user, entry = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_gid == user.pw_gid and entry.gr_name == user.pw_name and set(entry.gr_mem) <= {user.pw_name}
