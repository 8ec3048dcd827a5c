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
    from ortflow.workflow.run.rundir import RunDir

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
    server_port = port if serve else None
    if sweep is not None:
        _report(
            lambda refresh: sweep_html(sweep, runs),
            (lambda: _sweep_numbers(sweep, runs)) if as_json else None,
            server_port,
            output or Path(f"{Path(sweep).name}.html"),
        )
        return
    run_dir = find_run(run or "", runs)
    compared_runs = [find_run(name, runs) for name in compare or ()]
    path = output or Path(f"{run_dir.root.name}.html")
    _report(
        lambda refresh: html(run_dir, compared_runs, refresh=refresh),
        (lambda: _numbers(run_dir, compared_runs)) if as_json else None,
        server_port,
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
    from ortflow.workflow.run.rundir import write_atomically

    if path.is_dir():
        raise UserError("is a folder", where=str(path), fix="give a file with -o")
    write_atomically(path, make(None).encode())
    typer.echo(str(path))


def sweep_html(name: str, runs: Path) -> str:
    """The page of a sweep now."""
    from ortflow.launchers.report.compare import sweep_page
    from ortflow.launchers.report.survey import survey

    now = time.time()
    sweep_results = _results(name, runs)
    surveys = [
        survey(member.run, now, status=status, all_ranks=False)
        for member, status in zip(sweep_results.sweep.members, sweep_results.found, strict=True)
    ]
    values = [member.values for member in sweep_results.sweep.members]
    return sweep_page(
        sweep_results.sweep.name, sweep_results.rows(), surveys, values, sweep_results.metric, sweep_results.best, now
    )


def _results(name: str, runs: Path) -> Results:
    from ortflow.cli.sweep import find_sweep
    from ortflow.cli.sweep_table import results
    from ortflow.launchers.base import statuses

    sweep = find_sweep(name, runs)
    return results(sweep, statuses(sweep.runs), None)


def _sweep_numbers(name: str, runs: Path) -> Any:
    return _results(name, runs).to_json()


def html(run: RunDir, compared_runs: list[RunDir], *, refresh: int | None = None) -> str:
    """The page of a run now."""
    from ortflow.cli.status import describe
    from ortflow.launchers.report.compare import comparison
    from ortflow.launchers.report.page import Contents, page
    from ortflow.launchers.report.profile_section import memory_section, profile_section

    now = time.time()
    run_survey = read(run, now)
    compared_surveys = [read(compared_run, now, all_ranks=False) for compared_run in compared_runs]
    contents = Contents(
        rows=describe(run_survey.status, now),
        run_file=_run_file(run),
        others=compared_surveys,
        sections=[comparison([run_survey, *compared_surveys])] if compared_surveys else [],
        last=[profile_section(run_survey.profile), memory_section(run_survey.ranks)],
        refresh=refresh if run_survey.status.state.active else None,
    )
    return page(run_survey, contents, now)


def read(run: RunDir, now: float, *, all_ranks: bool = True) -> Survey:
    """What a run's records say."""
    from ortflow.launchers.base import launcher_of
    from ortflow.launchers.report.survey import survey

    return survey(run, now, status=launcher_of(run).status(run), all_ranks=all_ranks)


def _numbers(run: RunDir, compared_runs: list[RunDir]) -> Any:
    from ortflow.launchers.report.curves import evaluation_curves, reduced
    from ortflow.launchers.report.page import curves_of
    from ortflow.launchers.report.state import sentence

    now = time.time()
    rows = []
    for run_dir in (run, *compared_runs):
        run_survey = read(run_dir, now)
        rows.append(
            {
                "sentence": sentence(run_survey),
                **run_survey.to_json(),
                "curves": {name: reduced(points, 250) for name, points in curves_of(run_survey).items()},
                "evaluations": {
                    name: reduced(points, 250) for name, points in evaluation_curves(run_survey.events).items()
                },
            }
        )
    return rows if compared_runs else rows[0]


def _run_file(run: RunDir) -> str:
    from ortflow.workflow.system.files import read_whole

    try:
        return read_whole(run.run_file, 1 << 20).decode(errors="replace")
    except OSError as error:
        return f"# {error.filename}: {error.strerror}"
