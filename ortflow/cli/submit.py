"""`ortflow submit` and `ortflow render`: submits a run to any launcher, or prints what would be submitted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ortflow.cli.program import (
    GpusOption,
    NameOption,
    NodesOption,
    RanksOption,
    StartOption,
    TargetArgument,
    Typed,
)
from ortflow.cli.run import hand_over
from ortflow.cli.runs import RUNS, RunsOption, find_run
from ortflow.cli.submission import BackendOption, FreshOption, OverridesArgument, submission_of
from ortflow.cli.sweep import AtOnceOption, SetOption, plan_sweep, submit_sweep
from ortflow.launchers.names import HERE
from ortflow.workflow.errors import UserError

if TYPE_CHECKING:
    from ortflow.launchers.base import Launcher
    from ortflow.launchers.capabilities import Sweeping


def submit(
    file: TargetArgument,
    overrides: OverridesArgument = None,
    backend: BackendOption = HERE,
    sets: SetOption = None,
    at_once: AtOnceOption = None,
    fresh: FreshOption = False,
    after: Annotated[
        list[str] | None,
        typer.Option(
            "--after",
            metavar="RUN[,RUN…]",
            help="Start after these runs have finished (batch schedulers only).",
        ),
    ] = None,
    retry: Annotated[
        float,
        typer.Option("--retry", metavar="SECONDS", min=0, help="Seconds to retry while the scheduler does not answer."),
    ] = 0.0,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Wait until the run ends and exit with its code; Ctrl-C does not stop the run."
        ),
    ] = False,
    ranks: RanksOption = None,
    nodes: NodesOption = None,
    gpus: GpusOption = None,
    name: NameOption = None,
    start_by: StartOption = None,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Submit a run to a launcher and return.

    With the local launcher this is `ortflow run --detach`.
    """
    from dataclasses import replace

    from ortflow.launchers.base import find_launcher, is_elsewhere, ways_to
    from ortflow.launchers.capabilities import Chaining

    launcher, typed = find_launcher(backend), Typed.here(ranks, nodes, gpus, name, start_by)
    names = [predecessor for text in after or () for predecessor in text.split(",") if predecessor]
    if names and not isinstance(launcher, Chaining):
        raise UserError(f"--after: runs of the launcher {backend} cannot depend on others", fix=ways_to(Chaining))
    before = tuple(find_run(predecessor, runs) for predecessor in names)
    if sets or at_once is not None:
        sweeper = _of_sweeps(launcher, backend, sets)
        if follow:
            raise UserError("--follow works only for a single run", fix="`ortflow list --sweep NAME` shows a sweep's")
        submit_sweep(
            plan_sweep(
                file, overrides, sets or (), runs, sweeper, backend,
                fresh=fresh, after=before, retry=retry, typed=typed,
            ),
            sweeper, at_once, runs,
        )  # fmt: skip
        return
    wanted_run = submission_of(file, overrides, runs, fresh=fresh, elsewhere=is_elsewhere(launcher), typed=typed)
    submission = replace(wanted_run, after=before, retry=retry)
    hand_over(launcher, submission, runs, follow=follow)


def render(
    file: TargetArgument,
    overrides: OverridesArgument = None,
    backend: BackendOption = HERE,
    sets: SetOption = None,
    at_once: AtOnceOption = None,
    with_claim: Annotated[
        bool,
        typer.Option("--with-claim", help="Also print the storage claim, if the backend creates one."),
    ] = False,
    ranks: RanksOption = None,
    nodes: NodesOption = None,
    gpus: GpusOption = None,
    name: NameOption = None,
    start_by: StartOption = None,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Print what submit would start."""
    from ortflow.launchers.base import find_launcher, is_elsewhere, ways_to
    from ortflow.launchers.capabilities import Claiming

    launcher, typed = find_launcher(backend), Typed.here(ranks, nodes, gpus, name, start_by)
    if with_claim and not isinstance(launcher, Claiming):
        raise UserError(f"--with-claim: the launcher {backend} creates no storage claim", fix=ways_to(Claiming))
    if sets or at_once is not None:
        sweeper = _of_sweeps(launcher, backend, sets)
        sweep, submissions = plan_sweep(file, overrides, sets or (), runs, sweeper, backend, files=False, typed=typed)
        printed = [replace(submission, printed=tuple(overrides or ())) for submission in submissions]
        typer.echo(str(sweeper.request_sweep(sweep, printed, at_once)))
        return
    elsewhere = is_elsewhere(launcher)
    submission = submission_of(file, overrides, runs, files=False, elsewhere=elsewhere, typed=typed)
    request = launcher.request(replace(submission, printed=tuple(overrides or ())))
    typer.echo(str(launcher.with_claim(request) if with_claim and isinstance(launcher, Claiming) else request))


def _of_sweeps(launcher: Launcher, backend: str, sets: list[str] | None) -> Sweeping:
    """The launcher for a sweep; raises UserError if it does not support sweeps, or if no key is varied."""
    from ortflow.launchers.base import ways_to
    from ortflow.launchers.capabilities import Sweeping

    if not sets:
        raise UserError("--at-once needs a sweep", fix="add --set KEY=VALUES")
    if not isinstance(launcher, Sweeping):
        raise UserError(f"--set makes a job array, and the launcher {backend} has none", fix=ways_to(Sweeping))
    return launcher
