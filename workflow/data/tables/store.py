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

from ortflow.workflow.cache_folders import cache_folders
from ortflow.workflow.files import open_regular
from ortflow.workflow.graph_hashes import hash_of

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


def entry(key: str, build: Callable[[Path], dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
    """The folder and the record of an entry; `build` writes the files of a new one and returns its record.

    Raises OSError if no folder can be written to, or the disk is full.
    """
    choice = list(cache_folders("tables"))
    for folder in choice:
        if (record := _load(folder / key)) is not None:
            return folder / key, record
    if not choice:
        raise OSError("there is no folder for the index: set ORTFLOW_CACHE to a folder that only you may write to")
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
