"""`ortflow validate`: finds everything that is wrong with a run without running it.

Registered in `ortflow.cli.app`. Must not import heavy packages at module level: `--help` loads this module. The run
file is checked on any machine. Model and data are checked if the packages of a rank are installed: by the steps that a
rank does before training, in a temporary folder.
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

    from ortflow.launchers.capabilities import Elsewhere
    from ortflow.workflow.spec.file.load import Reading
    from ortflow.workflow.spec.problem import Fault
    from ortflow.workflow.spec.run import ProgramRunSpec, TrainerRunSpec


def validate(
    run_file: FileArgument,
    overrides: OverridesArgument = None,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend", "-b", help="Check for this launcher, without model and data that it stores elsewhere."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """List all errors of a run file, without running it.

    Also checks the model and the data.
    """
    from ortflow.launchers.base import find_launcher
    from ortflow.launchers.capabilities import Elsewhere

    findings = None
    if backend is not None:
        launcher = find_launcher(backend)
        if isinstance(launcher, Elsewhere):
            findings = examine_elsewhere(run_file, overrides or (), backend, launcher)
    findings = findings or examine(run_file, overrides or (), backend)
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
    """The result of `examine`."""

    faults: list[Fault] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unchecked: str | None = None
    """What could not be checked, and why."""

    def add_unchecked(self, text: str) -> None:
        """Add to what could not be checked."""
        self.unchecked = f"{text}; {self.unchecked}" if self.unchecked else text

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


def examine(run_file: Path, overrides: Sequence[str], backend: str | None) -> Findings:
    """Check the run file and its launchers' rules; if it has no faults, also the model and the data."""
    from ortflow.launchers import interpreter
    from ortflow.launchers.changes import agree
    from ortflow.workflow.spec.checks.nodes import skipped_messages
    from ortflow.workflow.spec.file.load import read_run_file
    from ortflow.workflow.spec.file.paths import check_files, resolve_paths
    from ortflow.workflow.spec.run import ProgramRunSpec, TrainerRunSpec

    reading = read_run_file(run_file, overrides)
    # Its inputs may be where only the launcher sees them.
    of_launchers, unchecked = _of_launchers(read_run_file(run_file, overrides, files=False), backend)
    findings = Findings([*reading.faults, *of_launchers], unchecked=unchecked)
    if reading.spec is None or reading.faults:
        return findings
    spec = resolve_paths(reading.spec, run_file)
    findings.warnings += skipped_messages(spec)
    try:
        agree(spec)
    except UserError as error:
        findings.faults.append(reading.located(error))
    missing = check_files(spec.model_copy(update={"prepare": []}))
    if isinstance(spec, ProgramRunSpec):
        _examine_program(spec, reading, findings, missing=bool(missing))
        return findings
    if missing:
        findings.add_unchecked(f"the model and the data, because {missing[0].what}; the `prepare` command creates it")
        return findings
    try:
        interpreter.check(interpreter.examine(sys.executable))
    except UserError as error:
        findings.add_unchecked(f"the model and the data, because {error}")
        return findings
    try:
        assert isinstance(spec, TrainerRunSpec)
        findings.warnings += _as_a_rank(spec)
    except Faults as faults:
        findings.faults += [reading.located(fault) for fault in faults.faults]
    except OrtflowError as error:
        fault = error if isinstance(error, UserError) else UserError(str(error))
        findings.faults.append(reading.located(fault))
    return findings


def _examine_program(spec: ProgramRunSpec, reading: Reading, findings: Findings, *, missing: bool) -> None:
    """Compile the script; nothing of the program runs. Another interpreter of the run file is not started."""
    from ortflow.launchers.named_programs import unconfirmed
    from ortflow.workflow.program.source import check_source

    if missing:
        findings.add_unchecked("the program, because it does not exist; the `prepare` command creates it")
    elif (reason := unconfirmed(spec, ())) is not None and spec.resources.python is not None:
        findings.add_unchecked(f"the program, because {reason}")
    else:
        try:
            check_source(spec.program)
        except UserError as error:
            findings.faults.append(reading.located(error))


def examine_elsewhere(run_file: Path, overrides: Sequence[str], name: str, launcher: Elsewhere) -> Findings:
    """Check the run file and the rules of a launcher whose runs' files are not on this machine."""
    from ortflow.launchers.changes import agree
    from ortflow.workflow.spec.checks.nodes import skipped_messages
    from ortflow.workflow.spec.file.load import read_run_file

    reading = read_run_file(run_file, overrides, files=False)
    findings = Findings([*reading.faults])
    if reading.spec is None or reading.faults:
        return findings
    findings.warnings += skipped_messages(reading.spec)
    try:
        agree(reading.spec)
    except UserError as error:
        findings.faults.append(reading.located(error))
    faults, findings.unchecked = _of_launchers(reading, name)
    findings.faults += faults
    findings.add_unchecked(f"the model and the data, because {launcher.files_at(reading.spec)}")
    return findings


def _of_launchers(reading: Reading, backend: str | None) -> tuple[list[Fault], str | None]:
    """The faults for the launcher that the user named, and for those with a section in the run file.

    Also what they could not check, and why.
    """
    from ortflow.launchers.base import find_launcher
    from ortflow.launchers.capabilities import Validating
    from ortflow.workflow.spec.file.installed import find_options, options_of

    spec, sections = reading.spec, reading.written.get("backends")
    if spec is None or reading.faults:
        return [], None
    faults: list[Fault] = []
    unchecked: list[str] = []
    for name in dict.fromkeys([*(sections if isinstance(sections, dict) else ()), *([backend] if backend else ())]):
        try:
            if (options := find_options(name)) is not None:
                options_of(spec, name, options)
            launcher = find_launcher(name)
            if isinstance(launcher, Validating):
                unchecked += filter(None, [launcher.validate(spec, reading.written, chosen=name == backend)])
        except Faults as found:
            faults += [reading.located(fault) for fault in found.faults]
        except UserError as error:
            faults.append(reading.located(error))
    return faults, "; ".join(unchecked) or None


def _as_a_rank(spec: TrainerRunSpec) -> list[str]:
    """Do what rank 0 does before its first step; returns its warnings, raises UserError or Faults where that fails."""
    from ortflow.workflow.ranks import Place
    from ortflow.workflow.run.progress import Progress
    from ortflow.workflow.run.rundir import RunDir
    from ortflow.workflow.steps.configure import prepare
    from ortflow.workflow.steps.pace import late_groups
    from ortflow.workflow.steps.run_plan import Plan
    from ortflow.workflow.steps.shard import Stream
    from ortflow.workflow.steps.trainers import builder_of
    from ortflow.workflow.trainer import Report

    warnings: list[str] = []
    report = Report(warn=warnings.append)
    with tempfile.TemporaryDirectory(prefix="ortflow-validate-") as folder:
        run_dir = RunDir(Path(folder))
        builder = builder_of(spec, run_dir, report)
        prepare(builder, run_dir, spec, report)
        place = Place(0, spec.world_size, 0, spec.resources.ranks_per_node, "none", "localhost")
        plan = Plan.load(run_dir.plan)
        stream = Stream(spec, plan, *builder.inputs(), place, Progress())
        warnings += stream.not_finite()
        warnings += late_groups(spec.train, plan, stream.tokens_per_sample)
        stream.close()
    return warnings
