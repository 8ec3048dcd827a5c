"""Every kind of source, continued on other ranks with killed workers within an epoch: the same samples, each once."""

from __future__ import annotations

import io
import json
import tarfile
import wave
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from data_sets import feed, write_batches
from pictures import encoded
from pyarrow import parquet

from ortflow.workflow.data.augmented import augmented
from ortflow.workflow.data.batches import Batches
from ortflow.workflow.data.epoch_positions import Position
from ortflow.workflow.data.order import SampleOrder
from ortflow.workflow.data.pooled import pooled
from ortflow.workflow.data.samples import Samples
from ortflow.workflow.data.sources import open_training
from ortflow.workflow.data.vocabulary import transforms_of
from ortflow.workflow.data.workers import Workers
from ortflow.workflow.spec.data import DataSection

COUNT, SEED = 27, 5
UNCHANGED = "def unchanged(array, random):\n    return array\n"
"""What only worker processes call."""


@dataclass(frozen=True)
class Source:
    """A kind of source: how its files are written, and how a sample is identified."""

    write: Callable[[Path, range], Path]
    """Writes the samples of these numbers below a folder that exists; returns the path of the set."""
    column: str = "v"
    number: Callable[[np.ndarray], float] = float
    """Of a sample."""
    keys: dict[str, Any] | None = None
    """Of the set."""
    workers: bool = True
    """Whether worker processes can make its samples; a table's are made by the rank."""
    parts: int = 1
    """How many of it are a list."""


def csv(folder: Path, numbers: range) -> Path:
    rows = "".join(f'{number},"a, {number}"\n' for number in numbers)
    (folder / "set.csv").write_text(f"v,text\n{rows}")
    return folder / "set.csv"


def json_lines(folder: Path, numbers: range) -> Path:
    (folder / "set.jsonl").write_text("".join(json.dumps({"v": number}) + "\n" for number in numbers))
    return folder / "set.jsonl"


def parquet_file(folder: Path, numbers: range) -> Path:
    parquet.write_table(pa.table({"v": numbers}), folder / "set.parquet", row_group_size=5)
    return folder / "set.parquet"


