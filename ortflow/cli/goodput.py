"""`ortflow goodput`: where the time of runs went."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ortflow.cli.runs import RUNS, JsonOption, RunsOption, find_run, is_run, print_json, runs_in

if TYPE_CHECKING:
    from ortflow.launchers.report.causes import Cause
    from ortflow.launchers.report.goodput import Sum
    from ortflow.launchers.report.survey import Survey
    from ortflow.workflow.run.rundir import RunDir


def goodput(
    where: Annotated[
        str | None, typer.Argument(metavar="[RUN|ROOT]", help="A run, or a folder of runs (default: the runs folder).")
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="PERIOD", help="Only the newest time, such as 12h, 7d or 4w.")
    ] = None,
    as_json: JsonOption = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Print where the time of a run, or of all runs, went."""
    from ortflow.launchers.report.goodput import Sum, by_user, by_week, seconds_of
    from ortflow.launchers.report.goodput import since as totals_since
    from ortflow.launchers.report.timeline import MICRO

    now = time.time()
    begin = None if since is None else round((now - seconds_of(since)) * MICRO)
    run_surveys, unreadable = surveys(runs_of(where, runs), now)
    run_totals = [(run, totals_since(run.account, begin)) for run in run_surveys]
    total = Sum()
    for _, totals in run_totals:
        total.add(totals)
    users, weeks = by_user(run_totals), by_week(run_surveys, begin)
    if as_json:
        print_json(_as_json(run_totals, total, users, weeks, unreadable))
        return
    if not run_surveys:
        typer.echo(f"no runs in {where or runs}")
    elif len(run_surveys) == 1:
        _print_one(run_surveys[0], run_totals[0][1])
    else:
        rows = [(run.status.name, run.status.state.value, *_row(totals, run)) for run, totals in run_totals]
        _print_rows([("RUN", "STATE", *HEAD), *rows, ("all", "", *_row(total.totals))])
        if len(users) > 1:
            _print_rows([("USER", "RUNS", *HEAD), *((n, str(s.runs), *_row(s.totals)) for n, s in users.items())])
        if len(weeks) > 1:
            _print_rows([("WEEK", "RUNS", *HEAD), *((n, str(s.runs), *_row(s.totals)) for n, s in weeks.items())])
    for message in unreadable:
        typer.echo(f"warning: {message}", err=True)


HEAD = ("WALL", "GOODPUT", "LARGEST LOSSES")


def runs_of(run_or_root: str | None, runs: Path) -> list[RunDir]:
    """The run, or the runs of the folder, that the command line names; raises UserError if there is neither."""
    from ortflow.workflow.run.rundir import RunDir

    if run_or_root is None:
        return runs_in(runs)
    folder = Path(os.path.abspath(run_or_root))
    # A folder of runs may have a separate run file, which is not that of a run.
    if folder.is_dir() and not RunDir(folder).is_ours and not is_run(RunDir(runs / run_or_root)):
        return runs_in(folder)
    return [find_run(run_or_root, runs)]


def surveys(runs: Sequence[RunDir], now: float) -> tuple[list[Survey], list[str]]:
    """What the runs' records say, and messages about runs that cannot be read."""
    from ortflow.launchers.base import statuses
    from ortflow.launchers.report.survey import survey

    run_surveys, messages = [], []
    for run, status in zip(runs, statuses(runs), strict=True):
        try:
            run_surveys.append(survey(run, now, status=status))
        except OSError as error:
            messages.append(f"{error.filename or run.root}: {error.strerror}")
    return run_surveys, messages


def _as_json(
    run_totals: Sequence[tuple[Survey, dict[Cause, int]]],
    total: Sum,
    users: Mapping[str, Sum],
    weeks: Mapping[str, Sum],
    unreadable: Sequence[str],
) -> dict[str, Any]:
    from ortflow.launchers.report.goodput import Sum

    rows = []
    for run, totals in run_totals:
        run_sum = Sum()
        run_sum.add(totals)
        rows.append({**run.to_json(), **run_sum.to_json(), "runs": 1})
    return {
        "runs": rows,
        "total": total.to_json(),
        "users": {name: run_sum.to_json() for name, run_sum in users.items()},
        "weeks": {name: run_sum.to_json() for name, run_sum in weeks.items()},
        "unreadable": list(unreadable),
    }


def _print_one(run: Survey, totals: Mapping[Cause, int]) -> None:
    """A table of causes, and what the numbers do not say."""
    from ortflow.launchers.report.causes import MEANINGS
    from ortflow.launchers.report.timeline import MICRO
    from ortflow.launchers.view.lines import counted, duration

    wall = sum(totals.values())
    typer.echo(
        f"{run.status.name}: {run.status.state.value}, goodput {percent(totals, run)} of {duration(wall / MICRO)}"
    )
    rows = [
        (cause.label, duration(value / MICRO), f"{100 * value / wall:.1f}%", bar(value / wall), MEANINGS[cause])
        for cause, value in totals.items()
        if value
    ]
    if rows:
        _print_rows([("CAUSE", "TIME", "SHARE", "", ""), *rows])
    if run.account.stopped:
        typer.echo(f"not counted: {duration(run.account.stopped / MICRO)} in which the run was stopped")
    if run.restarts:
        lost = sum(restart.steps_lost for restart in run.restarts)
        typer.echo(f"{counted(len(run.restarts), 'disruption')}, {counted(lost, 'step')} run again")
    if run.straggler is not None:
        typer.echo(run.straggler.sentence())
    for note in run.account.notes:
        typer.echo(f"note: {note}")


def _row(totals: Mapping[Cause, int], run: Survey | None = None) -> tuple[str, str, str]:
    from ortflow.launchers.report.causes import Cause
    from ortflow.launchers.report.timeline import MICRO
    from ortflow.launchers.view.lines import duration

    wall = sum(totals.values())
    losses = sorted(((value, cause) for cause, value in totals.items() if cause is not Cause.STEP), reverse=True)
    largest = ", ".join(f"{cause.label} {100 * value / wall:.0f}%" for value, cause in losses[:2] if value)
    return duration(wall / MICRO), percent(totals, run), largest


def percent(totals: Mapping[Cause, int], run: Survey | None = None) -> str:
    """The goodput, for people; of a `run`, `unknown` if it logs no steps."""
    from ortflow.launchers.report.causes import Cause

    if run is not None and not run.account.measured:
        return "unknown"
    wall = sum(totals.values())
    return f"{100 * totals[Cause.STEP] / wall:.1f}%" if wall else "-"


def bar(share: float, width: int = 20) -> str:
    """A share as a bar of at most `width` characters."""
    eighths = round(share * width * 8)
    return "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")


def _print_rows(rows: Sequence[tuple[str, ...]]) -> None:
    from ortflow.cli.status import print_table

    print_table(rows, (rows[0][-1],))
