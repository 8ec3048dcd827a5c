"""A thread for each sink, with a bounded queue: none waits for another, and none for ever."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from ortflow.workflow.sinks.protocol import Run, Sink, State

LONGEST = 300
"""Characters of a package's message that are shown."""
MOST = 10_000
"""Steps that may wait for a sink; further ones are left out, and counted."""


class Delivery:
    """A sink in a separate thread, which `warn` hears of by one sentence for each kind of fault.

    Parameters
    ----------
    name
        The sink, for messages.
    make
        Makes the sink, in the thread: to import its package may take seconds.
    run
        The run.
    warn
        Called from any thread.
    """

    def __init__(self, name: str, make: Callable[[], Sink], run: Run, warn: Callable[[str], None]) -> None:
        self._name, self._make, self._run, self._warn = name, make, run, warn
        self._queue: queue.Queue[tuple[int, float, Mapping[str, float]] | State] = queue.Queue(MOST)
        self._left_out = 0
        self._ended = threading.Event()
        self._failed = False
        # As a daemon, so that a sink which hangs does not keep the process from ending.
        threading.Thread(target=self._work, name=f"sink {name}", daemon=True).start()

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Let the thread send a step's metrics; never waits."""
        try:
            self._queue.put_nowait((step, at, values))
        except queue.Full:
            if self._left_out == 0 and not self._failed:
                self._warn(f"sink {self._name} does not keep up: steps are left out there; the record has them")
            self._left_out += 1

    def end(self, state: State, seconds: float) -> None:
        """Send what waits, and the end; waits at most `seconds`."""
        last = time.monotonic() + seconds
        with suppress(queue.Full):
            self._queue.put(state, timeout=seconds)
            self._ended.wait(max(0.0, last - time.monotonic()))
        if not self._ended.is_set():
            self._warn(f"sink {self._name} was not done after {seconds:g} s: its last steps may be missing there")

    def _work(self) -> None:
        try:
            sink = self._make()
            sink.begin(self._run)
        except Exception as error:  # noqa: BLE001 - a package's, of whatever kind
            self._fail(error)
            sink = None
        while not isinstance(item := self._queue.get(), str):
            if sink is None:
                continue
            try:
                sink.write(*item)
                self._failed = False
            except Exception as error:  # noqa: BLE001
                self._fail(error)
        try:
            if sink is not None:
                sink.end(item)
        except Exception as error:  # noqa: BLE001
            self._fail(error)
        self._ended.set()

    def _fail(self, error: Exception) -> None:
        """Say it once until the sink works again."""
        if not self._failed:
            reason = (str(error) or type(error).__name__).partition("\n")[0][:LONGEST]
            self._warn(f"sink {self._name} fails: {reason}")
        self._failed = True
