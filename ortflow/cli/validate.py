"""`ortflow validate`: everything that is wrong with a run, found without running it.

Wired into the command line by `ortflow.cli.app`. Nothing heavy may be imported at module level: `--help` reads this.
The run file is checked on any machine; its model and data where the packages of a rank are installed, too, by doing
what a rank does before its first step, in a folder that is thrown away.
"""

from __future__ import annotations

import json as jsonlib
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ortflow.cli.submission import FileArgument, OverridesArgument
from ortflow.workflow.errors import EXIT_USER, Faults, OrtflowError, UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortflow.workflow.spec.problem import Fault
    from ortflow.workflow.spec.run import RunSpec


def validate(
    run_file: FileArgument,
    overrides: OverridesArgument = None,
    backend: Annotated[
        str | None,
        typer.Option("--backend", "-b", help="kubernetes: model and data are on the volume and are not checked."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """List everything that is wrong with a run file, its model and its data, without running it."""
    if backend is not None:
        from ortflow.launchers.base import find_launcher

        find_launcher(backend)
    findings = (
        on_the_volume(run_file, overrides or ()) if backend == "kubernetes" else examine(run_file, overrides or ())
    )
    if json:
        typer.echo(jsonlib.dumps(findings.to_json(), indent=2))
    else:
        for fault in findings.faults:
            typer.echo(f"error: {fault}", err=True)
        for warning in findings.warnings:
            typer.echo(f"warning: {warning}", err=True)
        if not findings.faults:
            typer.echo(f"{run_file}: valid, as far as it was checked" if findings.unchecked else f"{run_file}: valid")
        if findings.unchecked:
            typer.echo(f"not checked: {findings.unchecked}")
    if findings.faults:
        raise typer.Exit(EXIT_USER)


@dataclass
class Findings:
    """What `examine` found."""

    faults: list[Fault] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unchecked: str | None = None
    """What could not be checked, and why."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "valid": not self.faults,
            "faults": [
                {"file": fault.file, "line": fault.line or None, "key": fault.key, "what": fault.what, "fix": fault.fix}
                for fault in self.faults
            ],
            "warnings": self.warnings,
            "unchecked": self.unchecked,
        }


def examine(run_file: Path, overrides: Sequence[str]) -> Findings:
    """Check the run file and what Kubernetes would get of it; if nothing is wrong with it, the model and the data."""
    from ortflow.launchers import interpreter
    from ortflow.launchers.changes import agree
    from ortflow.workflow.spec.file.load import read_run_file
    from ortflow.workflow.spec.file.paths import check_files, resolve_paths

    reading = read_run_file(run_file, overrides)
    elsewhere = _in_kubernetes(run_file, overrides)
    findings = Findings([*reading.faults, *elsewhere])
    if reading.spec is None or reading.faults:
        return findings
    spec = resolve_paths(reading.spec, run_file)
    try:
        agree(spec)
    except UserError as error:
        findings.faults.append(reading.located(error))
    missing = check_files(spec.model_copy(update={"prepare": []}))
    if missing:
        findings.unchecked = f"the model and the data, because {missing[0].what}; the `prepare` command makes it"
        return findings
    try:
        interpreter.check(interpreter.examine(sys.executable))
    except UserError as error:
        findings.unchecked = f"the model and the data, because {error}"
        return findings
    try:
        findings.warnings = _as_a_rank(spec)
    except Faults as faults:
        findings.faults += [reading.located(fault) for fault in faults.faults]
    except OrtflowError as error:
        fault = error if isinstance(error, UserError) else UserError(str(error))
        findings.faults.append(reading.located(fault))
    return findings


def on_the_volume(run_file: Path, overrides: Sequence[str]) -> Findings:
    """Check the run file and what Kubernetes would get of it; its model and data are where only its pods see them."""
    from ortflow.launchers.changes import agree
    from ortflow.workflow.spec.checks.kubernetes import require
    from ortflow.workflow.spec.file.load import read_run_file

    reading = read_run_file(run_file, overrides, files=False)
    findings = Findings([*reading.faults])
    if reading.spec is None or reading.faults:
        return findings
    kubernetes = reading.spec.backends.kubernetes
    for check in (agree, require):
        try:
            check(reading.spec)
        except Faults as faults:
            findings.faults += [reading.located(fault) for fault in faults.faults]
        except UserError as error:
            findings.faults.append(reading.located(error))
    findings.faults += _in_kubernetes(run_file, overrides) if not findings.faults else []
    folder = kubernetes.folder or f"{kubernetes.volume.mount}/files/{reading.spec.name}"
    findings.unchecked = f"the model and the data, because pods see them from {folder} on the volume"
    return findings


def _in_kubernetes(run_file: Path, overrides: Sequence[str]) -> list[Fault]:
    """What is wrong with the documents of a run that has an image for Kubernetes, as overlays leave them."""
    from ortflow.workflow.spec.file.load import read_run_file

    reading = read_run_file(run_file, overrides, files=False)  # its inputs may lie on a volume
    if reading.spec is None or reading.faults or reading.spec.backends.kubernetes.image is None:
        return []
    from ortflow.manifests.kubernetes import Placement, documents

    # What the carried files say does not matter here, nor where the run goes.
    contents = dict.fromkeys(reading.spec.backends.kubernetes.files, "")
    try:
        documents(reading.written, reading.spec, Placement(namespace="default", contents=contents))
    except Faults as faults:
        return [reading.located(fault) for fault in faults.faults]
    except UserError as error:
        return [reading.located(error)]
    return []


def _as_a_rank(spec: RunSpec) -> list[str]:
    """Do what rank 0 does before its first step; returns its warnings, raises UserError or Faults where that fails."""
    from ortflow.workflow.plan import Plan
    from ortflow.workflow.progress import Progress
    from ortflow.workflow.ranks import Place
    from ortflow.workflow.rundir import RunDir
    from ortflow.workflow.steps.configure import prepare
    from ortflow.workflow.steps.shard import Stream
    from ortflow.workflow.trainer import Report
    from ortflow.workflow.trainers import builder_of

    warnings: list[str] = []
    report = Report(warn=warnings.append)
    with tempfile.TemporaryDirectory(prefix="ortflow-validate-") as folder:
        run_dir = RunDir(Path(folder))
        builder = builder_of(spec, run_dir, report)
        prepare(builder, run_dir, spec, report)
        place = Place(0, spec.world_size, 0, spec.resources.ranks_per_node, "none", "localhost")
        Stream(spec, Plan.load(run_dir.plan), *builder.inputs(), place, Progress()).close()
    return warnings
