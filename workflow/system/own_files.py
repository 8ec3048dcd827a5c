"""Replaces or removes only files that ortflow can prove to have written, and never through a link.

Called wherever a file or folder of ours is written. The caller supplies the proof: a marker, a schema, or the names
that ortflow gives to its own files. Anything else is left alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

TEMPORARY = r"\.(?:[^/]+\.(?:a\d+-)?[a-z0-9_]{8}|nfs[0-9a-f]+)"
"""Pattern of files left by `write_atomically` when its process was killed, or by NFS while a file is open."""


def name_start(name: str) -> str:
    """As much of a name as a temporary file beside it may begin with: a file system allows 255 bytes for a name."""
    return os.fsencode(name)[:200].decode(errors="ignore")


OF_AN_ATTEMPT = re.compile(r"\.[^/]+\.a\d+-[a-z0-9_]{8}")
OF_A_LAUNCHER = re.compile(
    r"\.(run\.yaml|plan\.json|attempts\.jsonl|kubernetes\.json|\.owner|\.run_supervisor)\.[a-z0-9_]{8}"
)


def sweep_temporaries(folder: Path) -> list[Path]:
    """Remove temporary files that killed attempts and launchers left; returns their paths.

    Must only be called by the holder of the run directory, with no rank alive. Requests to stop are written by anybody,
    and kept. Checkpoints clean their own folder. Raises nothing.
    """
    gone = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not (root == str(folder) and name == "checkpoints")]
        for name in files:
            if OF_AN_ATTEMPT.fullmatch(name) or (root == str(folder) and OF_A_LAUNCHER.fullmatch(name)):
                path = Path(root, name)
                with suppress(OSError):
                    if path.is_file() and not path.is_symlink():
                        path.unlink()
                        gone.append(path)
    return gone


def foreign_files(folder: Path, own_names: re.Pattern[str]) -> Iterator[str]:
    """Names below `folder`, relative to it, of links, and of files and empty folders that `own_names` does not match.

    Names of empty folders are matched with `/` appended.
    """
    for root, folders, files in os.walk(folder):
        for name in sorted((*folders, *files)):
            path = Path(root, name)
            relative = path.relative_to(folder).as_posix()
            if path.is_dir():
                is_own = any(path.iterdir()) or own_names.fullmatch(f"{relative}/") is not None
            else:
                is_own = path.is_file() and own_names.fullmatch(relative) is not None
            if path.is_symlink() or not is_own:
                yield relative


def is_folder(path: Path) -> bool:
    """Whether the path is a real folder, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def remove(folder: Path, own_names: re.Pattern[str]) -> bool:
    """`clear` a folder, and remove it if it is empty then; returns whether it was removed. Raises OSError."""
    if is_folder(folder):
        clear(folder, own_names)
        with suppress(OSError):  # not empty
            folder.rmdir()
    return not os.path.lexists(folder)


def clear(folder: Path, own_names: re.Pattern[str]) -> None:
    """Remove the files below `folder` that `own_names` matches, and folders that become empty.

    Names are relative to `folder`; a folder that was already empty is removed if its name with `/` appended matches.
    Links are neither followed nor removed. Raises OSError.
    """
    for root, folders, files in os.walk(folder, topdown=False):
        inside = Path(root)
        for name in files:
            path = inside / name
            if own_names.fullmatch(path.relative_to(folder).as_posix()) and not path.is_symlink():
                path.unlink(missing_ok=True)
        if inside != folder and (folders or files or own_names.fullmatch(f"{inside.relative_to(folder).as_posix()}/")):
            with suppress(OSError):  # not empty
                inside.rmdir()


def exchange(new: Path, path: Path, aside: Path) -> None:
    """Rename `new` to `path`; an existing folder is moved to `aside`, and restored on failure. Raises OSError."""
    # A rename replaces a file, and no folder that has files (rename(2)).
    before = is_folder(path) or (os.path.lexists(path) and is_folder(new))
    if before:
        os.rename(path, aside)
    try:
        os.replace(new, path)
    except BaseException:
        if before:
            os.rename(aside, path)
        raise


def exchange_all(new: Mapping[Path, Path], aside: Path) -> None:
    """Rename each new file to its path; existing files are moved to the folder `aside`, and restored on any failure.

    `new` is keyed by path. The paths have different names. Raises OSError.
    """
    done: list[tuple[Path, Path]] = []
    steps = [(path, aside / path.name) for path in new if os.path.lexists(path)]
    steps += [(source, path) for path, source in new.items()]
    try:
        for source, target in steps:
            os.rename(source, target)
            done.append((source, target))
    except BaseException:
        for source, target in reversed(done):
            os.rename(target, source)
        raise
