"""Leaves samples out whose files are damaged, up to the stated share, before a run begins.

Every file is decoded once, and the bad ones are recorded in the user's cache by the set's hash: which samples there are
does not change while a run reads them, so that orders, resumed runs and other numbers of ranks agree.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from ortflow.workflow.data.cache_lock import held
from ortflow.workflow.data.samples import Indices, Reading
from ortflow.workflow.data.sources.images import Blobs
from ortflow.workflow.errors import Faults, UserError
from ortflow.workflow.run.rundir import write_atomically
from ortflow.workflow.system.cache_folders import cache_folders

_LISTED = 20
"""Files that an error lists."""
_NAMED = 100
"""Files that a reading names."""
_AT_A_TIME = 256
_QUIET = 2.0
Bad = list[tuple[int, str, str]]
"""Number, file, and what is wrong with it."""


class Encoded(Protocol):
    """Samples in files that are decoded when they are read."""

    path: Path
    blobs: Blobs
    reading: Reading

    def __len__(self) -> int: ...

    @property
    def digest(self) -> str:
        """Hash that identifies the samples."""
        ...

    def check(self, number: int, data: bytes) -> None:
        """Decode a file. Raises UserError if it is damaged."""
        ...

    def selected(self, indices: Indices) -> Encoded:
        """Some of the samples."""
        ...


Set = TypeVar("Set", bound=Encoded)


def readable(samples: Set, allowed: float) -> Set:
    """The samples whose files can be decoded.

    Raises Faults, with the first files, if the share of the others is larger than `allowed`; UserError for a file that
    cannot be read at all, which another attempt may read.
    """
    bad = _bad_ones(samples)
    if not bad:
        return samples
    if len(bad) > allowed * len(samples):
        listed = [UserError(reason, where=file) for _, file, reason in bad[:_LISTED]]
        reason = f"{len(bad)} of {len(samples)} files are bad, more than the {allowed:.2%} that bad_rows allows"
        raise Faults([*listed, UserError(reason, fix="replace or remove them, or raise bad_rows")])
    good = np.delete(np.arange(len(samples)), [number for number, _, _ in bad])
    rest = samples.selected(good)
    rest.reading = Reading(len(bad), [f"{file}: {reason}" for _, file, reason in bad[:_NAMED]])
    return rest  # type: ignore[return-value]


def _bad_ones(samples: Encoded) -> Bad:
    folder = next(cache_folders("bad-files"), None)
    if folder is None:
        return _checked(samples, range(len(samples)))
    record = folder / f"{samples.digest}.json"
    with held(folder / f"{samples.digest}.lock"):
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            bad_before = [
                (int(number), str(file), str(fault)) for number, file, fault in json.loads(record.read_bytes())
            ]
            # Names and sizes identify the set: a file may have been repaired.
            return _checked(samples, [number for number, _, _ in bad_before])
        bad = _checked(samples, range(len(samples)))
        with contextlib.suppress(OSError):  # without a record, each process decodes them
            write_atomically(record, json.dumps(bad).encode())
    return bad


def _checked(samples: Encoded, numbers: Sequence[int]) -> Bad:
    bad: Bad = []
    began = noted = time.monotonic()
    # Decoders leave the interpreter's lock.
    # macOS has no affinity of a process.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None) as pool:
        for first in range(0, len(numbers), _AT_A_TIME):
            part = numbers[first : first + _AT_A_TIME]
            faults = pool.map(lambda number: _fault(samples, number), part)
            bad += [fault for fault in faults if fault is not None]
            if time.monotonic() - noted > _QUIET:
                noted = time.monotonic()
                done = first + len(part)
                rate = done / (noted - began)
                line = f"checking {samples.path}: {done / len(numbers):.0%}, {rate:,.0f} files/s, {len(bad)} bad"
                print(line, file=sys.stderr, flush=True)
    return bad


def _fault(samples: Encoded, number: int) -> tuple[int, str, str] | None:
    data = samples.blobs.read(number)
    try:
        samples.check(number, data)
    except UserError as error:
        return number, error.where or samples.blobs.name(number), error.what
    return None
