"""The live view on a terminal: a panel at the bottom, with notable lines scrolling above it.

Has no thread, because the supervisor forks: the supervisor's ticks redraw.
"""

from __future__ import annotations

import os
import signal
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ortflow.launchers.view.lines import duration, format_evaluation, format_speeds, number
from ortflow.launchers.view.plain import take_in
from ortflow.launchers.view.progress import Progress
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.streams import plain, terminal_output

REDRAW = 0.25


class LiveView:
    """A context manager: the panel is shown while it is entered."""

    def __init__(self, run: RunDir, name: str, console: Console | None = None) -> None:
        self.progress = Progress()
        self._run, self._name = run, name
        self._attempt = 0
        self._console = console or Console(highlight=False, file=terminal_output())
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._next_draw = 0.0
        self._entered = ExitStack()

    def __enter__(self) -> LiveView:
        self._entered.enter_context(quiet_keys())
        self._entered.enter_context(self._live)
        return self

    def __exit__(self, *exception: object) -> None:
        self._entered.close()

    def attempt(self, number: int) -> None:
        """Show the number of attempts."""
        self._attempt = number

    def record(self, record: Mapping[str, Any]) -> None:
        """Show an event: steps update the panel, other notable events get a line above it."""
        line = take_in(record, self.progress, self._run, 1)
        if line is not None and record.get("event") != "step":
            self.message(line)

    def message(self, text: str) -> None:
        """Print a line above the panel; the terminal wraps a long one, so that paths and names in it stay whole."""
        self._console.print(Text(plain(f"{time.strftime('%H:%M:%S')}  {text}"), style=_style(text)), soft_wrap=True)

    def tick(self) -> None:
        """Redraw, four times a second."""
        moment = time.monotonic()
        if moment >= self._next_draw:
            self._next_draw = moment + REDRAW
            self._live.update(panel(self._name, self.progress, self._attempt, time.time()), refresh=True)


@contextmanager
def quiet_keys() -> Iterator[None]:
    """Keep the terminal from printing ^C, which would move the panel down and leave a part of it behind."""
    try:
        before = termios.tcgetattr(sys.stdin)
        is_foreground = os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (termios.error, ValueError, OSError):  # not a terminal, or closed
        is_foreground = False
    if not is_foreground:  # the kernel stops a background job that changes the terminal
        yield
        return
    flags = [*before]
    flags[3] &= ~termios.ECHOCTL
    with suppress(termios.error):  # the terminal is gone
        termios.tcsetattr(sys.stdin, termios.TCSANOW, flags)
    try:
        yield
    finally:
        # A process that is in the background by now would be stopped, unless it blocks SIGTTOU (POSIX, tcsetattr).
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
        with suppress(termios.error):
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@dataclass(frozen=True)
class Parts:
    """Numbers with their names, as many on a line as fit: Rich would break lines between a number and its name."""

    parts: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = ""
        for part in self.parts:
            longer = f"{line}  {part}" if line else part
            if line and cell_len(longer) > options.max_width:
                yield Text(line)
                longer = part
            line = longer
        yield Text(line)


def panel(name: str, progress: Progress, attempt: int, now: float) -> Panel:
    """What the panel shows. Pure."""
    rows = Table.grid(padding=(0, 2), expand=True)
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(ratio=1)
    if progress.total_steps:
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(ProgressBar(progress.total_steps, progress.step), f"{progress.step}/{progress.total_steps}")
        rows.add_row("steps", bar)
    rows.add_row("doing", _doing(progress, now))
    if progress.started is not None:
        seconds_left = progress.seconds_left if progress.phase == "train" else None
        rows.add_row(
            "time",
            duration(max(0.0, now - progress.started)) + (f"  {duration(seconds_left)} left" if seconds_left else ""),
        )
    if progress.loss is not None:
        rows.add_row("loss", Parts(_format_step(progress)))
    if speeds := format_speeds(progress):
        rows.add_row("speed", Parts(speeds))
    if progress.evaluation_step is not None:
        evaluation = format_evaluation(progress.evaluation).split("  ")
        rows.add_row("evaluation", Parts([*evaluation, f"(step {progress.evaluation_step})"]))
    if progress.checkpoint is not None or progress.saving:
        saved = "none yet" if progress.checkpoint is None else f"step {progress.checkpoint}"
        rows.add_row("checkpoint", saved + ("  saving" if progress.saving else ""))
    if attempt:
        rows.add_row("restarts", str(attempt))
    return Panel(rows, title=name, title_align="left", border_style="dim")


def _doing(progress: Progress, now: float) -> str:
    doing = plain(progress.phase or "starting")
    if progress.time is not None and now - progress.time > 10:
        doing += f"  no event for {duration(now - progress.time)}"
    return doing


def _format_step(progress: Progress) -> list[str]:
    parts = [number(progress.loss)]
    if progress.lr is not None:
        parts.append(f"lr {progress.lr:.3g}")
    if progress.skipped:
        parts.append(f"{progress.skipped} steps skipped")
    return parts


def _style(text: str) -> str:
    return "yellow" if text.startswith("warning") else ""
