"""`ortflow report`: a page about a run, its numbers, and both while it goes on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ortflow.cli.runs import RUNS, JsonOption, RunArgument, RunsOption, find_run, print_json
from ortflow.workflow.errors import UserError

if TYPE_CHECKING:
    from ortflow.launchers.report.survey import Survey
    from ortflow.workflow.rundir import RunDir

REFRESH = 5
"""Seconds between two loads of a served page."""


def report(
    run: RunArgument,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where the page is written (default: RUN.html)."),
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option("--compare", metavar="RUN", help="Draw the curves of this run, too; may be repeated."),
    ] = None,
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
    found = find_run(run, runs)
    others = [find_run(name, runs) for name in compare or ()]
    if as_json:
        print_json(_numbers(found, others))
    elif serve:
        from ortflow.launchers.report.server import serve as serve_page

        serve_page(lambda: html(found, others, refresh=REFRESH), port, typer.echo)
    else:
        path = output or Path(f"{found.root.name}.html")
        if path.is_dir():
            raise UserError("is a folder", where=str(path), fix="give a file with -o")
        from ortflow.workflow.rundir import write_atomically

        write_atomically(path, html(found, others).encode())
        typer.echo(str(path))


def html(run: RunDir, others: list[RunDir], *, refresh: int | None = None) -> str:
    """The page of a run now."""
    from ortflow.cli.status import describe
    from ortflow.launchers.report.compare import comparison
    from ortflow.launchers.report.page import Contents, page

    now = time.time()
    found = read(run, now)
    further = [read(one, now, all_ranks=False) for one in others]
    contents = Contents(
        rows=describe(found.status, now),
        run_file=_run_file(run),
        others=further,
        sections=[comparison([found, *further])] if further else [],
        refresh=refresh if found.status.state.active else None,
    )
    return page(found, contents, now)


def read(run: RunDir, now: float, *, all_ranks: bool = True) -> Survey:
    """What a run's records say."""
    from ortflow.launchers.base import launcher_of
    from ortflow.launchers.report.survey import survey

    return survey(run, now, status=launcher_of(run).status(run), all_ranks=all_ranks)


def _numbers(run: RunDir, others: list[RunDir]) -> Any:
    from ortflow.launchers.report.curves import evaluation_curves, reduced, step_curves
    from ortflow.launchers.report.state import sentence

    now = time.time()
    rows = []
    for one in (run, *others):
        found = read(one, now)
        rows.append(
            {
                "sentence": sentence(found),
                **found.to_json(),
                "curves": {name: reduced(points, 250) for name, points in step_curves(found.events).items()},
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
