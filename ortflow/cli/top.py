"""`ortflow top`: all runs of a folder, live."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ortflow.cli.runs import RUNS, RunsOption, runs_in
from ortflow.workflow.errors import UserError

if TYPE_CHECKING:
    from ortflow.launchers.status import RunStatus

PERIOD = 2.0
"""Seconds between two readings."""
SPARKS = 10
"""Characters of the trend of the loss."""
Order = Literal["state", "name", "left", "updated", "goodput"]
ORDERS = ("state", "name", "left", "updated", "goodput")


def top(
    root: Annotated[
        Path | None, typer.Argument(metavar="[ROOT]", help="Folder of runs (default: the runs folder).")
    ] = None,
    sort: Annotated[str, typer.Option("--sort", metavar="|".join(ORDERS), help="Order of the runs.")] = "state",
    once: Annotated[bool, typer.Option("--once", help="Print the table once.")] = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Show all runs, live: progress, time left, trend of the loss, restarts, goodput."""
    if sort not in ORDERS:
        raise UserError(f"there is no order {sort!r}", where="--sort", fix=f"there are: {', '.join(ORDERS)}")
    folder = root or runs
    if root is not None and not root.is_dir():
        raise UserError("is not a folder", where=str(root), fix="give a folder of runs")
    view = Overview(folder, sort)
    if once or not sys.stdout.isatty():
        width = None if not sys.stdout.isatty() else _columns()
        for line in view.lines(width):
            typer.echo(line)
        return
    _live(view)


class Overview:
    """The table of a folder's runs; goodput is read again for one run at a time, because that reads all its records."""

    def __init__(self, folder: Path, order: str) -> None:
        self._folder, self._order = folder, order
        self._goodputs: dict[str, float | None] = {}
        self._oldest: list[str] = []

    def lines(self, width: int | None, height: int | None = None) -> list[str]:
        """The table's lines, as many as fit."""
        from ortflow.cli.status import cut, fitted, table
        from ortflow.launchers.base import statuses

        runs = runs_in(self._folder)
        found = statuses(runs)
        now = time.time()
        self._read_goodputs(found, now, all_new=height is None)
        trends = {how.directory: _trend(Path(how.directory)) for how in found}
        ordered = sorted(found, key=_key(self._order, self._goodputs))
        if not ordered:
            return [f"no runs in {self._folder}"]
        rows = [
            HEAD,
            *(_row(how, trends.get(how.directory, ""), self._goodputs.get(how.directory), now) for how in ordered),
        ]
        lines = [cut(line, width) for line in table(fitted(rows, width, ("NAME",)))]
        lines += [cut(f"{Path(how.directory).name} waits: {how.waits}", width) for how in ordered if how.waits]
        return (
            lines
            if height is None or len(lines) <= height
            else [*lines[: height - 1], f"… {len(lines) - height + 1} more"]
        )

    def _read_goodputs(self, found: Sequence[RunStatus], now: float, *, all_new: bool) -> None:
        from ortflow.launchers.report.survey import survey
        from ortflow.workflow.rundir import RunDir

        fresh = [how for how in found if how.directory not in self._goodputs]
        active = [how for how in found if how.state.active and how not in fresh]
        active.sort(key=lambda how: self._oldest.index(how.directory) if how.directory in self._oldest else -1)
        for how in fresh if all_new else [*fresh[:5], *active[:1]]:
            try:
                self._goodputs[how.directory] = survey(
                    RunDir(Path(how.directory)), now, status=how, all_ranks=False
                ).account.goodput
            except OSError:
                self._goodputs[how.directory] = None
            self._oldest = [*(one for one in self._oldest if one != how.directory), how.directory]


HEAD = ("NAME", "STATE", "STEP", "LEFT", "LOSS", "TREND", "RESTARTS", "GOOD")


def _row(how: RunStatus, trend: str, goodput: float | None, now: float) -> tuple[str, ...]:
    from ortflow.launchers.lines import duration

    left = "-" if how.seconds_left is None else duration(how.seconds_left)
    if how.starts_at is not None and how.starts_at > now and how.state.value == "pending":
        left = f"in {duration(how.starts_at - now)}"
    return (
        Path(how.directory).name,
        how.state.value,
        f"{how.step}/{how.total_steps}" if how.total_steps else str(how.step),
        left,
        "-" if how.loss is None else f"{how.loss:.4g}",
        trend,
        str(max(0, how.attempts - 1)),
        "-" if goodput is None else f"{100 * goodput:.0f}%",
    )


def _key(order: str, goodputs: dict[str, float | None]) -> Callable[[RunStatus], tuple[object, ...]]:
    """The order of rows; runs that are active come first."""
    infinite = float("inf")
    keys: dict[str, Callable[[RunStatus], tuple[object, ...]]] = {
        "state": lambda how: (not how.state.active, -(how.time or 0.0)),
        "name": lambda how: (Path(how.directory).name,),
        "left": lambda how: (infinite if how.seconds_left is None else how.seconds_left,),
        "updated": lambda how: (-(how.time or 0.0),),
        "goodput": lambda how: (infinite if (value := goodputs.get(how.directory)) is None else value,),
    }
    return keys[order]


def _trend(root: Path) -> str:
    """The newest losses as a line of bars."""
    from ortflow.launchers.report.curves import sparkline
    from ortflow.launchers.tail import last_records
    from ortflow.workflow.rundir import RunDir

    records = last_records(RunDir(root).events(0))
    losses = [record["loss"] for record in records if record["event"] == "step" and record.get("loss") is not None]
    return sparkline(losses, SPARKS)


def _columns() -> int:
    import os

    return os.get_terminal_size(sys.stdout.fileno()).columns or 80


def _live(view: Overview) -> None:
    """Draw the table until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from ortflow.launchers.live import quiet_keys
    from ortflow.workflow.streams import plain

    console = Console(highlight=False)
    with quiet_keys(), Live(console=console, auto_refresh=False, screen=True) as live:
        try:
            while True:
                size = console.size
                lines = view.lines(size.width, size.height - 2)
                note = f"{time.strftime('%H:%M:%S')}  Ctrl-C ends; `ortflow logs NAME`, `ortflow report NAME`"
                live.update(Text("\n".join(plain(line) for line in [*lines, "", note[: size.width]])), refresh=True)
                time.sleep(PERIOD)
        except KeyboardInterrupt:
            return
