"""Which algorithm of a library computes a shape: the fastest that was measured, kept on disk so that it stays the same.

Two algorithms add in different orders, so a choice decides on bits. It is kept in a folder of the run, which all ranks
see: the first rank to choose decides for every rank and for every later attempt, on whatever node. It is kept in the
user's cache too, for the next run on this machine.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from ortflow.workflow.run.rundir import write_atomically
from ortflow.workflow.system.cache_folders import cache_folders

PURPOSE = "algorithms"
MARGIN = 0.02
"""By how much faster another algorithm must be than one that the library proposes before it: less may be noise."""


class Choices:
    """Algorithms by key. `folders` are those of the user's cache; `keep_in` adds the run's before them."""

    def __init__(self, folders: Iterable[Path] | None = None) -> None:
        self._caches = list(cache_folders(PURPOSE) if folders is None else folders)[:1]
        self._run: Path | None = None

    def keep_in(self, folder: Path | None) -> None:
        """From now on the choices of the run that keeps them here count."""
        self._run = folder

    def find(self, key: str) -> bytes | None:
        """What was chosen for a key; None if nothing was, or what is there is damaged."""
        for folder in self._folders():
            algorithm = _read(folder / _name(key), key)
            if algorithm is not None:
                return self.settle(key, algorithm)
        return None

    def settle(self, key: str, algorithm: bytes) -> bytes:
        """Keep a choice; what counts, which is another rank's if that came first. A folder that is full keeps none.

        The run's counts, whatever the cache of this machine has.
        """
        decided = False
        for folder in self._folders():
            with contextlib.suppress(OSError):
                published = _publish(folder / _name(key), key, algorithm)
                if not decided:
                    algorithm, decided = published, True
        return algorithm

    def _folders(self) -> list[Path]:
        return [*([self._run] if self._run is not None else []), *self._caches]


def fastest(seconds: Sequence[float | None]) -> int:
    """Place of the fastest, None standing for one that failed; an earlier one unless it is slower by MARGIN.

    Raises ValueError if all failed.
    """
    best: int | None = None
    for place, duration in enumerate(seconds):
        if duration is None:
            continue
        before = None if best is None else seconds[best]
        if before is None or duration < (1 - MARGIN) * before:
            best = place
    if best is None:
        raise ValueError("no algorithm computed the product")
    return best


def _name(key: str) -> str:
    return f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.algorithm"


def _text(key: str, algorithm: bytes) -> bytes:
    checked = hashlib.sha256(key.encode() + algorithm).hexdigest()
    return json.dumps({"key": key, "algorithm": algorithm.hex(), "hash": checked}).encode()


def _read(path: Path, key: str) -> bytes | None:
    try:
        text = path.read_bytes()
        algorithm = bytes.fromhex(json.loads(text)["algorithm"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return algorithm if text == _text(key, algorithm) else None


def _publish(path: Path, key: str, algorithm: bytes) -> bytes:
    """Write a choice, unless there is a whole one; the one that is there then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    write_atomically(draft, _text(key, algorithm))
    try:
        os.link(draft, path)
    except FileExistsError:
        published = _read(path, key)
        if published is not None:
            return published
        # Damaged: no rank has taken it.
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return algorithm


@functools.cache
def choices() -> Choices:
    """Those of this process."""
    return Choices()
