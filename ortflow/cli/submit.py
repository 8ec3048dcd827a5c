"""`ortflow submit` and `ortflow render`: a run on any launcher, and what would be started there."""

from __future__ import annotations

from pathlib import Path

import typer

from ortflow.cli.run import tell_how_to_follow
from ortflow.cli.runs import RUNS, RunsOption, reference
from ortflow.cli.submission import BackendOption, FileArgument, FreshOption, OverridesArgument, submission_of


def submit(
    file: FileArgument,
    overrides: OverridesArgument = None,
    backend: BackendOption = "local",
    fresh: FreshOption = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Start a run on a launcher and come back.

    On the local one this is run --detach.
    """
    from ortflow.launchers.base import find_launcher

    launcher = find_launcher(backend)
    submission = submission_of(file, overrides, runs, fresh=fresh)
    handle = launcher.submit(launcher.request(submission))
    typer.echo(handle)
    tell_how_to_follow(reference(submission.run, runs))


def render(
    file: FileArgument,
    overrides: OverridesArgument = None,
    backend: BackendOption = "local",
    runs: RunsOption = Path(RUNS),
) -> None:
    """Print what submit would start, and nothing else."""
    from ortflow.launchers.base import find_launcher

    launcher = find_launcher(backend)
    typer.echo(str(launcher.request(submission_of(file, overrides, runs, files=False))))
