"""`ortflow submit` and `ortflow render`: a run on any launcher, and what would be started there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ortflow.cli.run import hand_over
from ortflow.cli.runs import RUNS, RunsOption, find_run
from ortflow.cli.submission import BackendOption, FileArgument, FreshOption, OverridesArgument, submission_of
from ortflow.cli.sweep import AtOnceOption, SetOption, request_sweep, submit_sweep
from ortflow.workflow.errors import UserError

if TYPE_CHECKING:
    from ortflow.launchers.base import Request
    from ortflow.launchers.slurm.commands import Slurm


def submit(
    file: FileArgument,
    overrides: OverridesArgument = None,
    backend: BackendOption = "local",
    sets: SetOption = None,
    at_once: AtOnceOption = None,
    fresh: FreshOption = False,
    after: Annotated[
        list[str] | None,
        typer.Option("--after", metavar="RUN[,RUN…]", help="Start when these runs have finished; for Slurm."),
    ] = None,
    retry: Annotated[
        float,
        typer.Option(
            "--retry", metavar="SECONDS", min=0, help="How long to wait for a scheduler that does not answer."
        ),
    ] = 0.0,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Wait for the run's end and exit with its code; Ctrl-C does not stop the run."
        ),
    ] = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Submit a run to a launcher and return.

    With the local launcher this is `ortflow run --detach`.
    """
    from dataclasses import replace

    from ortflow.launchers.base import find_launcher

    launcher = find_launcher(backend)
    names = [name for text in after or () for name in text.split(",") if name]
    if names and backend in ("local", "kubernetes"):
        where = "nothing on this machine" if backend == "local" else "nothing in Kubernetes"
        raise UserError(f"--after is for runs in Slurm: {where} waits for others", fix="add -b slurm")
    before = tuple(find_run(name, runs) for name in names)
    if sets or at_once is not None:
        slurm = _array_of(backend, sets)
        if follow:
            raise UserError("--follow is for a single run", fix="`ortflow list --sweep NAME` shows a sweep's")
        wanted = request_sweep(
            file, overrides, sets or (), runs, slurm, fresh=fresh, after=before, retry=retry, at_once=at_once
        )
        submit_sweep(wanted, slurm, runs)
        return
    elsewhere = bool(getattr(launcher, "elsewhere", False))
    wanted_run = submission_of(file, overrides, runs, fresh=fresh, elsewhere=elsewhere)
    submission = replace(wanted_run, after=before, retry=retry)
    hand_over(launcher, submission, runs, follow=follow)


def render(
    file: FileArgument,
    overrides: OverridesArgument = None,
    backend: BackendOption = "local",
    sets: SetOption = None,
    at_once: AtOnceOption = None,
    with_claim: Annotated[
        bool,
        typer.Option("--with-claim", help="With -b kubernetes: print the claim of volume.create, too."),
    ] = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Print what submit would start."""
    from ortflow.launchers.base import find_launcher

    launcher = find_launcher(backend)
    if with_claim and backend != "kubernetes":
        raise UserError("--with-claim is for runs on Kubernetes", fix="add -b kubernetes")
    if sets or at_once is not None:
        slurm = _array_of(backend, sets)
        typer.echo(str(request_sweep(file, overrides, sets or (), runs, slurm, files=False, at_once=at_once)))
        return
    elsewhere = bool(getattr(launcher, "elsewhere", False))
    request = launcher.request(submission_of(file, overrides, runs, files=False, elsewhere=elsewhere))
    typer.echo(str(_with_claim(request) if with_claim else request))


def _with_claim(request: Request) -> Request:
    from dataclasses import replace

    from ortflow.launchers.kubernetes.launcher import KubernetesRequest

    assert isinstance(request, KubernetesRequest)
    return replace(request, with_claim=True)


def _array_of(backend: str, sets: list[str] | None) -> Slurm:
    """The cluster for a sweep; raises UserError where there is none to be."""
    from ortflow.launchers.slurm.commands import Slurm

    if not sets:
        raise UserError("--at-once is for a sweep", fix="add --set KEY=VALUES")
    if backend != "slurm":
        raise UserError("--set makes a job array of Slurm; other launchers have none", fix="add -b slurm")
    return Slurm()
