"""`ortflow report`: a page about a run, its numbers, and both while it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ortflow.cli.runs import RUNS, JsonOption, RunsOption, complete_run, find_run, print_json
from ortflow.cli.sweep import SweepOption
from ortflow.workflow.errors import UserError

if TYPE_CHECKING:
    from ortflow.cli.sweep_table import Results
    from ortflow.launchers.report.survey import Survey
    from ortflow.workflow.rundir import RunDir

REFRESH = 5
"""Seconds between two loads of a served page."""


def report(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Name or directory of the run.", autocompletion=complete_run)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where the page is written (default: RUN.html)."),
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option("--compare", metavar="RUN", help="Draw the curves of this run, too; may be repeated."),
    ] = None,
    sweep: SweepOption = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page on this machine instead, and make it again at each load.")
    ] = False,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="With --serve: the port; 0 takes a free one.")
    ] = 8400,
    as_json: JsonOption = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Write a page about a run: curves, time by cause, restarts."""
    if (run is None) == (sweep is None):
        raise UserError("name a run, or a sweep with --sweep", fix="for example `ortflow report NAME`")
    if sweep is not None and compare:
        raise UserError("--compare draws further runs beside one run", fix="leave it out: --sweep draws all its runs")
    where = port if serve else None
    if sweep is not None:
        _report(
            lambda refresh: sweep_html(sweep, runs),
            (lambda: _sweep_numbers(sweep, runs)) if as_json else None,
            where,
            output or Path(f"{Path(sweep).name}.html"),
        )
        return
    found = find_run(run or "", runs)
    others = [find_run(name, runs) for name in compare or ()]
    path = output or Path(f"{found.root.name}.html")
    _report(
        lambda refresh: html(found, others, refresh=refresh),
        (lambda: _numbers(found, others)) if as_json else None,
        where,
        path,
    )


def _report(make: Callable[[int | None], str], numbers: Callable[[], Any] | None, port: int | None, path: Path) -> None:
    """Print the numbers if given, else serve the page on a port if given, else write it."""
    if numbers is not None:
        print_json(numbers())
        return
    if port is not None:
        from ortflow.launchers.report.server import serve

        serve(lambda: make(REFRESH), port, typer.echo)
        return
    from ortflow.workflow.rundir import write_atomically

    if path.is_dir():
        raise UserError("is a folder", where=str(path), fix="give a file with -o")
    write_atomically(path, make(None).encode())
    typer.echo(str(path))


def sweep_html(name: str, runs: Path) -> str:
    """The page of a sweep now."""
    from ortflow.launchers.report.compare import sweep_page
    from ortflow.launchers.report.survey import survey

    now = time.time()
    reported = _results(name, runs)
    surveys = [
        survey(member.run, now, status=status, all_ranks=False)
        for member, status in zip(reported.sweep.members, reported.found, strict=True)
    ]
    values = [member.values for member in reported.sweep.members]
    return sweep_page(reported.sweep.name, reported.rows(), surveys, values, reported.metric, reported.best, now)


def _results(name: str, runs: Path) -> Results:
    from ortflow.cli.sweep import find_sweep
    from ortflow.cli.sweep_table import results
    from ortflow.launchers.base import statuses

    found = find_sweep(name, runs)
    return results(found, statuses(found.runs), None)


def _sweep_numbers(name: str, runs: Path) -> Any:
    return _results(name, runs).to_json()


def html(run: RunDir, others: list[RunDir], *, refresh: int | None = None) -> str:
    """The page of a run now."""
    from ortflow.cli.status import describe
    from ortflow.launchers.report.compare import comparison
    from ortflow.launchers.report.page import Contents, page
    from ortflow.launchers.report.profile_section import memory_section, profile_section

    now = time.time()
    found = read(run, now)
    further = [read(one, now, all_ranks=False) for one in others]
    contents = Contents(
        rows=describe(found.status, now),
        run_file=_run_file(run),
        others=further,
        sections=[comparison([found, *further])] if further else [],
        last=[profile_section(found.profile), memory_section(found.ranks)],
        refresh=refresh if found.status.state.active else None,
    )
    return page(found, contents, now)


def read(run: RunDir, now: float, *, all_ranks: bool = True) -> Survey:
    """What a run's records say."""
    from ortflow.launchers.base import launcher_of
    from ortflow.launchers.report.survey import survey

    return survey(run, now, status=launcher_of(run).status(run), all_ranks=all_ranks)


def _numbers(run: RunDir, others: list[RunDir]) -> Any:
    from ortflow.launchers.report.curves import evaluation_curves, reduced
    from ortflow.launchers.report.page import curves_of
    from ortflow.launchers.report.state import sentence

    now = time.time()
    rows = []
    for one in (run, *others):
        found = read(one, now)
        rows.append(
            {
                "sentence": sentence(found),
                **found.to_json(),
                "curves": {name: reduced(points, 250) for name, points in curves_of(found).items()},
                "evaluations": {name: reduced(points, 250) for name, points in evaluation_curves(found.events).items()},
            }
        )
    return rows if others else rows[0]


def _run_file(run: RunDir) -> str:
    from ortflow.workflow.files import read_whole

    try:
        return read_whole(run.run_file, 1 << 20).decode(errors="replace")
    except OSError as error:
        return f"# {error.filename}: {error.strerror}"
