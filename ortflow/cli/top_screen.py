"""The screen of `ortflow top` in a terminal: the table, the log of a run, and what keys do."""

from __future__ import annotations

import signal
import subprocess
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ortflow.cli.top_keys import Keys, opened

if TYPE_CHECKING:
    from rich.text import Text

    from ortflow.cli.top import Overview

PERIOD = 2.0
"""Seconds between two readings."""
KEYS = "↑↓ select  s sort  l log  r report  q quit"
LOG_KEYS = "l table  q quit"


@dataclass
class Screen:
    """What is shown, and what a key changes."""

    view: Overview
    log: bool = False
    """The selected run's log is shown in place of the table."""
    ended: bool = False
    note: str = ""
    """The end of the last report."""
    _reports: list[tuple[str, subprocess.Popen[bytes]]] = field(default_factory=list)

    def press(self, key: str) -> None:
        """Carry out a key; one without a meaning only removes the note."""
        self.note = ""
        if key == "q":
            self.ended = True
        elif self.log:
            self.log = key not in ("l", "escape", "enter")
        elif key in ("up", "down", "k", "j"):
            self.view.move(-1 if key in ("up", "k") else 1)
        elif key == "s":
            self.view.next_order()
        elif key in ("l", "enter"):
            self.log = self.view.selected is not None
        elif key == "r" and self.view.selected is not None:
            self._report(Path(self.view.selected))

    def _report(self, run: Path) -> None:
        """Write the page in a process of its own: that of a long run takes seconds, in which the table stays alive."""
        from ortflow.workflow.system.module_process import start_module

        command = ("ortflow", "report", str(run.absolute()), "--output", str(Path(f"{run.name}.html").absolute()))
        process = start_module(
            *command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            # The terminal sends a Ctrl-C, which ends the table, to its whole foreground process group.
            start_new_session=True,
        )
        self._reports.append((run.name, process))
        self.note = f"writing {run.name}.html"

    def look(self) -> None:
        """Note reports that have ended."""
        for name, process in [*self._reports]:
            if process.poll() is not None:
                _, error = process.communicate()
                lines = error.decode(errors="replace").split("\n")
                self.note = f"wrote {name}.html" if process.returncode == 0 else lines[0]
                self._reports.remove((name, process))

    def drawn(self, width: int, height: int, *, keys: bool) -> Text:
        """The whole screen."""
        from rich.text import Text

        from ortflow.cli.status import cut
        from ortflow.workflow.system.streams import plain

        room = height - 2
        if self.log and self.view.selected is not None:
            lines, bright = _log(Path(self.view.selected), room), None
        else:
            lines, bright = self.view.drawn(width, room), self.view.bright if keys else None
        clock = time.strftime("%H:%M:%S")
        hint = "Ctrl-C ends; `ortflow logs NAME`, `ortflow report NAME`"
        if keys:
            hint = LOG_KEYS if self.log else f"{KEYS}  by {self.view.order}"
        text = Text(no_wrap=True, overflow="crop")
        for place, line in enumerate([*lines, "", f"{clock}  {self.note or hint}"]):
            shown = cut(plain(line), width)
            text.append("\n" if place else "")
            text.append(shown.ljust(width) if place == bright else shown, style="reverse" if place == bright else "")
        return text


def _log(run: Path, lines: int) -> list[str]:
    """The end of rank 0's log."""
    from ortflow.launchers.base import launcher_of
    from ortflow.workflow.errors import OrtflowError
    from ortflow.workflow.run.rundir import RunDir

    try:
        run_dir = RunDir(run)
        newest = deque(launcher_of(run_dir).logs(run_dir, attempt=None, rank=0, follow=False), maxlen=max(1, lines - 1))
    except (OrtflowError, OSError) as error:
        newest = deque(str(error).split("\n"))
    return [f"log of {run.name}, rank 0", *newest]


def live(view: Overview) -> None:
    """Draw until Ctrl-C or q; without a keyboard, until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    from ortflow.launchers.view.live import quiet_keys
    from ortflow.workflow.system.streams import terminal_output

    console = Console(highlight=False, file=terminal_output())
    screen = Screen(view)
    # Python's default ends the process at once, and leaves the terminal without echo and cursor.
    signal.signal(signal.SIGTERM, _leave)
    with (
        suppress(KeyboardInterrupt, EOFError),
        quiet_keys(),
        opened() as keyboard,
        Live(console=console, auto_refresh=False, screen=True) as shown,
    ):
        while not screen.ended:
            view.read()
            until = time.monotonic() + PERIOD
            while not screen.ended and (seconds_left := until - time.monotonic()) > 0:
                screen.look()
                size = console.size
                shown.update(screen.drawn(size.width, size.height, keys=keyboard is not None), refresh=True)
                for key in _keys(keyboard, seconds_left):
                    screen.press(key)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _keys(keyboard: Keys | None, seconds: float) -> list[str]:
    """The keys of the next time; none, after that time, without a keyboard."""
    if keyboard is None:
        time.sleep(seconds)
        return []
    return keyboard.wait(seconds)
