"""A terminal for tests: a command with a keyboard, and the contents of its screen.

Supports what Rich's live display prints: text, line ends, cursor up and home, erased lines, a full screen, colours.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from waits import PATIENCE

_PIECES = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|([\r\n])|([^\x00-\x1f])")


@dataclass
class Screen:
    """Lines of text; it never scrolls, so it is as long as what was printed."""

    width: int
    lines: list[str] = field(default_factory=lambda: [""])
    row: int = 0
    column: int = 0

    def feed(self, text: str) -> None:
        for number, command, move, letter in _PIECES.findall(text):
            if command == "A":
                self.row = max(0, self.row - int(number or 1))
            elif command == "H":
                self.row = self.column = 0
            elif command in ("h", "l") and number == "?1049":  # the other screen, which is empty
                self.lines, self.row, self.column = [""], 0, 0
            elif command == "K":
                self.lines[self.row] = "" if number == "2" else self.lines[self.row][: self.column]
            elif move == "\r":
                self.column = 0
            elif move == "\n":
                self._down()
            elif letter:
                self._put(letter)

    def _down(self) -> None:
        self.row += 1
        self.lines += [""] * (self.row + 1 - len(self.lines))

    def _put(self, letter: str) -> None:
        if self.column == self.width:
            self.column = 0
            self._down()
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + letter + line[self.column + 1 :]
        self.column += 1

    def __str__(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines).rstrip()


class Terminal:
    """A command that runs in a terminal of its own."""

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str], width: int = 90) -> None:
        self.screen = Screen(width)
        self.pid, self._keyboard = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
            os.chdir(folder)
            os.execvpe(command[0], [*command], {**environment, "COLUMNS": str(width), "LINES": "40", "TERM": "xterm"})

    def press(self, keys: bytes) -> None:
        os.write(self._keyboard, keys)

    def until(self, condition: Callable[[], bool], timeout: float = PATIENCE) -> None:
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, f"timed out:\n{self.screen}"
            self._read()

    def wait(self, timeout: float = PATIENCE) -> int:
        """Read to the end; the exit code."""
        end = time.monotonic() + timeout
        while self._read():
            assert time.monotonic() < end, f"timed out:\n{self.screen}"
        os.close(self._keyboard)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        """Close it, as when its window is closed."""
        os.close(self._keyboard)

    def _read(self) -> bool:
        if not select.select([self._keyboard], [], [], 0.1)[0]:
            return True
        try:
            data = os.read(self._keyboard, 1 << 16)
        except OSError:  # how a pseudo-terminal reports that its last writer is gone
            return False
        self.screen.feed(data.decode(errors="replace"))
        return bool(data)
