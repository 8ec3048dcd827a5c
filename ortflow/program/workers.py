"""Loader workers: they ignore the signals that ask the run to stop, and draw random numbers by the sample.

Runs inside the workers. A worker's generators cannot be saved with a checkpoint, so with `Sampler` each sample is read
with generators seeded by its own key: the same in another worker, on another rank, after a restart.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from ortflow.program.stop_signals import STOP_SIGNALS, ignore


def loader_worker(worker: int = 0) -> None:
    """Ignore the stop signals in this process: `DataLoader(…, worker_init_fn=ortflow.program.loader_worker)`.

    A scheduler sends its signals to every process of a job. A worker that dies of one takes the training with it before
    it has saved. `Run.steps` does this by itself.

    The main process ends its workers by SIGTERM, too, and waits for them when the interpreter exits. Only a waiting
    thread learns who has sent a signal, so the signals are blocked and such a thread takes them. Programs that a worker
    starts inherit the mask: end them by SIGKILL.
    """
    # macOS has no sigwaitinfo, and no scheduler: there SIGTERM stays the main process's.
    wait_for_signal = getattr(signal, "sigwaitinfo", None)
    for number in STOP_SIGNALS:
        if wait_for_signal is not None or number != signal.SIGTERM:
            signal.signal(number, ignore)
    if wait_for_signal is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        threading.Thread(target=_take_signals, args=(wait_for_signal,), name="ortflow signals", daemon=True).start()


def _take_signals(wait_for_signal: Callable[[Iterable[int]], Any]) -> None:
    parent = multiprocessing.parent_process()
    while True:
        signals = wait_for_signal(STOP_SIGNALS)
        if signals.si_signo == signal.SIGTERM and parent is not None and signals.si_pid == parent.pid:
            os._exit(0)  # as torch's own handler in workers does


class WorkerStart:
    """A loader's `worker_init_fn`: the user's, and what a run needs. Picklable, for workers that are spawned."""

    def __init__(self, original: Callable[[int], Any] | None, *, keyed: bool) -> None:
        self._original, self._keyed = original, keyed

    def __call__(self, worker: int) -> None:
        """Prepare the worker."""
        loader_worker(worker)
        if self._original is not None:
            self._original(worker)
        if self._keyed:
            from torch.utils.data import get_worker_info

            seed_by_sample(get_worker_info().dataset)


def seed_by_sample(dataset: Any) -> None:
    """Have this process's copy of a data set read each sample with generators seeded by its key."""
    together = getattr(dataset, "__getitems__", None)

    def read(samples: list[Any]) -> Any:
        if callable(together):
            _seed(samples[0].key)
            return together([int(sample) for sample in samples])
        return [_read(dataset, sample) for sample in samples]

    # A list, or another built-in type, takes no attribute and draws no random numbers.
    with contextlib.suppress(AttributeError, TypeError):
        dataset.__getitems__ = read  # torch's fetcher looks for it first


def _read(dataset: Any, sample: Any) -> Any:
    _seed(sample.key)
    return dataset[int(sample)]


def _seed(key: int) -> None:
    random.seed(key)
    if (numpy := sys.modules.get("numpy")) is not None:
        # numpy's legacy seed has 32 bits.
        numpy.random.seed(key & 0xFFFFFFFF)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(key >> 1)
