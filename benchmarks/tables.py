"""Reading a CSV where it is: rows a second against PyTorch's DataLoader, and the index against pyarrow's own scan.

`python benchmarks/tables.py [--gigabytes 1] [--rounds 3] [--folder FOLDER]` prints for a CSV of numbers and text
that it writes

- seconds, processor seconds and peak memory of the pass that indexes it, beside those of `pyarrow.csv.open_csv`;
- rows a second in shuffled batches of 256, as a run reads them, beside a DataLoader over the same file: one that reads
  the rows where they are with pyarrow, as this does, and one over a table that pyarrow has read into memory before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 256
SECONDS = 4.0
NUMBERS = [f"v{number}" for number in range(8)]


BLOCKS = 60
"""Of 20,000 rows, about 100 MB. A larger table repeats them: Python writes 10 MB of such rows a second."""


def write(path: Path, size: int) -> None:
    """A table of eight numbers, a whole number, a quoted text and a class."""
    random = np.random.default_rng(0)
    blocks: list[bytes] = []
    with path.open("wb") as file:
        file.write(",".join([*NUMBERS, "age", "note", "label"]).encode() + b"\n")
        for number in itertools.count():
            if number < BLOCKS:
                values = random.normal(size=(20_000, 8)).round(6).tolist()
                ages = random.integers(18, 90, 20_000).tolist()
                rows = (
                    f'{",".join(map(str, row))},{age},"note, {age}",{"abcd"[age % 4]}\n'
                    for row, age in zip(values, ages, strict=True)
                )
                blocks.append("".join(rows).encode())
            file.write(blocks[number % BLOCKS])
            if file.tell() >= size:
                return


def index(path: Path) -> dict[str, float]:
    """The pass that indexes."""
    from ortflow.workflow.data.tables.text_table import TextTable

    began = time.perf_counter()
    table = TextTable([path], {})
    return {"seconds": time.perf_counter() - began, "rows": len(table)}


def scan(path: Path) -> dict[str, float]:
    """pyarrow's own pass: streaming, which infers kinds from the first block alone."""
    from pyarrow import csv

    began, rows = time.perf_counter(), 0
    for batch in csv.open_csv(path):
        rows += batch.num_rows
    return {"seconds": time.perf_counter() - began, "rows": rows}


def measured(what: str, path: Path) -> dict[str, float]:
    """One of the passes in a separate process, with its peak memory."""
    with tempfile.TemporaryDirectory(dir=path.parent) as cache:
        command = [sys.executable, __file__, "--only", what, "--file", str(path)]
        done = subprocess.run(command, env={**os.environ, "ORTFLOW_CACHE": cache}, capture_output=True, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def ours(path: Path, cache: str) -> float:
    """Rows a second of a run's batches."""
    os.environ["ORTFLOW_CACHE"] = cache
    from ortflow.workflow.data.batches import Batches
    from ortflow.workflow.data.epoch_positions import Position
    from ortflow.workflow.data.feed import Feed
    from ortflow.workflow.data.order import SampleOrder
    from ortflow.workflow.data.sources import open_samples
    from ortflow.workflow.spec.data import DataSet
    from ortflow.workflow.spec.mapping import ColumnReference

    section = {"path": str(path), "columns": {"x": [*NUMBERS, "age"]}}
    samples = open_samples(DataSet.model_validate(section))
    feeds = [
        Feed("x", np.dtype("float32"), ColumnReference("x")),
        Feed("labels", np.dtype("int64"), ColumnReference("label")),
    ]
    order = SampleOrder(len(samples), 0)
    batches = Batches(samples, order, feeds, micro_batch=BATCH, accumulation=1, rank=0, world_size=1, last_batch="drop")
    with batches.read_from(Position()) as reader:
        next(reader)
        return rate(iter(reader))


def rate(batches: Iterator[Any]) -> float:
    """Rows a second."""
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        next(batches)
        count += BATCH
    return count / (time.perf_counter() - began)


def loader(dataset: Any, workers: int, **options: Any) -> float:
    """Rows a second of a DataLoader, epoch after epoch."""
    import torch

    made = torch.utils.data.DataLoader(dataset, shuffle=True, num_workers=workers, drop_last=True, **options)

    def endless() -> Iterator[Any]:
        while True:
            yield from made

    batches = endless()
    next(batches)
    return rate(batches)


class InMemory:
    """The table in memory, as tutorials have it: one row an item."""

    def __init__(self, path: Path) -> None:
        import torch
        from pyarrow import csv

        table = csv.read_csv(path)
        columns = [table.column(name).to_numpy().astype(np.float32) for name in (*NUMBERS, "age")]
        self.x = torch.from_numpy(np.stack(columns, axis=1))
        labels = table.column("label").combine_chunks().dictionary_encode()
        self.labels = torch.from_numpy(labels.indices.to_numpy().astype(np.int64))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        return self.x[row], self.labels[row]


class InPlace:
    """The lines where they are, one parse an item: what a Dataset over a file that exceeds the memory does."""

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        ends = np.flatnonzero(np.frombuffer(data, np.uint8) == 10) + 1
        self.starts, self.ends, self.path = ends[:-1], ends[1:], path
        self.file: Any = None

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: int) -> Any:
        import torch

        self.file = self.file or self.path.open("rb")
        self.file.seek(self.starts[row])
        fields = self.file.read(self.ends[row] - self.starts[row]).decode().rstrip("\n").split(",")
        return torch.tensor([float(text) for text in fields[:9]]), "abcd".index(fields[-1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["index", "scan"], help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        found = {"index": index, "scan": scan}[given.only](given.file)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        spent = usage.ru_utime + usage.ru_stime
        print(json.dumps({**found, "peak_mib": usage.ru_maxrss / 1024, "processor_seconds": spent}))
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        path = Path(folder, "table.csv")
        write(path, int(given.gigabytes * 1e9))
        size = path.stat().st_size
        passes: dict[str, list[dict[str, float]]] = {"scan": [], "index": []}
        for turn in range(given.rounds):
            # The first of a turn finds more of the file in the page cache of the one before.
            for what in list(passes)[:: -1 if turn % 2 else 1]:
                result = measured(what, path)
                passes[what].append(result)
                spent = f"{result['seconds']:.1f} s, {result['processor_seconds']:.1f} processor seconds"
                print(f"  {what}: {spent}, {result['peak_mib']:.0f} MiB, load {os.getloadavg()[0]:.1f}", flush=True)
        for what, results in passes.items():
            best = min(results, key=lambda result: result["seconds"])
            print(
                f"{what}: {best['seconds']:.2f} s, {size / best['seconds'] / 1e6:.0f} MB/s, "
                f"{best['processor_seconds']:.1f} processor seconds, "
                f"at most {max(result['peak_mib'] for result in results):.0f} MiB, {best['rows']:.0f} rows"
            )
        for unit in ("seconds", "processor_seconds"):
            turns = zip(passes["scan"], passes["index"], strict=True)
            ratio = statistics.median(scanned[unit] / indexed[unit] for scanned, indexed in turns)
            print(f"index at {ratio:.2f} of pyarrow's scan by {unit.replace('_', ' ')}")
        small = Path(folder, "small.csv")
        write(small, int(2e7))
        rows = ours(small, folder)
        print(f"rows a second: {rows:,.0f}")
        for name, dataset in (("in place", InPlace(small)), ("in memory", InMemory(small))):
            for workers in (0, 1):
                other = loader(dataset, workers, batch_size=BATCH)
                print(f"DataLoader {name}, {workers} workers: {other:,.0f}; {rows / other:.2f} times")


if __name__ == "__main__":
    main()
