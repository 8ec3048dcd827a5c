"""What the files of all ranks say, read in parts where they are large.

The events of 64 ranks and 100,000 steps are a gigabyte. Lines are in the order of attempts and steps, so that any of
them is found by bisection: of a large file only the starts and ends of attempts and some windows of steps are read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from ortflow.launchers.report.timeline import MICRO, micro
from ortflow.workflow.run.record import EVENTS, parse
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.files import open_regular

WHOLE = 16 << 20
"""Bytes of all ranks' files together up to which they are read whole."""
WINDOWS = 12
"""Windows of steps that are read of a large file."""
WINDOW = 8 << 10
"""Bytes of a window, and of the start and end of an attempt."""
_MEMORY = ("resident", "peak", "gpu_buffers", "gpu_used", "gpu_peak")
"""Fields of the event `usage`."""
_ATTEMPT = re.compile(rb'"attempt":(\d+)')
_STEP = re.compile(rb'"event":"step".*?"step":(\d+)')


@dataclass
class RankRecord:
    """What one rank wrote."""

    rank: int
    hosts: dict[int, str] = field(default_factory=dict)
    """By attempt."""
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By attempt, the times of its first and last event, in microseconds."""
    waits: dict[int, float] = field(default_factory=dict)
    """By step, seconds of waiting for samples."""
    seconds: dict[int, float] = field(default_factory=dict)
    """By step, its seconds."""
    comm: dict[int, float] = field(default_factory=dict)
    """By step, seconds in calls to other ranks."""
    usage: dict[int, dict[str, int]] = field(default_factory=dict)
    """By step, bytes of memory by name."""
    missing: bool = False
    """It has no file, or one that cannot be read."""


@dataclass
class Ranks:
    """The records of all ranks."""

    records: list[RankRecord]
    sampled: bool
    """Only parts of the files were read."""

    @property
    def missing(self) -> list[int]:
        """Ranks without a readable file."""
        return [record.rank for record in self.records if record.missing]

    def memory(self) -> list[dict[str, Any]]:
        """The most memory of each rank that recorded any, in bytes."""
        return [
            {
                "rank": record.rank,
                **{name: max(usage.get(name, 0) for usage in record.usage.values()) for name in _MEMORY},
            }
            for record in self.records
            if record.usage
        ]

    def host(self, rank: int | None, attempt: int) -> str | None:
        """Where a rank ran."""
        return next((rank_record.hosts.get(attempt) for rank_record in self.records if rank_record.rank == rank), None)


def read_ranks(run: RunDir, world_size: int, attempts: Sequence[int], last_step: int) -> Ranks:
    """The records of ranks 0 to `world_size` - 1."""
    sizes = [_size(run, rank) for rank in range(world_size)]
    sampled = sum(sizes) > WHOLE
    steps = [1 + last_step * place // WINDOWS for place in range(WINDOWS)]
    return Ranks([_read(run, rank, attempts, steps, sampled) for rank in range(world_size)], sampled)


def _size(run: RunDir, rank: int) -> int:
    try:
        return run.events(rank).stat().st_size
    except OSError:
        return 0


def _read(run: RunDir, rank: int, attempts: Sequence[int], steps: Sequence[int], sampled: bool) -> RankRecord:
    rank_record = RankRecord(rank)
    try:
        with os.fdopen(open_regular(run.events(rank)), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            offsets = _parts(file, size, attempts, steps) if sampled else [(0, size)]
            for start, end in offsets:
                file.seek(start)
                _add(rank_record, _lines(file.read(end - start)))
    except OSError:
        rank_record.missing = True
    return rank_record


def _parts(file: BinaryIO, size: int, attempts: Sequence[int], steps: Sequence[int]) -> list[tuple[int, int]]:
    """The parts of a file that are read, as offsets of lines' starts."""
    begins = [_bisect(file, size, _ATTEMPT, attempt) for attempt in attempts]
    parts = [(at, min(size, at + WINDOW)) for at in begins]
    parts += [(max(0, at - WINDOW), at) for at in (*begins[1:], size)]
    parts += [(at, min(size, at + WINDOW)) for at in (_bisect(file, size, _STEP, step) for step in steps)]
    return parts


