"""Keeps what the pass over a table found, in the user's cache, by the table's files.

An entry is a folder that appears under its name only when it is complete. Two processes build at once: one waits for
the other, or, where the file system has no locks, the second one's is dropped.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from ortflow.workflow.files import open_regular

VERSION = 1
"""Version of an entry and of how kinds are decided; others are built again."""
_HEAD = 1 << 16


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


def folders() -> Iterator[Path]:
    """Folders for entries that can be written, best first: $ORTFLOW_CACHE, the user's cache, the temporary folder."""
    named = os.environ.get("ORTFLOW_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "ortflow")
    temporary = Path(tempfile.gettempdir(), f"ortflow-{os.getuid()}")
    for base in (*([Path(named)] if named else []), home, temporary):
        folder = base / "tables"
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK | os.X_OK):
                yield folder


def entry(key: str, build: Callable[[Path], dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
    """The folder and the record of an entry; `build` writes the files of a new one and returns its record.

    Raises OSError if no folder can be written to, or the disk is full.
    """
    choice = list(folders())
    for folder in choice:
        if (record := _load(folder / key)) is not None:
            return folder / key, record
    if not choice:
        raise OSError("there is no folder for the index: set ORTFLOW_CACHE to a folder that you may write to")
    folder = choice[0]
    with _lock(folder / f"{key}.lock"):
        if (record := _load(folder / key)) is not None:
            return folder / key, record
        partial = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=folder))
        try:
            record = build(partial)
            hashes = {file.name: hash_of(file) for file in sorted(partial.iterdir())}
            (partial / "record.json").write_text(_sealed({"files": hashes, "record": record}))
            shutil.rmtree(folder / key, ignore_errors=True)  # a damaged one
            with contextlib.suppress(FileExistsError):
                os.rename(partial, folder / key)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder / key, record


def _sealed(body: dict[str, Any]) -> str:
    text = json.dumps(body)
    return json.dumps([text, xxhash.xxh3_128_hexdigest(text.encode())])


def _load(place: Path) -> dict[str, Any] | None:
    """The record of an entry; None if there is none, or it is damaged."""
    try:
        with os.fdopen(open_regular(place / "record.json"), "rb") as file:
            text, seal = json.loads(file.read())
        body = json.loads(text)
        if xxhash.xxh3_128_hexdigest(text.encode()) != seal:
            return None
        if any(hash_of(place / name) != value for name, value in body["files"].items()):
            return None
        record: dict[str, Any] = body["record"]
        return record
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def hash_of(file: Path) -> str:
    """Hash of a file's content."""
    hashing = xxhash.xxh3_128()
    with os.fdopen(open_regular(file), "rb") as stream:
        while part := stream.read(1 << 20):
            hashing.update(part)
    return hashing.hexdigest()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a network file system without locks
            yield
            return
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
