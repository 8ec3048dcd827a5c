"""`ortflow status` and `ortflow list`: how runs are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ortflow.cli.runs import RUNS, JsonOption, RunsOption, complete_run, find_run, print_json, runs_in
from ortflow.workflow.errors import UserError

if TYPE_CHECKING:
    from ortflow.launchers.status import RunStatus


def status(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help="Name or directory; the newest run if not given.", autocompletion=complete_run
        ),
    ] = None,
    as_json: JsonOption = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Print how a run is."""
    from ortflow.launchers.base import launcher_of

    if run is None:
        known = runs_in(runs)
        if not known:
            raise UserError(f"there is no run in {runs}", fix="give its directory, or --runs-dir")
        found = max(known, key=lambda one: one.attempts.stat().st_mtime if one.attempts.exists() else 0.0)
    else:
        found = find_run(run, runs)
    how = launcher_of(found).status(found)
    if as_json:
        print_json(how.to_json())
        return
    for key, value in describe(how, time.time()):
        typer.echo(f"{key:<12}{value}")


def list_runs(as_json: JsonOption = False, runs: RunsOption = Path(RUNS)) -> None:
    """List the runs of the runs folder."""
    from ortflow.launchers.base import launcher_of

    found = [launcher_of(run).status(run) for run in runs_in(runs)]
    if as_json:
        print_json([how.to_json() for how in found])
        return
    if not found:
        typer.echo(f"no runs in {runs}")
        return
    rows = [("NAME", "STATE", "STEP", "LOSS", "HEARD OF")]
    rows += [
        (Path(how.directory).name, how.state.value, _step(how), _number(how.loss), _ago(how.time, time.time()))
        for how in found
    ]
    for text in table(rows):
        typer.echo(text)


def describe(how: RunStatus, now: float) -> list[tuple[str, str]]:
    """A status as rows for people; what is not known has no row. Pure."""
    from ortflow.launchers.lines import duration, evaluation_words

    rows = [("run", how.name), ("directory", how.directory), ("state", how.state.value)]
    if how.phase is not None:
        rows.append(("doing", how.phase))
    rows.append(("step", _step(how)))
    if how.loss is not None:
        rows.append(("loss", _number(how.loss)))
    if how.evaluation:
        rows.append(("evaluation", evaluation_words(how.evaluation)))
    if how.seconds_left is not None:
        rows.append(("left", duration(how.seconds_left)))
    if how.checkpoint is not None:
        rows.append(("checkpoint", f"step {how.checkpoint}"))
    rows.append(("attempts", f"{how.attempts} ({how.failures} failures, {how.preemptions} preemptions count)"))
    if how.cause is not None:
        rows.append(("last end", how.cause))
    if how.exported is not None:
        rows.append(("exported", how.exported))
    if how.pid is not None:
        rows.append(("launcher", f"{how.launcher or 'local'}, process {how.pid} on {how.host}"))
    rows.append(("heard of", _ago(how.time, now)))
    return rows


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines, their columns aligned. Pure."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _step(how: RunStatus) -> str:
    return f"{how.step}/{how.total_steps}" if how.total_steps else str(how.step)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _ago(moment: float | None, now: float) -> str:
    from ortflow.launchers.lines import duration

    return "-" if moment is None else f"{duration(max(0.0, now - moment))} ago"