def _bisect(file: BinaryIO, size: int, key: re.Pattern[bytes], value: int) -> int:
    """The offset of the first line whose number is at least `value`, or the file's size."""
    low, high = 0, size
    while low < high:
        middle = (low + high) // 2
        line, number = _first(file, middle, high, key)
        if number is None or number >= value:
            high = middle
        else:
            low = line
    return _line_start(file, low, size)


def _first(file: BinaryIO, offset: int, limit: int, key: re.Pattern[bytes]) -> tuple[int, int | None]:
    """The end of the first whole line behind `offset` that has a number, and the number."""
    file.seek(offset)
    if offset:
        file.readline()
    while file.tell() < limit:
        line = file.readline()
        if match := key.search(line):
            return file.tell() - 1, int(match[1])
    return limit, None


def _line_start(file: BinaryIO, offset: int, size: int) -> int:
    if offset == 0:
        return 0
    file.seek(min(offset, size))
    file.readline()
    return file.tell()


def _lines(data: bytes) -> Iterable[dict[str, Any]]:
    for line in data.split(b"\n"):
        record = parse(line, EVENTS)
        if record is not None:
            yield record


def _add(rank_record: RankRecord, records: Iterable[Mapping[str, Any]]) -> None:
    for record in records:
        attempt, time = int(record.get("attempt", 0)), micro(record.get("time"))
        if time:
            first, last = rank_record.spans.get(attempt, (time, time))
            rank_record.spans[attempt] = (min(first, time), max(last, time))
        if record["event"] == "attempt_start" and "host" in record:
            rank_record.hosts[attempt] = record["host"]
        elif record["event"] == "usage" and "step" in record:
            sizes = {name: record[name] for name in _MEMORY if type(record.get(name)) is int}
            before = rank_record.usage.get(int(record["step"]), {})  # several of a program that logs no steps
            rank_record.usage[int(record["step"])] = {
                **before,
                **{k: max(v, before.get(k, 0)) for k, v in sizes.items()},
            }
        elif record["event"] == "step":
            step = int(record["step"])
            rank_record.seconds[step] = record.get("seconds") or 0.0
            if isinstance(record.get("data_seconds"), float):
                rank_record.waits[step] = record["data_seconds"]
            if isinstance(record.get("comm_seconds"), float):
                rank_record.comm[step] = record["comm_seconds"]


@dataclass(frozen=True)
class Waits:
    """How long ranks waited for their samples."""

    excess: int = 0
    """Microseconds by which the rank that waits longest exceeds rank 0, over the whole run."""
    slowest: int | None = None
    """The rank that waits longest."""
    share: float = 0.0
    """The part of its steps' time in which it waits."""
    steps: int = 0
    """The number of steps that were compared."""


def waits_of(ranks: Ranks, steps: int) -> Waits:
    """The waits for data over `steps` steps, extrapolated from those that were read. Pure."""
    records = [record for record in ranks.records if record.waits]
    if not records:
        return Waits()
    shared = set(records[0].waits)
    for record in records[1:]:
        shared &= record.waits.keys()
    leader = next((record for record in records if record.rank == 0), None)
    if not shared or leader is None:
        return Waits()
    excess = sum(max(record.waits[step] for record in records) - leader.waits[step] for step in shared)
    slowest = max(records, key=lambda record: sum(record.waits[step] for step in shared))
    seconds = sum(slowest.seconds[step] for step in shared)
    share = sum(slowest.waits[step] for step in shared) / seconds if seconds else 0.0
    return Waits(round(excess * MICRO * max(1.0, steps / len(shared))), slowest.rank, min(share, 1.0), len(shared))
