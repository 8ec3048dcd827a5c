"""Compares two ONNX runs: the losses in their events, and every tensor of their last checkpoints, bit by bit.

Reads files only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ortflow.workflow.checkpoint.manifest import Damaged
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.checkpoint.tensors import Span, file_layout, file_name
from ortflow.workflow.checkpoint.verify import read_manifest
from ortflow.workflow.run.record import EVENTS, read_records
from ortflow.workflow.run.rundir import RunDir

VALUES = {"step": ("loss", "lr", "grad_norm"), "evaluation": None}
"""Kinds of events that are compared, and their values; None: all but the times."""
NOT_COMPARED = ("event", "time", "attempt", "rank", "seconds", "step")
CHUNK = 1 << 22


def differences(calm: RunDir, other: RunDir) -> list[str]:
    """What differs, a sentence each: the first step of the curve, then tensors of the last checkpoint."""
    lines = []
    if line := _curves(curve(calm), curve(other)):
        lines.append(line)
    return lines + list(_checkpoints(calm, other))


def curve(run: RunDir) -> dict[tuple[int, str], Any]:
    """The values of every step, by step and name."""
    values: dict[tuple[int, str], Any] = {}
    for record in read_records(run.events(0), EVENTS)[0]:
        if record["event"] in VALUES:
            names = VALUES[record["event"]] or [name for name in record if name not in NOT_COMPARED]
            prefix = "" if record["event"] == "step" else f"{record['event']} "
            values.update({(record["step"], f"{prefix}{name}"): record.get(name) for name in names})
    return values


def _curves(calm: dict[tuple[int, str], Any], other: dict[tuple[int, str], Any]) -> str | None:
    for step, name in sorted(calm.keys() | other.keys()):
        before, after = calm.get((step, name)), other.get((step, name))
        if before != after:
            return f"{name} of step {step} is {after}, and {before} without the accident"
    return None


def _checkpoints(calm: RunDir, other: RunDir) -> Iterator[str]:
    stores = [DirectoryStore(run.root / "checkpoints") for run in (calm, other)]
    newest = [max(store.steps(), default=None) for store in stores]
    if newest[0] is None or newest[0] != newest[1]:
        yield f"the last checkpoint is that of step {newest[1]}, and {newest[0]} without the accident"
        return
    try:
        before, after = (read_manifest(store, newest[0]) for store in stores)
    except Damaged as fault:
        yield f"the last checkpoint cannot be compared: {fault}"
        return
    if (before.buffers, before.world_size) != (after.buffers, after.world_size):
        yield f"the checkpoint of step {newest[0]} has other tensors or ranks"
        return
    for rank in range(before.world_size):
        first, second = (store.place(newest[0]) / file_name(rank) for store in stores)
        for name in differing_tensors(first, second, file_layout(before.buffers, rank, before.world_size).spans):
            yield f"{name} in {file_name(rank)} differs"


def differing_tensors(first: Path, second: Path, spans: Iterable[Span]) -> list[str]:
    """Names of tensors that are not equal, bit by bit, in two files of this layout."""
    if not (first.is_file() and second.is_file()):
        return ["the file"]
    with first.open("rb") as first_file, second.open("rb") as second_file:
        return [span.buffer for span in spans if not _same(first_file, second_file, span)]


def _same(first: BinaryIO, second: BinaryIO, span: Span) -> bool:
    first.seek(span.offset)
    second.seek(span.offset)
    for place in range(span.offset, span.end, CHUNK):
        length = min(CHUNK, span.end - place)
        if first.read(length) != second.read(length):
            return False
    return True
