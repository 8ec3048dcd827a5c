"""`ortflow rank`: the command that every rank runs; for launchers and containers, hidden from `--help`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ortflow.cli.runs import is_run
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import RunDir


def rank(run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR")]) -> None:
    """Run one rank of a run; the environment gives its number and the world size."""
    from ortflow.workflow.rank import main

    if not is_run(RunDir(run_dir)):
        raise UserError(f"{run_dir} is not a run directory")
    # As `python -m ortflow.workflow.rank` does: threads of libraries must not delay the exit.
    os._exit(main([str(run_dir)]))
