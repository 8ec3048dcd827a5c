"""Shared by commands about runs: how a run is named on the command line, and JSON output.

A run is named by its name, looked up in the runs folder (./runs, --runs-dir or ORTFLOW_RUNS), or by its directory. One
in a cluster that was submitted from elsewhere is named by its handle, LAUNCHER://WHERE.
"""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.files import open_regular

RUNS = "runs"


def complete_run(incomplete: str) -> list[str]:
    """Names of runs for shell completion."""
    return [run.root.name for run in runs_in(default_runs()) if run.root.name.startswith(incomplete)]


def default_runs() -> Path:
    """The runs folder if no option names one."""
    return Path(os.environ.get("ORTFLOW_RUNS") or RUNS)


RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="Name or directory of the run.", autocompletion=complete_run)
]
RunsOption = Annotated[
    Path, typer.Option("--runs-dir", envvar="ORTFLOW_RUNS", show_default=True, help="Folder of the runs.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def find_run(text: str, runs: Path, *, adopts: bool = False) -> RunDir:
    """The run of a name, a directory or a handle in a cluster; raises UserError with the existing names.

    `adopts`: a name without a directory stands for the only run of that name in the cluster.
    """
    if "://" in text:
        return _adopted(text, runs)
    for path in (Path(text),) if os.sep in text or text in (".", "..") else (runs / text, Path(text)):
        run = RunDir(Path(os.path.abspath(path)))
        if is_run(run):
            return run
        if os.path.lexists(run.run_file):
            os.close(open_regular(run.run_file))  # reports what is there instead
        if os.path.lexists(run.attempts):
            raise UserError(
                f"the run in {run.root} has no {run.run_file.name}",
                fix="restore the file, or start a new run under another name",
            )
    if (applied := _applied(text, runs, adopts=adopts)) is not None:
        return applied
    names = [run.root.name for run in runs_in(runs)]
    near = difflib.get_close_matches(text, names, 1)
    hint = f"did you mean {near[0]}?" if near else (f"there are: {', '.join(names)}" if names else None)
    raise UserError(f"there is no run {text} in {runs}", fix=hint or "give its directory, or --runs-dir")


def _adopted(handle: str, runs: Path) -> RunDir:
    """The run directory of LAUNCHER://WHERE; raises UserError if that launcher does not support handles."""
    from ortflow.launchers.base import find_launcher
    from ortflow.launchers.capabilities import Adopting

    launcher = find_launcher(name := handle.partition("://")[0])
    if not isinstance(launcher, Adopting):
        raise UserError(f"{handle} does not name a run", fix=f"name runs of the launcher {name} by name or directory")
    return launcher.adopt(handle, runs)


def _applied(text: str, runs: Path, *, adopts: bool) -> RunDir | None:
    """A run that is only in the cluster, as after `kubectl apply`; raises UserError if its handle is needed."""
    from ortflow.launchers.base import offering
    from ortflow.launchers.capabilities import Adopting

    local_handles: list[str] = []
    elsewhere: list[str] = []
    for launcher in offering(Adopting).values():
        own_handles, other_handles = launcher.handles(text)
        local_handles, elsewhere = local_handles + own_handles, elsewhere + other_handles
    if adopts and len(local_handles) == 1:
        return _adopted(local_handles[0], runs)
    if handles := local_handles or elsewhere:
        raise UserError(
            f"there is no run {text} in {runs}",
            fix=f"the cluster has {', '.join(handles)}: use {'this' if len(handles) == 1 else 'one of these'} as "
            "the run",
        )
    return None


def runs_in(folder: Path) -> list[RunDir]:
    """The runs of a folder, by name."""
    try:
        folders = sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []
    return [run for path in folders if is_run(run := RunDir(Path(os.path.abspath(path))))]


def is_run(run: RunDir) -> bool:
    """Whether a directory holds a run."""
    return run.run_file.is_file()


def reference(run: RunDir, runs: Path) -> str:
    """How to name the run in the next command: by its name if that is enough; with --host, with the login node."""
    from ortflow.launchers.remote.arrival import as_typed

    usual = Path(os.path.abspath(runs)) == run.root.parent and Path(os.path.abspath(default_runs())) == run.root.parent
    return as_typed() + (run.root.name if usual else os.path.relpath(run.root))


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    typer.echo(json.dumps(value, indent=2))
