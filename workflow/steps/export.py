"""Step 7: the inference model with trained weights, checked against the trained model on real samples.

In a run, rank 0 exports after the last step. Offline, `export_checkpoint` exports any complete checkpoint with one rank
and without MPI.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ortflow.workflow.checkpoint.load import Loaded, Window, load, load_newest, window_for
from ortflow.workflow.checkpoint.manifest import Damaged
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.data.locations import are_there
from ortflow.workflow.data.notes import write_notes
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.ranks import Place
from ortflow.workflow.run.graph_hashes import damage
from ortflow.workflow.run.progress import Progress
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.file.paths import moved
from ortflow.workflow.spec.metrics import METRICS, higher_is_better
from ortflow.workflow.spec.run import TrainerRunSpec, trainer_run
from ortflow.workflow.steps.best import best_of, best_path
from ortflow.workflow.steps.configure import prepare
from ortflow.workflow.steps.context import Context
from ortflow.workflow.steps.identity import COPIED, recorded_identity, refuse_other_runs
from ortflow.workflow.steps.run_plan import Plan
from ortflow.workflow.steps.shard import Stream
from ortflow.workflow.steps.trainers import builder_of
from ortflow.workflow.system.disk_space import Notice, OutOfDisk, wait_for_room
from ortflow.workflow.trainer import MicroBatch, Report, Scoring, TrainerBuilder
from ortflow.workflow.trainer_protocol.capabilities import Lending, Releasing, check_capabilities, exchange_average
from ortflow.workflow.weights.kept import FILE, RECORD
from ortflow.workflow.weights.variants import Judge, Variant, kinds_of, write_variants

CHECKED_BATCHES = 2
MEASURED_BATCHES = 8
"""For quantised models."""
EVALUATED_BATCHES = 256
"""For their metrics."""


@dataclass(frozen=True)
class Exported:
    """An inference model made offline."""

    path: Path
    step: int
    max_difference: float | None
    """Difference from the trained model on real samples; None if the data is not available."""
    variants: tuple[Variant, ...] = ()
    """Further forms that the run file wants."""


def try_export(context: Context) -> None:
    """Make and check a model from the initial parameters, and discard it.

    Called by all ranks before the first step. Raises UserError, on all, if the export at the end would fail.
    """
    if not context.spec.export.enabled or context.progress.step:
        return
    trainer, tolerance = context.trainer, context.spec.export.tolerance
    lending = trainer if isinstance(trainer, Lending) else None

    def make() -> None:
        try:
            trainer.export(output(context), samples(context)[:1], tolerance, trial=True)
        finally:
            if lending is not None:
                lending.after_export()

    if lending is not None:
        lending.before_export()
        if not context.leads:
            lending.lend()
    context.try_on_rank_0(make)


def export(context: Context) -> None:
    """Write and check the model. Rank 0 does the work: it has the parameters, or reads them from the others.

    If that fails, the error says that training is done, where the parameters are, and how to export them later.
    """
    if not context.spec.export.enabled:
        return
    stopping = False
    if context.spec.train.average is not None:
        if context.leads and not context.progress.averaged:
            context.monitor.warn(
                "no weights were averaged, because train.average.start is behind the run's last step: the model has the"
                " trained ones"
            )
        exchange_average(context.trainer, context.spec)
    lending = context.trainer if isinstance(context.trainer, Lending) else None
    if lending is not None:
        lending.before_export()
    if context.leads:
        path = output(context)
        context.stream.close()
        if isinstance(context.trainer, Releasing):
            context.trainer.end_training()
        # The saver's copy of the state would take memory that the exported model needs.
        del context.saver
        try:
            difference = _export_when_there_is_room(context, path)
        except UserError as error:
            raise UserError(_after_training(context, error)) from error
        except _Asked:
            stopping = True
        except Exception as error:  # whatever the error, the training before it is done
            raise OrtflowError(_after_training(context, error)) from error
        else:
            for fault in write_notes(path.parent, context.plan.classes, context.stream.fields):
                context.monitor.warn(fault)
            context.events.write("export", path=str(path), max_difference=difference)
            print(f"exported {path}, {deviation(difference)}", flush=True)
            _write_variants(context, path)
            _export_best(context, path)
        finally:
            if lending is not None:
                lending.after_export()
    elif lending is not None:
        lending.lend()
    if context.world.broadcast_object(stopping):
        context.leave(context.stop.reason or "another rank")


def _export_best(context: Context, path: Path) -> None:
    """Export the best checkpoint beside the last model; rank 0, after its own trainer has given back its memory.

    Raises OrtflowError if that fails: training is done, and `ortflow export --step` tries again.
    """
    best = best_of(context.spec.checkpoint.best, context.progress.to_json())
    if best is None:
        return
    to = best_path(path)
    if best["step"] not in DirectoryStore(context.run_dir.root / context.spec.checkpoint.directory).steps():
        context.monitor.warn(f"the best checkpoint, step {best['step']}, could not be saved and is not exported")
        return
    try:
        exported = export_checkpoint(context.run_dir, best["step"], to, with_variants=False)
    except OrtflowError as error:
        again = f"`ortflow export {context.run_dir.root} --step {best['step']}` tries again"
        raise OrtflowError(f"the best checkpoint, step {best['step']}: {error}; {again}") from error
    context.events.write("export_best", path=str(to), max_difference=exported.max_difference, **best)
    print(f"exported {to}, the best by {best['metric']}, of step {best['step']}", flush=True)


def _write_variants(context: Context, path: Path) -> None:
    if not kinds_of(context.spec.export):
        return
    try:
        judge = judge_of(context.spec, context.builder, context.stream)
        for variant in write_variants(path, context.spec.export, measured(context.stream), judge):
            context.events.write("export_variant", **variant.to_json())
            print(f"wrote {variant}", flush=True)
    except UserError as error:
        raise UserError(f"training is done, and {path} is exported, but {error}") from error


class _Asked(Exception):
    """The rank was asked to exit while it waited."""


def _export_when_there_is_room(context: Context, path: Path) -> float | None:
    notice, seconds = Notice(context.run_dir.heartbeat), context.spec.checkpoint.wait_for_room
    while True:
        try:
            return context.trainer.export(path, samples(context), context.spec.export.tolerance)
        except OutOfDisk as lack:
            context.monitor.warn(f"{lack}: training is done and saved; waiting {seconds:g} s for disk space to export")
            if not wait_for_room(lack, notice, seconds, lambda: context.stop, context.clock):
                if context.stop:
                    raise _Asked from None
                raise


def output(context: Context) -> Path:
    """The file that the run exports."""
    return context.run_dir.root / context.spec.export.path


def _after_training(context: Context, error: Exception) -> str:
    reason = str(error) if isinstance(error, OrtflowError) else f"{type(error).__name__}: {error}"
    store = DirectoryStore(context.run_dir.root / context.spec.checkpoint.directory)
    step = context.progress.step
    return (
        f"training is done and saved in {store.place(step)}, but the export failed: {reason}; "
        f"`ortflow export {context.run_dir.root}` tries again"
    )


def deviation(difference: float | None) -> str:
    """Describe the difference between the exported and the trained model."""
    return (
        "not compared: no samples"
        if difference is None
        else f"largest difference from the trained model {difference:.2g}"
    )


def samples(context: Context) -> list[MicroBatch]:
    """A few real micro-batches, of the evaluation set if there is one."""
    return list(islice(context.stream.samples(), CHECKED_BATCHES))


def measured(stream: Stream) -> list[MicroBatch]:
    """Micro-batches that further forms are measured on."""
    return list(islice(stream.samples(), MEASURED_BATCHES))


def judge_of(spec: TrainerRunSpec, builder: TrainerBuilder, stream: Stream) -> Judge | None:
    """What measures the metrics of further forms; None if the trainer cannot.

    The metric of `checkpoint.best` decides, else the first of `model.metrics` that is a number, else the loss.
    """
    if not isinstance(builder, Scoring) or not kinds_of(spec.export):
        return None
    metrics = spec.model.metrics if spec.model is not None else []
    numbers = [metric.key for metric in metrics if METRICS[metric.name].is_number]
    name = spec.checkpoint.best.metric.rpartition("/")[2] if spec.checkpoint.best else (*numbers, "loss")[0]
    batches = lambda: islice(stream.samples(), EVALUATED_BATCHES)  # noqa: E731
    return Judge(builder.output_metrics().of, batches, name, higher_is_better(name, metrics))


def export_checkpoint(run_dir: RunDir, step: int | None, path: Path | None, *, with_variants: bool = True) -> Exported:
    """Export the inference model of a checkpoint, the newest complete one if `step` is None; one process, no MPI.

    `with_variants`: also write the forms that the run file wants.

    Raises UserError if the run has no such checkpoint, or if the difference exceeds the run file's tolerance.
    """
    spec = trainer_run(moved(load_run_file(run_dir.run_file, others=False), run_dir.root), "ortflow export")
    with whole(run_dir, spec) as (builder, plan):
        trainer = builder.open(SoloCommunicator(), CpuDevice(), os.cpu_count() or 1, (), training=False)
        check_capabilities(trainer, spec)
        targets = {name: window_for(buffer) for name, buffer in trainer.state().items()}
        store = DirectoryStore(run_dir.root / spec.checkpoint.directory)
        if (run := recorded_identity(run_dir, spec)) is not None:
            refuse_other_runs(store, run, COPIED)
        loaded = find(store, step, targets, trainer.index)
        exchange_average(trainer, spec)
        path = path or run_dir.root / spec.export.path
        batches: list[MicroBatch] = []
        stream = None
        measuring: list[MicroBatch] = []
        judge = None
        if are_there(spec.data.eval or spec.data.train):
            place = Place(0, 1, 0, 1, "none", "")
            # Samples are those of the first set; others may be gone.
            data = spec.data.model_copy(update={"eval_sets": {}})
            stream = Stream(spec.model_copy(update={"data": data}), plan, *builder.inputs(), place, Progress())
            batches = list(islice(stream.samples(), CHECKED_BATCHES))
            measuring = measured(stream) if with_variants and kinds_of(spec.export) else []
            judge = judge_of(spec, builder, stream) if measuring else None
        difference = trainer.export(path, batches, spec.export.tolerance)
        for fault in write_notes(path.parent, plan.classes, stream.fields if stream is not None else {}):
            print(f"warning: {fault}", file=sys.stderr)
        variants = tuple(write_variants(path, spec.export, measuring, judge)) if with_variants else ()
        if stream is not None:
            stream.close()
    return Exported(path, loaded.manifest.step, difference, variants)


@contextmanager
def whole(run_dir: RunDir, spec: TrainerRunSpec) -> Iterator[tuple[TrainerBuilder, Plan]]:
    """The prepared trainer and the plan of the run, as a context. Files that have changed since are rebuilt beside
    them.

    The run directory is not changed: the run may be in progress. The rebuild is reported only if the block succeeds, so
    that an error message states one cause.
    """
    plan = None
    try:
        plan = Plan.load(run_dir.plan)
        fault = damage(run_dir.graphs, plan.graphs) if plan.graphs else None
    except (OSError, ValueError) as error:
        fault = f"{run_dir.plan} cannot be read ({getattr(error, 'strerror', None) or error})"
    if plan is not None and fault is None:
        yield builder_of(spec, run_dir, Report()), plan
        return
    with tempfile.TemporaryDirectory() as folder:
        scratch = RunDir(Path(folder))
        export = spec.export.model_copy(update={"enabled": True, "path": str(scratch.root / "model.onnx")})
        spec = spec.model_copy(update={"export": export})
        if spec.model is not None and spec.model.start_from is not None:
            _take_start(run_dir.graphs, scratch.graphs)
        builder = builder_of(spec, scratch, Report())
        prepare(builder, scratch, spec, Report())
        yield builder, Plan.load(scratch.plan)
    print(f"warning: {fault}: plan and graphs were rebuilt for this export", file=sys.stderr)


def _take_start(graphs: Path, copies: Path) -> None:
    """Copy what the run keeps of the weights that it started with: their file may be gone."""
    copies.mkdir()
    for name in (RECORD, FILE, "initial.safetensors"):
        if (graphs / name).is_file():
            shutil.copyfile(graphs / name, copies / name)


def find(store: DirectoryStore, step: int | None, targets: Mapping[str, Window], index: FlatIndex) -> Loaded:
    """Fill `targets` from a complete checkpoint, of `step` or the newest. Raises UserError if there is none."""
    steps = ", ".join(map(str, store.steps())) or "none"
    if step is None:
        loaded = load_newest(store, targets, index=index, partial=True)
        if loaded is None:
            raise UserError(f"no complete checkpoint (existing steps: {steps})", where=str(store.path))
        return loaded
    if step not in store.steps():
        raise UserError(f"no checkpoint of step {step}", where=str(store.path), fix=f"choose of: {steps}")
    try:
        return load(store, step, targets, index=index, partial=True)
    except Damaged as fault:
        raise UserError(fault.reason, where=str(fault.path), fix="choose another step") from fault
