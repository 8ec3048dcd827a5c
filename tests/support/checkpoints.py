"""Small checkpoints for tests, made by the real writers and the real commit, on a real disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ortflow.workflow.checkpoint.commit import commit
from ortflow.workflow.checkpoint.manifest import Damaged, Manifest
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.checkpoint.verify import OnReject, verify
from ortflow.workflow.checkpoint.writer import Writer, specs
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.layout import FlatIndex, Tensor

INDEX = FlatIndex.place([Tensor("weight", (5, 7), "decay"), Tensor("bias", (3,), "no_decay")])


def progress_of(step: int, **more: Any) -> dict[str, Any]:
    """The minimum that a manifest holds of a run's progress, and `more`."""
    return {"step": step, "updates": step, "epoch": 0, "sample": 0, **more}


def state(seed: int, count: int = INDEX.size) -> dict[str, HostBuffer]:
    """Buffers of random values: parameters, a moment of the trained ones, counters of another type."""
    random = np.random.default_rng(seed)
    return {
        "parameters": HostBuffer(random.standard_normal(count).astype(np.float32)),
        "moment_1": HostBuffer(random.standard_normal(count - 1).astype(np.float32)),
        "counters": HostBuffer(random.integers(0, 1 << 40, 3)),
    }


def save(
    store: DirectoryStore,
    step: int,
    buffers: Mapping[str, HostBuffer],
    world_size: int = 2,
    attempt: int = 0,
    index: FlatIndex = INDEX,
    **progress: Any,
) -> Manifest:
    """A committed checkpoint of `world_size` ranks; `progress` is recorded besides the counters."""
    writers = [Writer(store, buffers, rank=rank, world_size=world_size, attempt=attempt) for rank in range(world_size)]
    for writer in writers:
        writer.start(step, urgent=True)
    statuses = [writer.wait() for writer in writers]
    records = [status.record for status in statuses if status.record is not None]
    assert len(records) == world_size, statuses
    output = progress_of(step, **progress)
    return commit(store, step, attempt, records, buffers=specs(buffers), index=index, progress=output, environment={})


def same(loaded: Mapping[str, Any], buffers: Mapping[str, HostBuffer]) -> bool:
    """Whether loaded arrays hold exactly the buffers' bits."""
    return loaded.keys() == buffers.keys() and all(
        loaded[name].tobytes() == buffers[name].array.tobytes() for name in buffers
    )


@contextmanager
def changed(path: Path, data: bytes) -> Iterator[None]:
    """Give the file other contents temporarily."""
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)


class Rejections:
    """What a reader reported."""

    def __init__(self) -> None:
        self.faults: list[Damaged] = []

    def __call__(self, fault: Damaged) -> None:
        self.faults.append(fault)

    @property
    def paths(self) -> list[Path]:
        """Files and folders named."""
        return [fault.path for fault in self.faults]


def newest_whole(store: DirectoryStore, on_reject: OnReject | None = None) -> int | None:
    """The newest step whose checkpoint is intact, verified by reading every byte; skipped ones are reported."""
    for step in reversed(store.steps()):
        faults = verify(store, step)
        if not faults:
            return step
        if on_reject:
            for fault in faults:
                on_reject(fault)
    return None
