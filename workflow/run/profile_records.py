"""What `monitor.profile` leaves in a run directory: one record a rank and attempt, and one trace of all ranks.

`RUN_DIR/profile/attempt-NN/rank-NNNN.jsonl` has one JSON object a line and is written step by step, so that a killed
rank leaves what it has done. `nodes-NNNN.jsonl.gz` has each run of a node, and `RUN_DIR/profile/attempt-NN.json.gz` is
the trace, in the format of Chrome and Perfetto. Ranks, the command line and reports use this module: it must not import
ONNX Runtime or MPI.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ortflow.workflow.run.rundir import replacing
from ortflow.workflow.system.files import open_regular, read_whole

LANES = ("steps", "data", "graphs", "collectives", "checkpoint and evaluation")
"""Lines of a rank in the trace, from the top."""
STEP, DATA, GRAPH, COLLECTIVE, OTHER = LANES
LARGEST = 256 << 20
"""Bytes of a rank's record."""
_ATTEMPT = re.compile(r"attempt-(\d{2,})")
_RANK = re.compile(r"rank-(\d{4,})\.jsonl")


def folder_of(root: Path, attempt: int) -> Path:
    """The folder of an attempt's records."""
    return root / "profile" / f"attempt-{attempt:02d}"


def record_of(folder: Path, rank: int) -> Path:
    """The record of a rank."""
    return folder / f"rank-{rank:04d}.jsonl"


def nodes_of(folder: Path, rank: int) -> Path:
    """The runs of the nodes of a rank's graphs."""
    return folder / f"nodes-{rank:04d}.jsonl.gz"


def trace_of(folder: Path) -> Path:
    """The trace of all ranks."""
    return folder.with_suffix(".json.gz")


def attempts(root: Path) -> list[Path]:
    """The folders of the attempts that recorded something, the oldest first."""
    try:
        names = [entry.name for entry in os.scandir(root / "profile") if _ATTEMPT.fullmatch(entry.name)]
    except FileNotFoundError:
        return []
    return [root / "profile" / name for name in sorted(names, key=lambda name: int(name.rpartition("-")[2]))]


def records(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """The records of all ranks; a line that was cut off by the end of its process is left out. Raises OSError."""
    lines_by_rank = {}
    for entry in os.scandir(folder):
        match = _RANK.fullmatch(entry.name)
        if match:
            lines_by_rank[int(match.group(1))] = list(_lines(read_whole(entry.path, LARGEST).splitlines()))
    return dict(sorted(lines_by_rank.items()))


def _lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and _is_valid(value):
            yield value


_NUMBER = (int, float)
_FIELDS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "window": {"first": (int,), "to": (int,), "world_size": (int,), "clock_error": (*_NUMBER, type(None))},
    "span": {"lane": (str,), "name": (str,), "start": _NUMBER, "seconds": _NUMBER},
    "nodes": {"rows": (list,)},
    "limits": {"flops": _NUMBER, "bytes": _NUMBER},
    "work": {"flops": (int, type(None))},
    "end": {"step": (int,)},
    "node": {"name": (str,), "start": _NUMBER, "seconds": _NUMBER},
}
_ROW = {
    "graph": (str,), "module": (str,), "operator": (str,), "calls": (int,), "seconds": _NUMBER, "bytes": _NUMBER,
    "flops": (*_NUMBER, type(None)),
}  # fmt: skip


def _is_valid(value: Mapping[str, Any]) -> bool:
    """Whether a line has the fields of its kind; a damaged one counts as missing."""
    fields = _FIELDS.get(str(value.get("kind")))
    if fields is None or not _has(value, fields) or any(value.get(key, 1) <= 0 for key in ("first", "world_size")):
        return False
    return all(isinstance(row, dict) and _has(row, _ROW) for row in value.get("rows", ()))


def _has(value: Mapping[str, Any], fields: Mapping[str, tuple[type, ...]]) -> bool:
    return all(isinstance(value.get(name, Ellipsis), types) for name, types in fields.items())


def append(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Append records to a rank's file with one write. Raises OSError, or ValueError for a number that JSON lacks."""
    data = b"".join(map(line_of, lines))
    with os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "wb", buffering=0) as file:
        # A disk that becomes full cuts a write short; only the next one is an error (write(2)).
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def line_of(record: Mapping[str, Any]) -> bytes:
    """A record as a line."""
    return (json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n").encode()


def write_trace(folder: Path) -> Path:
    """Write the trace of all ranks from their records. Raises OSError; no incomplete trace is left."""
    path = trace_of(folder)
    # Level 1: twice the bytes of the default, in a fifth of its time, in which a run may wait.
    with replacing(path) as packed, gzip.open(packed, "wt", compresslevel=1, encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = ""
        for event in _events(folder):
            file.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"
        file.write("\n]}\n")
    return path


def _events(folder: Path) -> Iterator[dict[str, Any]]:
    by_rank = records(folder)
    windows = {rank: next((line for line in lines if line["kind"] == "window"), {}) for rank, lines in by_rank.items()}
    # Ranks of a program have the time of day in common, and no zero of their own clocks.
    first = min((window["origin"] for window in windows.values() if "origin" in window), default=0.0)
    for rank, lines in by_rank.items():
        window = windows[rank]
        later = window["origin"] - first if "origin" in window else 0.0
        arguments = {"name": f"rank {rank} on {window.get('host', 'an unknown node')}"}
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": arguments}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        for tid, lane in enumerate(LANES):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": lane}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": tid, "args": {"sort_index": tid}}
        for line in lines:
            if line.get("kind") == "span" and line.get("lane") in LANES:
                yield _event(rank, LANES.index(line["lane"]), {**line, "start": line["start"] + later})
        for line in _nodes(nodes_of(folder, rank)):
            yield _event(rank, LANES.index(GRAPH), line)


def _nodes(path: Path) -> Iterator[dict[str, Any]]:
    """The runs of nodes in a file; those that can be read of an incomplete or damaged one."""
    try:
        with os.fdopen(open_regular(path), "rb") as packed, gzip.open(packed, "rb") as file:
            yield from _lines(_whole(file))
    except FileNotFoundError:
        return


def _whole(file: gzip.GzipFile) -> Iterator[bytes]:
    try:
        yield from file
    except (EOFError, gzip.BadGzipFile, zlib.error):
        return


def _event(rank: int, tid: int, line: Mapping[str, Any]) -> dict[str, Any]:
    arguments = {key: value for key, value in line.items() if key not in ("kind", "lane", "name", "start", "seconds")}
    return {
        "ph": "X", "name": line["name"], "cat": LANES[tid], "pid": rank, "tid": tid,
        "ts": round(max(0.0, 1e6 * line["start"]), 3), "dur": round(1e6 * line["seconds"], 3), "args": arguments,
    }  # fmt: skip
