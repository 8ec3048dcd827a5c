"""NCCL between ranks that are threads of one process, on fake GPUs: its collectives copy and add host memory.

Every call of every rank must agree with those of the others, as NCCL requires: in name, length, type and root.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from thread_wire import Meeting, sum_of

KINDS = {6: np.float16, 7: np.float32, 8: np.float64, 4: np.int64, 9: np.uint16}
"""bf16 is stored as the upper half of fp32."""
BFLOAT16 = 9
COLLECTIVES = ("ncclAllReduce", "ncclReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast")


class ThreadNccl:
    """The library of all ranks. `calls` are those of rank 0 of each world, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._lock = threading.Lock()
        self._worlds: dict[int, tuple[Meeting, int, int]] = {}
        self._meetings: dict[bytes, Meeting] = {}
        self._unique = 0
        self._of_thread = threading.local()
        self.blocks: list[int] = []
        """The most thread blocks of a kernel of each communicator, as it was asked for; negative if it was not."""
        self.ncclCommInitRankConfig = Init(self)

    def __getattr__(self, name: str) -> Any:
        if name not in COLLECTIVES:
            raise AttributeError(f"the fake has no {name}")

        def call(*arguments: Any) -> int:
            group = getattr(self._of_thread, "group", None)
            if group is not None:
                group.append((name, arguments))
            else:
                self._collective(name, arguments)
            return 0

        return call

    def ncclGetUniqueId(self, place: Any) -> int:  # noqa: N802
        with self._lock:
            self._unique += 1
            place._obj.internal = b"world %d" % self._unique
        return 0

    def connect(self, unique: Any, rank: int, ranks: int) -> int:
        """A handle of a rank's own."""
        with self._lock:
            meeting = self._meetings.setdefault(bytes(unique.internal), Meeting(ranks))
            self._worlds[len(self._worlds) + 1] = meeting, rank, ranks
            return len(self._worlds)

    def ncclGroupStart(self) -> int:  # noqa: N802
        assert getattr(self._of_thread, "group", None) is None
        self._of_thread.group = []
        return 0

    def ncclGroupEnd(self) -> int:  # noqa: N802
        group, self._of_thread.group = self._of_thread.group, None
        for name, arguments in group:
            self._collective(name, arguments)
        return 0

    def ncclCommGetAsyncError(self, world: Any, place: Any) -> int:  # noqa: N802
        place._obj.value = 0
        return 0

    def ncclCommFinalize(self, world: Any) -> int:  # noqa: N802
        return 0

    def ncclCommDestroy(self, world: Any) -> int:  # noqa: N802
        return 0

    def ncclCommAbort(self, world: Any) -> int:  # noqa: N802
        self._worlds[world.value][0].abort()
        return 0

    def _collective(self, name: str, arguments: Any) -> None:
        source, target, count, kind, *rest, world, _stream = arguments
        meeting, rank, ranks = self._worlds[world.value]
        root = rest[-1] if name in ("ncclReduce", "ncclBroadcast") else None
        if rank == 0:
            self.calls.append(name)
        sent = count.value * ranks if name == "ncclReduceScatter" else count.value
        given = array_at(source.value, sent, KINDS[kind])
        every = meeting.exchange(rank, ((name, count.value, kind, root), given.copy()))
        assert len({described for described, _ in every}) == 1, [described for described, _ in every]
        arrays = [array for _, array in every]
        if name == "ncclAllGather":
            array_at(target.value, sent * ranks, KINDS[kind])[:] = np.concatenate(arrays)
        elif name == "ncclBroadcast":
            array_at(target.value, sent, KINDS[kind])[:] = arrays[root]
        elif name == "ncclReduceScatter":
            mine = slice(rank * count.value, (rank + 1) * count.value)
            array_at(target.value, count.value, KINDS[kind])[:] = _total(arrays, kind)[mine]
        elif name == "ncclAllReduce" and rest[0] == 2:
            array_at(target.value, sent, KINDS[kind])[:] = np.max(arrays, axis=0)
        elif root in (None, rank):
            array_at(target.value, sent, KINDS[kind])[:] = _total(arrays, kind)
        # Nobody goes on before all have read.
        meeting.exchange(rank, None)


class Init:
    """ncclCommInitRankConfig."""

    argtypes: Any = None

    def __init__(self, library: ThreadNccl) -> None:
        self._library = library

    def __call__(self, place: Any, ranks: int, unique: Any, rank: int, config: Any) -> int:
        place._obj.value = self._library.connect(unique, rank, ranks)
        assert config._obj.size == ctypes.sizeof(config._obj)
        self._library.blocks.append(config._obj.most_blocks)
        return 0


def _total(arrays: Sequence[Any], kind: int) -> Any:
    """The sum over the ranks; bf16 is stored as its 16 bits."""
    if kind != BFLOAT16:
        return sum_of(arrays)
    total = sum_of([(array.astype(np.uint32) << 16).view(np.float32) for array in arrays])
    return (total.view(np.uint32) >> 16).astype(np.uint16)


def array_at(address: int, count: int, kind: Any) -> Any:
    """The memory of a buffer."""
    size = count * np.dtype(kind).itemsize
    if not size:
        return np.empty(0, kind)
    return np.frombuffer((ctypes.c_char * size).from_address(address), kind)
