"""Compares two ONNX runs: the losses in their events, and every tensor of their last checkpoints, bit by bit.

Reads files only. Ranks' files are safetensors, read here without a package.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.record import EVENTS, read_records
from ortflow.workflow.rundir import RunDir

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
    folders = [store.place(newest[0]) for store in stores]
    for path in sorted(folders[0].glob("*.safetensors")):
        yield from (f"{tensor} in {path.name} differs" for tensor in differing_tensors(path, folders[1] / path.name))


def differing_tensors(first: Path, second: Path) -> list[str]:
    """Names of tensors that are not equal, bit by bit, in two safetensors files. Raises OSError."""
    if not second.is_file():
        return ["the file"]
    with first.open("rb") as one, second.open("rb") as two:
        mine, theirs = _tensors(one), _tensors(two)
        names = sorted(mine.keys() | theirs.keys())
        return [name for name in names if not _same(one, mine.get(name), two, theirs.get(name))]


class _Tensor(NamedTuple):
    """Where a tensor is in a file."""

    dtype: str
    shape: list[int]
    start: int
    size: int


def _tensors(file: BinaryIO) -> dict[str, _Tensor]:
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        tensors[name] = _Tensor(entry["dtype"], entry["shape"], 8 + size + start, end - start)
    return tensors


def _same(one: BinaryIO, mine: _Tensor | None, two: BinaryIO, theirs: _Tensor | None) -> bool:
    if mine is None or theirs is None or mine[:2] != theirs[:2]:
        return False
    one.seek(mine.start)
    two.seek(theirs.start)
    for place in range(0, mine.size, CHUNK):
        length = min(CHUNK, mine.size - place)
        if one.read(length) != two.read(length):
            return False
    return True
