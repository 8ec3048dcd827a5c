"""`ortflow doctor`: whether a run can work here or on a cluster, checked before it is started."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ortflow.cli.findings import print_findings
from ortflow.cli.runs import RUNS, JsonOption, RunsOption
from ortflow.cli.submission import BackendOption
from ortflow.launchers.names import HERE
from ortflow.workflow.errors import Faults, UserError

if TYPE_CHECKING:
    from ortflow.launchers.base import Submission
    from ortflow.launchers.findings import Finding

STAND_IN = """\
name: doctor
model: {path: model.onnx, loss: mse}
data: {train: train.arrow, micro_batch: 1}
train: {steps: 1, optimizer: {name: sgd, lr: 0.1}}
resources: {nodes: 1, ranks_per_node: 2, cpus_per_rank: 1}
"""
"""The run that is checked if no run file is given: two ranks, so that they have to connect."""


def doctor(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN_FILE] [KEY=VALUE]", help="Run file to check, and KEY=VALUE overrides."),
    ] = None,
    backend: BackendOption = HERE,
    job: Annotated[
        bool, typer.Option("--job", help="Submit a job of at most two minutes that checks the nodes.")
    ] = False,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Nodes of that job (default: the run's).")] = None,
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0, help="Seconds to wait for that job to start.")
    ] = 120.0,
    as_json: JsonOption = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Report what would prevent a run, here or on a cluster.

    Prints one line per check; exit code 1 if there is a fault. Starts no program that only the run file names.
    """
    from ortflow.launchers.base import find_launcher, ways_to
    from ortflow.launchers.capabilities import Trying

    if (job or nodes is not None) and not isinstance(find_launcher(backend), Trying):
        raise UserError(f"--job and --nodes are not supported by the launcher {backend}", fix=ways_to(Trying))
    if nodes is not None and not job:
        raise UserError("--nodes needs --job", fix="add --job")
    file, overrides = split(arguments or ())
    print_findings(_examine(file, overrides, backend, (nodes, wait) if job else None, runs), as_json=as_json)


def split(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The run file, if the first argument is one, and the overrides."""
    if arguments and ("=" not in arguments[0] or os.path.isfile(arguments[0])):
        return Path(arguments[0]), list(arguments[1:])
    return None, list(arguments)


def _examine(
    file: Path | None, overrides: list[str], backend: str, job: tuple[int | None, float] | None, runs: Path
) -> Iterator[Finding]:
    from ortflow.launchers.base import find_launcher, is_elsewhere, offering
    from ortflow.launchers.capabilities import Examining, Trial, Trying

    launcher = find_launcher(backend)
    if not isinstance(launcher, Examining):
        names = ", ".join(offering(Examining))
        raise UserError(f"the launcher {backend!r} has no checks for doctor", fix=f"those that have: {names}")
    submission = submission_to_check(file, overrides, runs, elsewhere=is_elsewhere(launcher))
    answers = {"file": file is not None, "overrides": bool(overrides)}
    if job is not None and isinstance(launcher, Trying):
        trial = Trial(job[0], job[1], lambda text: typer.echo(text, err=True))
        yield from launcher.examine_with_job(submission, trial, **answers)
    else:
        yield from launcher.examine(submission, **answers)


def _read(file: Path, overrides: list[str], runs: Path, *, elsewhere: bool) -> Submission:
    """A checked run; raises Faults."""
    from ortflow.launchers.base import Submission
    from ortflow.workflow.run.rundir import RunDir
    from ortflow.workflow.spec.file.load import read_run_file
    from ortflow.workflow.spec.file.paths import resolve_paths

    reading = read_run_file(file, overrides, files=False)
    if reading.spec is None or reading.faults:
        raise Faults(reading.faults)
    spec, folder, overrides_given = reading.spec, file.absolute().parent, tuple(overrides)
    if elsewhere:
        return Submission(spec, RunDir(runs / spec.name), folder, source=reading.written, overrides=overrides_given)
    if spec.run_dir is None:
        spec = spec.model_copy(update={"run_dir": str(runs / spec.name)})
    spec = resolve_paths(spec, file)
    return Submission(spec, RunDir(Path(str(spec.run_dir))), folder, overrides=overrides_given)


def submission_to_check(file: Path | None, overrides: list[str], runs: Path, *, elsewhere: bool) -> Submission:
    """The run of the file, whether its inputs exist or not; a placeholder without a file."""
    if file is not None:
        return _read(file, overrides, runs, elsewhere=elsewhere)
    with tempfile.TemporaryDirectory(prefix="ortflow-doctor-") as folder:
        stand_in = Path(folder) / "run.yaml"
        stand_in.write_text(STAND_IN)
        return _read(stand_in, overrides, runs, elsewhere=elsewhere)
