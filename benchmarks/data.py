"""Samples a second: ortflow's loader, plain numpy.memmap slicing, and PyTorch's DataLoader where torch is installed.

    python benchmarks/data.py [--rounds 15] [--seconds 0.1]

All three give the same batches in the same random order from the same values on disk, with a warm page cache: windows
of 257 byte tokens as two int64 arrays [B, 256], and float32 images of 3 x 64 x 64 with an int64 label. Prints medians
and the loader's ratio to each of the others; exits 1 where it has less than 0.8 of memmap's.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortflow.workflow.data.batches import Batches
from ortflow.workflow.data.dataset import Dataset
from ortflow.workflow.data.epoch_positions import Position
from ortflow.workflow.data.feed import Feed
from ortflow.workflow.data.order import SampleOrder
from ortflow.workflow.data.write import record_batch, write_set
from ortflow.workflow.spec.mapping import ColumnReference

Batch = Sequence[npt.NDArray[Any]]
REQUIRED = 0.8


@dataclass(frozen=True)
class Case:
    """A set on disk, as Arrow file and as plain files, and how inputs come from it."""

    name: str
    batch: int
    samples: int
    feeds: tuple[Feed, ...]
    columns: dict[str, npt.NDArray[Any]]


def cases() -> Iterator[Case]:
    """Token windows and images, from a fixed seed."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 256, (200_000, 257), dtype=np.uint8)
    windows = (
        Feed("input_ids", np.dtype("int64"), ColumnReference("tokens", None, -1)),
        Feed("labels", np.dtype("int64"), ColumnReference("tokens", 1, None)),
    )
    for batch in (16, 64):
        yield Case("token windows", batch, len(tokens), windows, {"tokens": tokens})
    images = random.random((4_000, 3, 64, 64), dtype=np.float32)
    labels = random.integers(0, 10, 4_000)
    pictures = (
        Feed("image", np.dtype("float32"), ColumnReference("image")),
        Feed("label", np.dtype("int64"), ColumnReference("label")),
    )
    yield Case("images", 32, len(images), pictures, {"image": images, "label": labels})


def loader(case: Case, folder: Path, order: SampleOrder) -> Iterator[Batch]:
    """Epoch after epoch through ortflow."""
    batches = Batches(
        Dataset.open(folder / "set.arrow"),
        order,
        case.feeds,
        micro_batch=case.batch,
        accumulation=1,
        rank=0,
        world_size=1,
        last_batch="drop",
    )
    with batches.read_from(Position()) as steps:
        for step in steps:
            yield list(step.micro_batches[0].arrays.values())


def memmap(case: Case, folder: Path, order: SampleOrder) -> Iterator[Batch]:
    """Epoch after epoch by slicing mapped arrays."""
    maps = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in case.columns}
    for epoch in itertools.count():
        samples = order.indices(epoch, 0, case.samples)
        for start in range(0, case.samples - case.batch + 1, case.batch):
            rows = {name: mapped[samples[start : start + case.batch]] for name, mapped in maps.items()}
            yield [_cut(rows[feed.source.column], feed) for feed in case.feeds]


def _cut(rows: npt.NDArray[Any], feed: Feed) -> npt.NDArray[Any]:
    sliced = rows if feed.source.whole else rows[:, feed.source.slice]
    return sliced.astype(feed.dtype, copy=False)


def data_loader(case: Case, folder: Path, order: SampleOrder) -> Iterator[Batch]:
    """Epoch after epoch through torch.utils.data.DataLoader, in this process: workers cost more than such samples."""
    import torch.utils.data

    class Samples:
        def __init__(self) -> None:
            self.maps = {name: np.load(folder / f"{name}.npy", mmap_mode="c") for name in case.columns}

        def __len__(self) -> int:
            return case.samples

        def __getitem__(self, index: int) -> tuple[Any, ...]:
            samples = {name: mapped[index : index + 1] for name, mapped in self.maps.items()}
            return tuple(_cut(samples[feed.source.column], feed)[0] for feed in case.feeds)

    for epoch in itertools.count():
        samples = order.indices(epoch, 0, case.samples).tolist()
        yield from torch.utils.data.DataLoader(Samples(), batch_size=case.batch, sampler=samples, drop_last=True)


def samples_a_second(batches: Iterator[Batch], seconds: float) -> float:
    """Samples a second of an iterator that has begun."""
    count = 0
    begin = time.perf_counter()
    while (passed := time.perf_counter() - begin) < seconds:
        count += len(next(batches)[0])
    return count / passed


def checksum(batches: Iterator[Batch]) -> int:
    """The first ten batches as one number; begins the iterator."""
    first = itertools.islice(batches, 10)
    return sum(int(float(np.asarray(array, dtype=np.float64).sum())) for batch in first for array in batch)


def main() -> int:
    """Print a line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.1, help="time of one measurement")
    arguments = parser.parse_args()
    readers = {"ortflow": loader, "memmap": memmap} | ({"DataLoader": data_loader} if find_spec("torch") else {})
    enough = True
    for case in cases():
        order = SampleOrder(case.samples, seed=0)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_set(folder / "set.arrow", [record_batch(case.columns)])
            for column, values in case.columns.items():
                np.save(folder / f"{column}.npy", values)
            running = {reader: read(case, folder, order) for reader, read in readers.items()}
            assert len({checksum(batches) for batches in running.values()}) == 1, "the readers disagree"
            speeds: dict[str, list[float]] = {reader: [] for reader in readers}
            # In turn, so that what else the machine does falls on all alike; the first round maps the files' pages.
            for number in range(arguments.rounds + 1):
                for reader, batches in running.items():
                    speed = samples_a_second(batches, arguments.seconds)
                    if number:
                        speeds[reader].append(speed)
            running.clear()
        medians = {reader: statistics.median(values) for reader, values in speeds.items()}
        reported = ", ".join(f"{reader} {speed:,.0f} samples/s" for reader, speed in medians.items())
        ratios = {reader: medians["ortflow"] / speed for reader, speed in medians.items() if reader != "ortflow"}
        print(f"{case.name}, batch {case.batch}: {reported}")
        print("  ratio to " + ", ".join(f"{reader} {ratio:.2f}" for reader, ratio in ratios.items()))
        enough = enough and ratios["memmap"] >= REQUIRED
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
