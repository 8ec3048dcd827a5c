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
    from ortflow.cli.top_screen import live

    live(view)


class Overview:
    """The table of a folder's runs; goodput is read again for one run at a time, because that reads all its records."""

    def __init__(self, folder: Path, order: str) -> None:
        self._folder, self.order = folder, order
        self._goodputs: dict[str, float | None] = {}
        self._oldest: list[str] = []
        self._runs: list[RunStatus] = []
        self._trends: dict[str, str] = {}
        self._now = 0.0
        self.selected: str | None = None
        """The directory of the run that keys are for."""
        self.bright: int | None = None
        """Its line in what was drawn last."""

    def lines(self, width: int | None, height: int | None = None) -> list[str]:
        """Read all runs, and draw their table."""
        self.read(all_new=height is None)
        return self.drawn(width, height)

    def read(self, *, all_new: bool = False) -> None:
        """Read the state of all runs; goodput of those that are new of a few at a time, or of all."""
        from ortflow.launchers.base import statuses

        self._runs = list(statuses(runs_in(self._folder)))
        self._now = time.time()
        self._read_goodputs(self._runs, self._now, all_new=all_new)
        self._trends = {run_status.directory: _trend(Path(run_status.directory)) for run_status in self._runs}
        if self.selected not in {run_status.directory for run_status in self._runs}:
            self.selected = next((run_status.directory for run_status in self._ordered()), None)

    def move(self, by: int) -> None:
        """Select a run further up or down."""
        places = [run_status.directory for run_status in self._ordered()]
        if self.selected in places:
            self.selected = places[min(len(places) - 1, max(0, places.index(self.selected) + by))]

    def next_order(self) -> None:
        """Sort by the next of the orders."""
        self.order = ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)]

    def _ordered(self) -> list[RunStatus]:
        return sorted(self._runs, key=_key(self.order, self._goodputs))

    def drawn(self, width: int | None, height: int | None = None) -> list[str]:
        """The table's lines: as many as fit, with the selected run among them."""
        from ortflow.cli.status import cut, fitted, table

        ordered = self._ordered()
        self.bright = None
        if not ordered:
            return [f"no runs in {self._folder}"]
        rows = [
            HEAD,
            *(
                _row(
                    run_status,
                    self._trends.get(run_status.directory, ""),
                    self._goodputs.get(run_status.directory),
                    self._now,
                )
                for run_status in ordered
            ),
        ]
        head, *lines = (cut(line, width) for line in table(fitted(rows, width, ("NAME",))))
        place = next((place for place, run_status in enumerate(ordered) if run_status.directory == self.selected), 0)
        waiting = [
            cut(f"{Path(run_status.directory).name} waits: {run_status.waits}", width)
            for run_status in ordered
            if run_status.waits
        ]
        if height is None or 1 + len(lines) + len(waiting) <= height:
            self.bright = 1 + place
            return [head, *lines, *waiting]
        room = max(1, height - 2)
        first = max(0, place - room + 1)
        self.bright = 1 + place - first
        shown = [*lines, *waiting][first : first + room]
        return [head, *shown, f"… {len(lines) + len(waiting) - len(shown)} more"]

    def _read_goodputs(self, run_statuses: Sequence[RunStatus], now: float, *, all_new: bool) -> None:
        from ortflow.launchers.report.survey import survey
        from ortflow.workflow.run.rundir import RunDir

        fresh = [run_status for run_status in run_statuses if run_status.directory not in self._goodputs]
        active = [run_status for run_status in run_statuses if run_status.state.active and run_status not in fresh]
        active.sort(
            key=lambda run_status: (
                self._oldest.index(run_status.directory) if run_status.directory in self._oldest else -1
            )
        )
        for run_status in fresh if all_new else [*fresh[:5], *active[:1]]:
            try:
                self._goodputs[run_status.directory] = survey(
                    RunDir(Path(run_status.directory)), now, status=run_status, all_ranks=False
                ).account.goodput
            except OSError:
                self._goodputs[run_status.directory] = None
            self._oldest = [
                *(folder for folder in self._oldest if folder != run_status.directory),
                run_status.directory,
            ]


HEAD = ("NAME", "STATE", "STEP", "LEFT", "LOSS", "TREND", "RESTARTS", "GOOD")


def _row(run_status: RunStatus, trend: str, goodput: float | None, now: float) -> tuple[str, ...]:
    from ortflow.launchers.view.lines import duration

    seconds_left = "-" if run_status.seconds_left is None else duration(run_status.seconds_left)
    if run_status.starts_at is not None and run_status.starts_at > now and run_status.state.value == "pending":
        seconds_left = f"in {duration(run_status.starts_at - now)}"
    return (
        Path(run_status.directory).name,
        run_status.state.value,
        f"{run_status.step}/{run_status.total_steps}" if run_status.total_steps else str(run_status.step),
        seconds_left,
        "-" if run_status.loss is None else f"{run_status.loss:.4g}",
        trend,
        str(max(0, run_status.attempts - 1)),
        "-" if goodput is None else f"{100 * goodput:.0f}%",
    )


def _key(order: str, goodputs: dict[str, float | None]) -> Callable[[RunStatus], tuple[object, ...]]:
    """The order of rows; runs that are active come first."""
    infinite = float("inf")
    keys: dict[str, Callable[[RunStatus], tuple[object, ...]]] = {
        "state": lambda run_status: (not run_status.state.active, -(run_status.time or 0.0)),
        "name": lambda run_status: (Path(run_status.directory).name,),
        "left": lambda run_status: (infinite if run_status.seconds_left is None else run_status.seconds_left,),
        "updated": lambda run_status: (-(run_status.time or 0.0),),
        "goodput": lambda run_status: (infinite if (value := goodputs.get(run_status.directory)) is None else value,),
    }
    return keys[order]


def _trend(root: Path) -> str:
    """The newest losses as a line of bars."""
    from ortflow.launchers.attempts.tail import last_records
    from ortflow.launchers.report.curves import sparkline
    from ortflow.workflow.run.rundir import RunDir

    records = last_records(RunDir(root).events(0))
    losses = [record["loss"] for record in records if record["event"] == "step" and record.get("loss") is not None]
    return sparkline(losses, SPARKS)


def _columns() -> int:
    import os

    # A terminal whose size nobody has set, such as a new pseudo-terminal, has 0 columns.
    return os.get_terminal_size(sys.stdout.fileno()).columns or 80
