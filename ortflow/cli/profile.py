"""`ortflow profile`: where the time of the steps of `monitor.profile` went."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ortflow.cli.runs import RUNS, JsonOption, RunArgument, RunsOption, find_run, print_json
from ortflow.workflow.errors import UserError

if TYPE_CHECKING:
    from ortflow.launchers.report.profile import Profile


def profile(
    run: RunArgument,
    by: Annotated[str, typer.Option("--by", metavar="operator|module", help="What the rows are.")] = "operator",
    most: Annotated[int, typer.Option("--rows", min=1, help="Rows at most.")] = 20,
    as_json: JsonOption = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Print where the time of the profiled steps of a run went."""
    from ortflow.launchers.report.profile import read
    from ortflow.workflow.run import profile_records as records

    if by not in ("operator", "module"):
        raise UserError(f"--by is {by}", fix="give operator or module")
    found_run = find_run(run, runs)
    run_profile = read(found_run.root)
    if run_profile is None:
        raise UserError(
            f"{found_run.root.name} has no profile yet",
            where=str(found_run.run_file),
            fix="set monitor.profile, for example to {from: 20, to: 29}, and run it to the last of these steps",
        )
    for folder in records.attempts(found_run.root):
        # Ranks that were killed in the window left their records, and no trace.
        if not records.trace_of(folder).exists() or (folder == run_profile.folder and not run_profile.complete):
            try:
                records.write_trace(folder)
            except OSError as error:
                typer.echo(f"warning: {records.trace_of(folder)} is not written: {error.strerror}", err=True)
    trace = records.trace_of(run_profile.folder)
    if as_json:
        print_json({**run_profile.to_json(), "trace": str(trace)})
        return
    _print(run_profile, trace, by, most)


def _print(run_profile: Profile, trace: Path, by: str, most: int) -> None:
    from ortflow.cli.status import print_table
    from ortflow.launchers.report.advice import advice
    from ortflow.launchers.report.profile_table import head, table

    typer.echo(head(run_profile))
    rows = table(run_profile, by, most)
    print_table(rows, (rows[0][-1], rows[0][0]))
    for number, sentence in enumerate(advice(run_profile), 1):
        typer.echo(f"{number}. {sentence}")
    typer.echo(f"trace, for https://ui.perfetto.dev: {trace}")
