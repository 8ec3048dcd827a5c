"""Images and tokens a second from files, against PyTorch's DataLoader with as many workers and the same transforms.

    python benchmarks/image_files.py [--workers 2 --images 600 --side 256 --rounds 3]

Images are PNG or JPEG files in folders of classes; both decode them by Pillow, take a random resized crop, flip and
normalise. Both take turns, because a machine's speed drifts. Tokens are windows of 1,024 of a file of uint16. Prints
medians of images and tokens a second, and ortflow's over PyTorch's.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch.utils.data
from PIL import Image
from torchvision import datasets, transforms

from ortflow.workflow.data.augmented import augmented
from ortflow.workflow.data.batches import Batches
from ortflow.workflow.data.epoch_positions import Position
from ortflow.workflow.data.feed import Feed
from ortflow.workflow.data.order import SampleOrder
from ortflow.workflow.data.pooled import pooled
from ortflow.workflow.data.samples import Samples
from ortflow.workflow.data.sources import open_samples
from ortflow.workflow.data.workers import Workers
from ortflow.workflow.spec.data import DataSection, DataSet
from ortflow.workflow.spec.mapping import ColumnReference
from ortflow.workflow.spec.media import ImagesSection, TokensSection
from ortflow.workflow.spec.transforms import RandomCrop, Transform

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
CROP, BATCH = 224, 32
LENGTH = 1024


def write_images(root: Path, count: int, side: int) -> None:
    """Two classes of smooth images, which compress as photographs do."""
    random = np.random.default_rng(0)
    for number in range(count):
        folder = root / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(random.integers(0, 256, (side // 16, side // 16, 3), np.uint8))
        coarse.resize((side, side), Image.Resampling.BICUBIC).save(folder / f"{number:05}.jpg", quality=90)


def batches_of(samples: Samples, feeds: list[Feed], batch: int) -> Iterator[Any]:
    """Epoch after epoch through ortflow."""
    order = SampleOrder(len(samples), 0)
    reader = Batches(samples, order, feeds, micro_batch=batch, accumulation=1, rank=0, world_size=1, last_batch="drop")
    with reader.read_from(Position()) as steps:
        yield from steps


def ortflow_images(root: Path, workers: Workers) -> Iterator[Any]:
    """Through a folder of images with worker processes."""
    changes = [Transform(random_crop=RandomCrop(scale=[0.08, 1.0])), Transform(flip="horizontal")]
    section = DataSet(path=str(root), images=ImagesSection(crop=CROP, mean=MEAN, std=STD), transforms=changes)
    samples = augmented(open_samples(section), section.transforms, 0, "data.train")
    feeds = [
        Feed("x", np.dtype("float32"), ColumnReference("image")),
        Feed("labels", np.dtype("int64"), ColumnReference("label")),
    ]
    return batches_of(
        pooled(samples, DataSection(train=section, micro_batch=BATCH), 0, "data.train", workers), feeds, BATCH
    )


def torch_images(root: Path, workers: int) -> Iterator[Any]:
    """Through torchvision's ImageFolder and a DataLoader."""
    chain = transforms.Compose(
        [
            transforms.RandomResizedCrop(CROP),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    return _endless(datasets.ImageFolder(root, chain), workers, BATCH)


def ortflow_tokens(path: Path) -> Iterator[Any]:
    """Through windows of the mapped file."""
    samples = open_samples(DataSet(path=str(path), tokens=TokensSection(length=LENGTH)))
    feeds = [
        Feed("x", np.dtype("int64"), ColumnReference("tokens", None, -1)),
        Feed("labels", np.dtype("int64"), ColumnReference("tokens", 1, None)),
    ]
    return batches_of(samples, feeds, BATCH)


class Windows(torch.utils.data.Dataset[Any]):
    """Windows of a memmap, as nanoGPT's loader makes them."""

    def __init__(self, path: Path) -> None:
        self._tokens = np.memmap(path, np.uint16, "r")

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // LENGTH

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        window = torch.from_numpy(self._tokens[number * LENGTH : (number + 1) * LENGTH + 1].astype(np.int64))
        return window[:-1], window[1:]


def _endless(dataset: Any, workers: int, batch: int) -> Iterator[Any]:
    loader = torch.utils.data.DataLoader(
        dataset, batch, shuffle=True, num_workers=workers, drop_last=True, persistent_workers=workers > 0
    )
    while True:
        yield from loader


def speed(batches: Iterator[Any], count: int) -> float:
    """Batches a second over `count` batches."""
    begun = time.perf_counter()
    for _ in range(count):
        next(batches)
    return count / (time.perf_counter() - begun)


def compare(name: str, unit: int, ours: Iterator[Any], theirs: Iterator[Any], count: int, rounds: int) -> None:
    """Print both speeds, in turns after a first round that starts the workers."""
    speeds: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for batches, found in zip((ours, theirs), speeds, strict=True):
            found.append(speed(batches, count))
            if turn == 0:
                found.clear()
    own, other = (statistics.median(found) * BATCH * unit for found in speeds)
    ratio = statistics.median(mine / its for mine, its in zip(*speeds, strict=True))
    print(f"{name:8}  ortflow {own:12,.0f}/s  DataLoader {other:12,.0f}/s  ratio {ratio:.2f}", flush=True)


def main() -> None:
    """Write the files, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder / "images", options.images, options.side)
        workers = Workers(options.workers)
        own, other = ortflow_images(folder / "images", workers), torch_images(folder / "images", options.workers)
        compare("images", 1, own, other, options.images // BATCH, options.rounds)
        own.close()  # type: ignore[attr-defined]
        workers.close()
        np.random.default_rng(0).integers(0, 50000, 1 << 24).astype(np.uint16).tofile(folder / "tokens.bin")
        for count in sorted({0, options.workers}):
            theirs = _endless(Windows(folder / "tokens.bin"), count, BATCH)
            print(f"DataLoader with {count} workers:")
            compare("tokens", LENGTH, ortflow_tokens(folder / "tokens.bin"), theirs, 200, options.rounds)


if __name__ == "__main__":
    main()
