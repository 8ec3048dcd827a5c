"""Loader workers: they ignore the signals that ask the run to stop, and draw random numbers by the sample."""

from __future__ import annotations

import signal

from ortflow.program.stop_signals import STOP_SIGNALS, ignore


def loader_worker(worker: int = 0) -> None:
    """Ignore the stop signals in this process: `DataLoader(…, worker_init_fn=ortflow.program.loader_worker)`.

    A scheduler sends its signals to every process of a job. A worker that dies of one takes the training with it before
    it has saved. `Run.steps` does this by itself.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, ignore)
