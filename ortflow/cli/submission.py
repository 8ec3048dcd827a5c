"""Makes a submission from a run file on the command line: used by run, submit and render."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ortflow.launchers.names import BUILT_IN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortflow.cli.program import Typed
    from ortflow.launchers.base import Submission

FileArgument = Annotated[Path, typer.Argument(metavar="RUN_FILE", help="The run file (YAML).")]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides of run file values.")
]
FreshOption = Annotated[
    bool, typer.Option("--fresh", help="Start from the beginning; an existing run is renamed to NAME.1, NAME.2, …")
]
BackendOption = Annotated[
    str, typer.Option("--backend", "-b", help=f"Launcher: {', '.join(BUILT_IN)}, or one that is installed.")
]


def submission_of(
    file: Path,
    overrides: Sequence[str] | None,
    runs: Path,
    *,
    fresh: bool = False,
    files: bool = True,
    elsewhere: bool = False,
    typed: Typed | None = None,
) -> Submission:
    """The checked run of a run file; raises Faults. `files`: also check that its inputs exist.

    `elsewhere`: this machine does not see the files of the launcher's runs. Paths then stay as written, and the
    directory holds only the record. `typed` is what the command line says of a program in place of the run file.
    """
    from ortflow.cli.program import Typed
    from ortflow.launchers.base import Submission
    from ortflow.workflow.errors import Faults
    from ortflow.workflow.run.rundir import RunDir
    from ortflow.workflow.spec.file.paths import resolve_paths

    reading = (typed or Typed()).reading(file, overrides or (), files=files and not elsewhere, elsewhere=elsewhere)
    if reading.spec is None or reading.faults:
        raise Faults(reading.faults)
    if elsewhere:
        run = RunDir(Path(os.path.abspath(runs / reading.spec.name)))
        return Submission(reading.spec, run, file.absolute().parent, fresh=fresh, source=reading.written)
    spec = reading.spec
    if spec.run_dir is None:
        spec = spec.model_copy(update={"run_dir": str(runs / spec.name)})
    spec = resolve_paths(spec, file)
    return Submission(spec, RunDir(Path(str(spec.run_dir))), file.absolute().parent, fresh=fresh)
