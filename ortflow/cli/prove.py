"""`ortflow prove`: whether a run that is killed resumes as if nothing had happened, and what it forgot if not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ortflow.cli.runs import RUNS, RunsOption
from ortflow.workflow.errors import EXIT_FAILURE

if TYPE_CHECKING:
    from ortflow.launchers.base import Submission
    from ortflow.workflow.spec.run import RunSpec

STEPS = 12

ProgramArgument = Annotated[Path, typer.Argument(metavar="RUN_FILE", help="The run file (YAML), or a program.")]
ArgumentsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides of run file values.")
]


def prove(
    file: ProgramArgument,
    arguments: ArgumentsArgument = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of each run.")] = STEPS,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the moments of the kill and the stop.")] = 0,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Run twice, then killed, then stopped, on this machine, and compare bit by bit.

    Exit code 0: a resumed run is equal to an uninterrupted one. 1: it is not, and the forgotten state is named.
    """
    from ortflow.launchers.proving.prove import Verdict, prove, schedule
    from ortflow.launchers.proving.runs import folder_of_runs, remove_runs

    submission = submission_to_prove(file, arguments, runs)
    moments = schedule(steps, seed, submission.spec.world_size)

    def report(verdict: Verdict) -> None:
        typer.echo(str(verdict))

    with folder_of_runs(submission.run) as folder:
        equal = prove(short_run(submission.spec, moments.steps, moments.period), folder, moments, sources(submission.spec), report)
        if equal:
            remove_runs(folder)
    if not equal:
        typer.echo(f"the runs and their traces are kept in {folder}")
        raise typer.Exit(EXIT_FAILURE)
