"""Worker processes of a rank that decode and transform samples: see `worker`.

They are new interpreters and never forks: a fork copies the locks of ONNX Runtime's and MPI's threads in the state that
they happen to have, and a process that waits for one waits forever. Samples come back through memory that both sides
have open and that has no name, so that nothing is left behind, and that /dev/shm, which containers limit, is not used.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

import numpy as np

from ortflow.workflow.data.samples import Indices, Samples
from ortflow.workflow.data.schema import Array
from ortflow.workflow.data.worker import receive, send
from ortflow.workflow.errors import OrtflowError, UserError, signal_name
from ortflow.workflow.run.signals import STOP_SIGNALS
from ortflow.workflow.system.module_process import start_module

_ATTEMPTS = 3
"""Workers that may end while they make the same samples, before that is an error."""
_QUEUED = 2
"""Tasks of a worker, so that it need not wait for the next one."""
_TASKS_PER_WORKER = 4
"""Parts of a read for each worker: samples differ in their time."""


class Recipe(Protocol):
    """How a worker opens a set; it is pickled."""

    def make(self) -> Samples:
        """The samples."""
        ...


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    tasks: deque[int] = field(default_factory=deque)

    @property
    def input(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def output(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout


class Workers:
    """Up to `count` processes, started by the first read; without any, or when closed, the rank reads itself."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._recipes: list[bytes] = []
        self._paths: list[str] = []
        self._workers: list[_Worker] = []
        self._memory: int | None = None
        self._lock = threading.Lock()

    def add(self, recipe: Recipe, path: str) -> int:
        """Register a set, whose path is for messages; returns its key. Must be called before the first read."""
        self._recipes.append(pickle.dumps(recipe))
        self._paths.append(path)
        return len(self._recipes) - 1

    def read(self, key: int, epoch: int, name: str, indices: Indices, out: Array | None) -> list[Array]:
        """Samples of a column in the order of `indices`: into `out`, or a list of them if it is None.

        Raises UserError of a sample, or OrtflowError if processes end again and again.
        """
        size = max(1, -(-len(indices) // (_TASKS_PER_WORKER * max(1, self.count))))
        firsts = range(0, len(indices), size)
        row = 0 if out is None else out[:1].nbytes
        tasks = [
            (number, key, epoch, name, indices[first : first + size], first * row)
            for number, first in enumerate(firsts)
        ]
        with self._lock:
            if self._memory is None:
                self._memory = _nameless_memory()
            try:
                parts = self._run(tasks)
            except BaseException:
                self._stop()
                raise
            if out is None:
                return [sample for number in range(len(tasks)) for sample in parts[number]]
            flat = memoryview(out.reshape(-1).view(np.uint8).data)
            done = 0
            while done < len(flat):
                # One call reads at most 2 GiB (read(2)).
                count = os.preadv(self._memory, [flat[done:]], done)
                if not count:
                    raise OrtflowError(f"worker processes of the data wrote {done} of {len(flat)} bytes")
                done += count
        return []

    def close(self) -> None:
        """End the processes. Later reads are the rank's own."""
        with self._lock:
            self.count = 0
            self._stop()
            if self._memory is not None:
                os.close(self._memory)
                self._memory = None

    def _run(self, tasks: Sequence[tuple[Any, ...]]) -> dict[int, Any]:
        waiting = deque(range(len(tasks)))
        ended = dict.fromkeys(waiting, 0)
        results: dict[int, Any] = {}
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.output, selectors.EVENT_READ, worker)
            while len(results) < len(tasks):
                while len(self._workers) < min(self.count, len(tasks)):
                    worker = self._start()
                    self._workers.append(worker)
                    selector.register(worker.output, selectors.EVENT_READ, worker)
                # The worker with the fewest tasks first.
                for worker in sorted(self._workers, key=lambda candidate: len(candidate.tasks)):
                    while waiting and len(worker.tasks) < _QUEUED:
                        worker.tasks.append(waiting.popleft())
                        try:
                            send(worker.input, tasks[worker.tasks[-1]])
                        except OSError:  # it has ended, which its output shows below
                            break
                for event, _ in selector.select():
                    worker = event.data
                    try:
                        number, samples, fault = receive(worker.output)
                    except EOFError:
                        selector.unregister(worker.output)
                        self._replace(worker, tasks, waiting, ended)
                        continue
                    if fault is not None:
                        message, location, fix, by_user = fault
                        raise UserError(message, where=location, fix=fix) if by_user else OrtflowError(message)
                    worker.tasks.remove(number)
                    results[number] = samples
        return results

    def _replace(
        self, worker: _Worker, tasks: Sequence[tuple[Any, ...]], waiting: deque[int], ended: dict[int, int]
    ) -> None:
        """Take back the tasks of a worker that has ended. Raises OrtflowError if the first ended several workers."""
        code = worker.process.wait()
        self._workers.remove(worker)
        _close(worker)
        if worker.tasks:
            first = worker.tasks[0]
            ended[first] += 1
            if ended[first] >= _ATTEMPTS:
                ending = signal_name(-code) if code < 0 else f"exit code {code}"
                _, key, _, _, indices, _ = tasks[first]
                samples = ", ".join(map(str, indices[:8].tolist())) + (" and others" if len(indices) > 8 else "")
                raise OrtflowError(
                    f"{_ATTEMPTS} worker processes of the data ended ({ending}) while they made the samples {samples} "
                    f"of {self._paths[key]}"
                )
        waiting.extendleft(reversed(worker.tasks))

    def _start(self) -> _Worker:
        assert self._memory is not None
        # The rank ends its workers when it has saved; a signal for the whole process group must not.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            # Unbuffered: a reply in a buffer of this process would not wake the selector.
            process = start_module(
                "ortflow.workflow.data.worker", str(self._memory), bufsize=0, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, pass_fds=[self._memory],
                # numpy's OpenBLAS starts a thread for each core when it is imported, here in each worker.
                variables={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )  # fmt: skip
        except OSError as error:
            raise OrtflowError(f"a worker process of the data cannot be started: {error.strerror}") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        worker = _Worker(process)
        with contextlib.suppress(OSError):  # it has ended, which its output shows
            send(worker.input, (os.getcwd(), sys.path, self._recipes))
        return worker

    def _stop(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.wait()
            _close(worker)
        self._workers = []


def _close(worker: _Worker) -> None:
    worker.output.close()
    worker.input.close()


def _nameless_memory() -> int:
    if sys.platform == "linux":
        return os.memfd_create("ortflow-data", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
