"""Signals that ask a program to stop. Handlers that the program had installed before still run.

Python runs a handler only between two instructions of the main thread, which may be inside a collective for minutes.
`set_wakeup_fd` makes C code write the number to a pipe at once, which the connection's thread reads. It is left alone
if the program has set one itself, as asyncio does.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Not SIGINT: Ctrl-C ends a program that runs without ortflow, and ortflow's own command handles it otherwise."""


class StopSignals:
    """Calls `ask` with the name of the first stop signal; `pipe` is readable when one has arrived, or -1."""

    def __init__(self, ask: Callable[[str], None]) -> None:
        self._ask_once = ask
        self._arrived = False
        self._previous: dict[int, Any] = {}
        self.pipe = -1
        self._masks = threading.local()

    def install(self) -> None:
        """Install the handlers, in the main thread; elsewhere Python does not allow it, and nothing happens."""
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)

    def open_pipe(self) -> None:
        """Make the pipe, after `install`, for a thread that reads it."""
        if not self._previous:
            return
        self.pipe, writable = os.pipe()
        os.set_blocking(self.pipe, False)
        # set_wakeup_fd refuses a descriptor that blocks.
        os.set_blocking(writable, False)
        previous = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        if previous != -1:
            signal.set_wakeup_fd(previous)
            os.close(writable)
            os.close(self.pipe)
            self.pipe = -1

    def read(self) -> None:
        """Handle what the pipe has, in the connection's thread."""
        try:
            numbers = os.read(self.pipe, 4096)
        except BlockingIOError:
            return
        for number in set(numbers) & set(STOP_SIGNALS):
            self._ask(signal.Signals(number).name)

    def _ask(self, name: str) -> None:
        if not self._arrived:
            self._arrived = True
            self._ask_once(name)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._ask(signal.Signals(number).name)
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)

    def hold(self) -> None:
        """Before a fork: keep the signals waiting in the kernel until `release`."""
        # Python forgets those that reach a child before its handlers are restored, and then nothing would end it.
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def release(self) -> None:
        """After a fork, in the parent and, behind `remove_in_child`, in the child."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    def remove_in_child(self) -> None:
        """In a forked child: restore the handlers, so that it can be terminated and saves nothing."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle and previous is not None:  # None: installed by C code
                # SIGUSR1 and SIGUSR2 would kill, and Slurm's early signal goes to every process of a step.
                fatal = previous == signal.SIG_DFL and number != signal.SIGTERM
                signal.signal(number, ignore if fatal else previous)
        if self.pipe != -1:
            signal.set_wakeup_fd(-1)


def ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing. Unlike SIG_IGN, a handler is not inherited by the programs that a process starts."""
