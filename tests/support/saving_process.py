"""A process that saves and prunes until it is killed: `python saving_process.py FOLDER FIRST_STEP [LIMIT]`.

Prints the step of each committed checkpoint. Every element of step n's state is n. With LIMIT, no file can grow
beyond so many bytes, as on a full disk. A failed save is printed as `failed REASON`.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import numpy as np
from checkpoints import progress_of

from ortflow.workflow.checkpoint.commit import SaveFailed, commit
from ortflow.workflow.checkpoint.retain import prune
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.checkpoint.writer import Writer, specs
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.layout import FlatIndex, Tensor

WORLD_SIZE = 2
COUNT = 50_000


def main(folder: str, first: int, limit: int | None) -> None:
    store = DirectoryStore(Path(folder))
    store.clean()
    buffers = {"parameters": HostBuffer(np.zeros(COUNT, np.float32))}
    index = FlatIndex.place([Tensor("w", (COUNT,), "decay")])
    writers = [Writer(store, buffers, rank=rank, world_size=WORLD_SIZE, attempt=first) for rank in range(WORLD_SIZE)]
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    print("ready", flush=True)
    for step in range(first, first + (1_000_000 if limit is None else 1)):
        buffers["parameters"].fill(step)
        for writer in writers:
            writer.start(step, urgent=True)
        statuses = [writer.wait() for writer in writers]
        reasons = [status.reason for status in statuses if status.record is None]
        if reasons:
            store.abandon(step, first)
            print("failed", reasons[0], flush=True)
            continue
        records = [status.record for status in statuses if status.record is not None]
        try:
            commit(
                store,
                step,
                first,
                records,
                buffers=specs(buffers),
                index=index,
                progress=progress_of(step),
                environment={},
            )
        except SaveFailed as error:
            print("failed", error, flush=True)
            continue
        print(step, flush=True)
        prune(store, 2)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
