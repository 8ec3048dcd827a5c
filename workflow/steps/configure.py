"""Step 1: creates the plan from the run file, and the trainer's files for all ranks.

Every rank finds its trainer; rank 0 prepares the run, and the others read what it wrote.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.run.events import warn
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.checks.check import RESERVED
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.steps.context import Context
from ortflow.workflow.steps.identity import identity_of
from ortflow.workflow.steps.input_files import input_hashes, refuse_other_files
from ortflow.workflow.steps.run_plan import Plan, resolve
from ortflow.workflow.steps.trainers import builder_of
from ortflow.workflow.trainer import Prepared, Report

if TYPE_CHECKING:
    from ortflow.workflow.trainer import TrainerBuilder


def configure(context: Context) -> None:
    """Find the trainer; on rank 0, prepare the run. An error is kept until all ranks can receive it."""
    report = Report(
        note=lambda line: print(line, flush=True),
        warn=lambda message: warn(context.events, message),
        record=context.events.write,
    )
    try:
        context.builder = builder_of(context.spec, context.run_dir, report, starting=True)
        if context.leads:
            context.machine = context.builder.check_machine()
            prepare(context.builder, context.run_dir, context.spec, report)
    except OrtflowError as error:
        context.trouble = error


def prepare(builder: TrainerBuilder, run_dir: RunDir, spec: TrainerRunSpec, report: Report) -> None:
    """Write the plan, and the trainer's files for all ranks. Raises OrtflowError."""
    from ortflow.workflow.data.classes import classes_of
    from ortflow.workflow.data.digest import digest_of
    from ortflow.workflow.data.sources import open_training

    if spec.export.enabled:
        check_output(run_dir, spec)
    before = plan_before(run_dir, report)
    resumed, inputs = saved(run_dir, spec), input_hashes(spec)
    if before is not None:
        refuse_other_files(before.inputs, inputs, spec, report, saved=resumed)
    dataset = open_training(spec.data, spec.seed)
    samples, data = len(dataset), digest_of(dataset)
    if before is not None:
        _check_data(before, samples, data, spec.data.train.title, report, saved=resumed)
    earlier = None if before is None else Prepared(before.parameters, before.fingerprint, before.graphs)
    graphs = builder.prepare(dataset, earlier)
    plan = resolve(
        spec,
        samples=samples,
        data=data,
        parameters=graphs.parameters,
        fingerprint=graphs.fingerprint,
        graphs=graphs.files,
    )
    run = identity_of(run_dir, spec, data, before).to_json()
    replace(plan, run=run, inputs=inputs, classes=classes_of(dataset)).save(run_dir.plan)


def _check_data(before: Plan, samples: int, data: str, path: str, report: Report, *, saved: bool) -> None:
    """Raise UserError if a run would continue from its checkpoint with other samples; warn if it starts again."""
    if before.samples != samples:
        other = f"{path} has {samples} samples, and this run began with {before.samples}"
    elif before.data and before.data != data:
        other = f"{path} has other samples than this run began with"
    else:
        return
    if saved:
        raise UserError(
            f"{other}: the loss curve would change",
            where="data.train.path",
            fix="use the original set, or start from the beginning with --fresh or another name (name=NAME)",
        )
    report.warn(other)


def plan_before(run_dir: RunDir, report: Report) -> Plan | None:
    """The plan of an earlier attempt; None if there is none, or with a warning if it cannot be read."""
    try:
        return Plan.load(run_dir.plan)
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        report.warn(f"{run_dir.plan} cannot be read ({error}): plan and graphs are rebuilt")
        return None


def check_output(run_dir: RunDir, spec: TrainerRunSpec) -> None:
    """Raise UserError if the export would overwrite a path that the run directory uses."""
    path = run_dir.root / spec.export.path
    inside = path.relative_to(run_dir.root).parts if path.is_relative_to(run_dir.root) else ()
    if inside and inside[0] in RESERVED:
        raise UserError(f"{path} is a path that the run directory uses", where="export.path", fix="choose another path")


def saved(run_dir: RunDir, spec: TrainerRunSpec) -> bool:
    """Whether the run continues from a checkpoint."""
    from ortflow.workflow.checkpoint.store import DirectoryStore

    return bool(DirectoryStore(run_dir.root / spec.checkpoint.directory).steps())
