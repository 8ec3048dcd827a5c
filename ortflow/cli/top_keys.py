"""The keyboard of `ortflow top`: single keys of a terminal, without waiting for Enter."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# In the mode for applications (DECCKM) the arrows send ESC O in place of ESC [ (console_codes(4)).
_KEYS = re.compile(rb"\x1b[\[O]([ABCDHF])|\x1b\[[\d;]*[~A-Za-z]|(\x1b)(?![\[O])|([ -~\r\n])")
_ARROWS = {b"A": "up", b"B": "down", b"C": "right", b"D": "left", b"H": "home", b"F": "end"}
_REST_SECONDS = 0.05
"""In which the rest of an arrow's bytes arrives, over ssh too; after it, an escape is the key Esc."""


def decoded(data: bytes) -> list[str]:
    """The keys that a terminal sent: `up`, `down`, `enter`, `escape` or a character; others are left out. Pure."""
    keys = []
    for arrow, escape, character in _KEYS.findall(data):
        if arrow:
            keys.append(_ARROWS[arrow])
        elif escape:
            keys.append("escape")
        elif character:
            keys.append("enter" if character in b"\r\n" else character.decode())
    return keys


class Keys:
    """Reads keys while it is open (`opened`)."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def wait(self, seconds: float) -> list[str]:
        """The keys that arrive first, within `seconds`. Raises EOFError when the terminal is gone."""
        if not select.select([self._descriptor], [], [], max(0.0, seconds))[0]:
            return []
        data = self._read()
        while data.endswith((b"\x1b", b"\x1b[", b"\x1bO")):
            if not select.select([self._descriptor], [], [], _REST_SECONDS)[0]:
                return [*decoded(data.rstrip(b"[O")[:-1]), "escape"]
            data += self._read()
        return decoded(data)

    def _read(self) -> bytes:
        try:
            data = os.read(self._descriptor, 1024)
        except OSError:  # how a pseudo-terminal reports that its other side is closed
            data = b""
        if not data:
            raise EOFError
        return data


@contextmanager
def opened() -> Iterator[Keys | None]:
    """The keyboard, read key by key and not echoed.

    None if standard input is not a terminal of this process's group.
    """
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
        foreground = os.tcgetpgrp(descriptor) == os.getpgrp()
    except (termios.error, ValueError, OSError, AttributeError):  # not a terminal, or closed
        foreground = False
    if not foreground:  # the kernel stops a background job that changes the terminal
        yield None
        return
    flags = [*before]
    flags[3] &= ~(termios.ICANON | termios.ECHO)  # Ctrl-C stays a signal
    termios.tcsetattr(descriptor, termios.TCSADRAIN, flags)
    try:
        yield Keys(descriptor)
    finally:
        # A process that is in the background by now would be stopped, unless it blocks SIGTTOU (POSIX, tcsetattr).
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
        with suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