def hub(folder: Path, numbers: range) -> Path:
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    table = pa.table({"v": numbers})
    with pa.ipc.new_stream(str(folder / "data.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    return folder


def arrow(folder: Path, numbers: range) -> Path:
    write_batches(folder / "set.arrow", {"v": np.array(numbers)})
    return folder / "set.arrow"


def archive(folder: Path, numbers: range) -> Path:
    np.savez(folder / "set.npz", v=np.array(numbers))
    return folder / "set.npz"


def tokens(folder: Path, numbers: range) -> Path:
    np.arange(numbers.start * 3, numbers.stop * 3 + 1, dtype=np.uint16).tofile(folder / "set.bin")
    return folder / "set.bin"


def png(number: int) -> bytes:
    return encoded(np.full((4, 4, 3), number, np.uint8))


def wav(number: int) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(np.full(6, number, np.int16).tobytes())
    return buffer.getvalue()


def files(encode: Callable[[int], bytes], end: str) -> Callable[[Path, range], Path]:
    def write(folder: Path, numbers: range) -> Path:
        for number in numbers:
            path = folder / "ab"[number % 2] / f"{number:02}{end}"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(encode(number))
        return folder

    return write


def shards(folder: Path, numbers: range) -> Path:
    for first in range(numbers.start, numbers.stop, 10):
        with tarfile.open(folder / f"{first:02}.tar", "w") as shard:
            for number in range(first, min(first + 10, numbers.stop)):
                for end, data in (("png", png(number)), ("cls", b"0")):
                    member = tarfile.TarInfo(f"{number:02}.{end}")
                    member.size = len(data)
                    shard.addfile(member, io.BytesIO(data))
    return folder


IMAGES: dict[str, Any] = {"column": "image", "number": lambda image: float(image[0, 0, 0]) * 255}
TOKENS: dict[str, Any] = {
    "column": "tokens",
    "number": lambda window: float(window[0]) / 3,
    "keys": {"tokens": {"length": 3}},
}
SOUNDS: dict[str, Any] = {
    "column": "audio", "number": lambda sound: float(sound[0]) * 32768, "keys": {"audio": {"rate": 8000}}
}  # fmt: skip
SOURCES = {
    "csv": Source(csv, workers=False),
    "json lines": Source(json_lines, workers=False),
    "parquet": Source(parquet_file, workers=False),
    "folder of the hub": Source(hub, workers=False),
    "arrow": Source(arrow),
    "npz": Source(archive),
    "tokens": Source(tokens, **TOKENS),
    "images": Source(files(png, ".png"), **IMAGES),
    "sounds": Source(files(wav, ".wav"), **SOUNDS),
    "tar shards": Source(shards, **IMAGES),
    "list of csv": Source(csv, workers=False, parts=3),
    "list of parquet": Source(parquet_file, workers=False, parts=3),
    "list of arrow": Source(arrow, parts=3),
    "list of npz": Source(archive, parts=3),
    "list of tokens": Source(tokens, parts=3, **TOKENS),
    "list of images": Source(files(png, ".png"), parts=3, **IMAGES),
    "list of sounds": Source(files(wav, ".wav"), parts=3, **SOUNDS),
    "list of tar shards": Source(shards, parts=3, **IMAGES),
}


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    workers = Workers(1)
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory, workers: Workers) -> Iterator[dict[str, Samples]]:
    """The set of each source; sets are registered before the workers start."""
    root = tmp_path_factory.mktemp("sources")
    (root / "changes.py").write_text(UNCHANGED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORTFLOW_CACHE", str(root / "cache"))
        yield {name: opened(root / name, source, root / "changes.py", workers) for name, source in SOURCES.items()}


def opened(folder: Path, source: Source, changes: Path, workers: Workers) -> Samples:
    paths = []
    for part in range(source.parts):
        (folder / str(part)).mkdir(parents=True)
        size = COUNT // source.parts
        paths.append(str(source.write(folder / str(part), range(part * size, (part + 1) * size))))
    transform = {"function": f"{changes}:unchanged", "column": source.column}
    path = paths if source.parts > 1 else paths[0]
    train = {"path": path, "transforms": [transform], **(source.keys or {})}
    section = DataSection.model_validate({"train": train, "micro_batch": 1})
    samples = open_training(section, SEED)
    samples = augmented(samples, transforms_of(section.train, "data.train"), SEED, "data.train")
    return pooled(samples, section, SEED, "data.train", workers)


def running() -> list[psutil.Process]:
    alive = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    return [each for each in alive if "ortflow.workflow.data.worker" in each.cmdline()]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.rotates] if "list" in name else []) for name in SOURCES]
)
def test_each_sample_once(name: str, sets: dict[str, Samples], workers: Workers) -> None:
    samples, source = sets[name], SOURCES[name]
    assert len(samples) == COUNT
    inputs = [feed("x", source.column, "float32")]

    def read(position: Position, ranks: int, size: int, steps: int) -> tuple[list[float], Position]:
        """Numbers of the samples of so many steps in the order of the run, and the position behind them."""
        options: dict[str, Any] = {"micro_batch": size, "accumulation": 1, "last_batch": "keep"}
        order = SampleOrder(COUNT, SEED)
        every = [Batches(samples, order, inputs, rank=rank, world_size=ranks, **options) for rank in range(ranks)]
        seen: list[list[float]] = [[] for _ in range(steps)]
        for batches in every:
            with batches.read_from(position) as reader:
                for step in range(steps):
                    batch = next(reader)
                    seen[step] += map(source.number, batch.micro_batches[0].arrays["x"])
        return [number for step in seen for number in step], batch.next

    first, position = read(Position(), ranks=1, size=2, steps=3)
    killed = running()
    assert bool(killed) or not source.workers
    for worker in killed:
        worker.kill()
    second, position = read(position, ranks=3, size=1, steps=4)
    for worker in running():
        worker.kill()
    third, position = read(position, ranks=2, size=2, steps=3)
    assert position == Position(1)
    epoch = [round(number) for number in first + second + third]
    assert sorted(epoch) == list(range(COUNT)), "no sample is lost or repeated"
    by_class = name.endswith(("images", "sounds"))
    stored = np.argsort([number % 2 for number in range(COUNT)], kind="stable") if by_class else np.arange(COUNT)
    if not by_class or source.parts == 1:
        assert epoch == stored[SampleOrder(COUNT, SEED).indices(0, 0, COUNT)].tolist(), "in the order of the seed"
    again, _ = read(Position(), ranks=1, size=COUNT, steps=2)
    assert again[:COUNT] == first + second + third
