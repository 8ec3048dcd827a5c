"""Keeps what the pass over a table found, in the user's cache, by the table's files.

An entry is a folder that appears under its name only when it is complete. Of two processes that build at once, one
waits for the other or, where the file system has no locks, the second one's is dropped. A build that was killed is
continued by the next one on that machine: locks of a network file system may not reach beyond it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import xxhash

from ortflow.workflow.data.cache_lock import held, partial_folder
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.graph_hashes import hash_of
from ortflow.workflow.run.rundir import write_atomically
from ortflow.workflow.system.cache_folders import cache_folders
from ortflow.workflow.system.files import open_regular

VERSION = 3
"""Version of an entry and of how kinds are decided; others are built again."""
_HEAD = 1 << 16
_SAVED = "saved.json"


def identity_of(path: Path) -> list[Any]:
    """What identifies a file's content without reading it: path, size, time of change, hash of its two ends."""
    with os.fdopen(open_regular(path), "rb") as file:
        status = os.fstat(file.fileno())
        ends = xxhash.xxh3_128(file.read(_HEAD))
        file.seek(max(0, status.st_size - _HEAD))
        ends.update(file.read(_HEAD))
    return [os.path.abspath(path), status.st_size, status.st_mtime_ns, ends.hexdigest()]


def key_of(files: Sequence[Path], options: Any) -> str:
    """The name of the entry for some files, read with some options."""
    parts = [VERSION, [identity_of(file) for file in files], options]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def entry(files: Sequence[Path], options: Any, build: Callable[[Path], dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
    """The folder and the record of the entry for some files, read with some options.

    `build` writes the files of a new one and returns its record. The folder that it is called with may hold the files
    of a build that was killed.

    Raises OSError if no folder can be written to, or the disk is full; UserError if a file changes meanwhile.
    """
    key = key_of(files, options)
    choice = list(cache_folders("tables"))
    for folder in choice:
        if (record := _load(folder / key)) is not None:
            return folder / key, record
    if not choice:
        raise OSError("there is no folder for the index: set ORTFLOW_CACHE to a folder that only you may write to")
    folder = choice[0]
    with held(folder / f"{key}.lock") as locked:
        if (record := _load(folder / key)) is not None:
            return folder / key, record
        partial = partial_folder(folder, key, locked)
        try:
            record = build(partial)
            check_unchanged(files, options, key)
            hashes = {file.name: hash_of(file) for file in sorted(partial.iterdir())}
            (partial / "record.json").write_text(_sealed({"files": hashes, "record": record}))
            _publish(partial, folder / key)
        except Exception:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        shutil.rmtree(partial, ignore_errors=True)
    return folder / key, record


def _publish(partial: Path, place: Path) -> None:
    """Rename an entry to its place, unless another process, where there are no locks, has put a whole one there."""
    try:
        os.rename(partial, place)
    except OSError as error:
        # rename(2) allows both.
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        if _load(place) is None:
            # Renamed before it is removed, so that nobody sees half of it.
            aside = tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent)
            with contextlib.suppress(FileNotFoundError):
                os.rename(place, aside)
            shutil.rmtree(aside, ignore_errors=True)
            _publish(partial, place)


def check_unchanged(files: Sequence[Path], options: Any, key: str) -> None:
    """Raise UserError if files are no longer those of a key: what was read of them may be of both versions."""
    if key_of(files, options) != key:
        names = str(files[0]) if len(files) == 1 else f"{files[0]} or another of the {len(files)} files"
        raise UserError("has changed while it was read", where=names, fix="try again when its writer is done")


def saved(folder: Path) -> dict[str, Any] | None:
    """What a build that was killed saved in its folder; None if there is nothing, or it is damaged."""
    try:
        with os.fdopen(open_regular(folder / _SAVED), "rb") as file:
            return _unsealed(file.read())
    except (OSError, ValueError, TypeError):
        return None


def save(folder: Path, state: dict[str, Any]) -> None:
    """Save how far a build is; its files must be on the disk."""
    write_atomically(folder / _SAVED, _sealed(state).encode())


def forget(folder: Path) -> None:
    """Remove what was saved: the build is complete."""
    (folder / _SAVED).unlink(missing_ok=True)


def _sealed(body: dict[str, Any]) -> str:
    """Plain data as text with its hash."""
    text = json.dumps(body)
    return json.dumps([text, xxhash.xxh3_128_hexdigest(text.encode())])


def _unsealed(content: str | bytes) -> dict[str, Any]:
    """The inverse of `_sealed`. Raises ValueError or TypeError if the text is damaged."""
    text, seal = json.loads(content)
    if xxhash.xxh3_128_hexdigest(text.encode()) != seal:
        raise ValueError("does not match its hash")
    body: dict[str, Any] = json.loads(text)
    return body


def _load(place: Path) -> dict[str, Any] | None:
    """The record of an entry; None if there is none, or it is damaged."""
    try:
        with os.fdopen(open_regular(place / "record.json"), "rb") as file:
            body = _unsealed(file.read())
        if any(hash_of(place / name) != value for name, value in body["files"].items()):
            return None
        record: dict[str, Any] = body["record"]
        return record
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
