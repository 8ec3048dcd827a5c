"""Step 1: from the run file to graphs and plan. Done once, by rank 0; the others read what it wrote.

A restart finds the graphs of the attempt before and keeps them while nothing they were made from has changed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ortflow import __version__
from ortflow.workflow.errors import Faults, OrtflowError, UserError
from ortflow.workflow.events import warn
from ortflow.workflow.graph.head import check_export
from ortflow.workflow.plan import Plan, resolve
from ortflow.workflow.rundir import RunDir, write_atomically
from ortflow.workflow.spec.check import RESERVED
from ortflow.workflow.spec.run import RunSpec
from ortflow.workflow.steps.context import Context
from ortflow.workflow.steps.runtime_check import check_runtime
from ortflow.workflow.trainer import GRADIENT_GRAPH

if TYPE_CHECKING:
    from ortflow.workflow.data.dataset import Dataset
    from ortflow.workflow.graph.types import GraphSet


CHOOSE = "choose another path"


def configure(context: Context) -> None:
    """Build or reuse the graphs and write the plan; a fault waits until all ranks can hear of it."""
    if not context.leads:
        return
    try:
        context.settings = check_runtime(context)
        notes, warnings = prepare(context.run_dir, context.spec)
        for line in notes:
            print(line, flush=True)
        for message in warnings:
            warn(context.events, message)
    except OrtflowError as error:
        context.trouble = error


def prepare(run_dir: RunDir, spec: RunSpec) -> tuple[list[str], list[str]]:
    """Graphs and plan in the run directory; returns what is worth a line in the log, and what is worth a warning."""
    from ortflow.workflow.data.dataset import Dataset
    from ortflow.workflow.graph.autodiff.compose import compose
    from ortflow.workflow.graph.build import build_graphs
    from ortflow.workflow.graph.kept import damage, hashes_of
    from ortflow.workflow.graph.types import GraphSet, with_kernels_of
    from ortflow.workflow.kernels.graph import with_kernels
    from ortflow.workflow.optim.gradient import gradient_graph
    from ortflow.workflow.optim.graph import optimizer_graph
    from ortflow.workflow.optim.segments import segments

    if spec.export.enabled:
        check_outputs(run_dir, spec)
    fingerprint = fingerprint_of(spec)
    notes: list[str] = []
    warnings: list[str] = []
    before = plan_before(run_dir, warnings)
    dataset = Dataset.open(Path(spec.data.train.path))
    samples = len(dataset)
    if before is not None and before.samples != samples and saved(run_dir, spec):
        raise UserError(
            f"{spec.data.train.path} holds {samples} samples, and this run was begun with {before.samples}: "
            "the order of an epoch would be another",
            where="data.train.path",
            fix="give the set it was begun with, or start anew with --fresh or another name (name=NAME)",
        )
    fault = None
    if before is not None and before.fingerprint == fingerprint:
        fault = damage(run_dir.graphs, before.graphs)
        if fault is not None:
            warnings.append(f"{fault}: the graphs are built again")
    if before is not None and before.fingerprint == fingerprint and fault is None:
        graphs, hashes = GraphSet.load(run_dir.graphs), before.graphs
    else:
        run_dir.plan.unlink(missing_ok=True)
        try:
            graphs = build_graphs(spec, "cpu", run_dir.graphs, longest_sequence(dataset))
        except UserError as error:
            raise about_model(error, spec) from error
        notes += graphs.notes
        warnings += graphs.warnings
        if not graphs.own_optimizer:
            model = optimizer_graph(spec.train.optimizer, segments(spec.train.optimizer, graphs.index))
            for path, each in ((graphs.optimizer, model), (with_kernels_of(graphs.optimizer), with_kernels(model))):
                write_atomically(path, compose(each).SerializeToString())
        if spec.on_gpus:
            write_forms(graphs)
        gradient, scaling = graphs.root / GRADIENT_GRAPH, gradient_graph()
        for path, each in ((gradient, scaling), (with_kernels_of(gradient), with_kernels(scaling))):
            write_atomically(path, each.SerializeToString())
        hashes = hashes_of(graphs.root)
    trained = sum(e.tensor.count for e in graphs.index if e.tensor.group in ("decay", "no_decay"))
    plan = resolve(spec, samples=samples, parameters=trained, fingerprint=fingerprint, graphs=hashes)
    plan.save(run_dir.plan)
    return notes, warnings


def write_forms(graphs: GraphSet) -> None:
    """Training and optimizer graph as GPUs run them: with ONNX Runtime's kernels alone, and with fused ones."""
    import onnx

    from ortflow.workflow.fusion.groups import fuse
    from ortflow.workflow.graph.on_cuda import on_cuda
    from ortflow.workflow.graph.types import fused_of, on_cuda_of

    train = on_cuda(onnx.load(graphs.train))
    write_atomically(on_cuda_of(graphs.train), train.SerializeToString())
    for path, model in ((graphs.train, train), (graphs.optimizer, onnx.load(graphs.optimizer))):
        fused, taken = fuse(model)
        if taken:
            write_atomically(fused_of(path), fused.SerializeToString())


def plan_before(run_dir: RunDir, warnings: list[str]) -> Plan | None:
    """The plan that an earlier attempt left; None where there is none, or none that can be read, and a warning then."""
    try:
        return Plan.load(run_dir.plan)
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        warnings.append(f"{run_dir.plan} cannot be read ({error}): plan and graphs are made again")
        return None


def about_model(error: UserError, spec: RunSpec) -> UserError:
    """A refusal of the model with both the key of the run file and the file that it is about. Pure."""
    if isinstance(error, Faults):
        return Faults([about_model(fault, spec) for fault in error.faults])
    files = {"model.path": spec.model.path}
    files |= {f"model.graphs.{key}": path for key, path in spec.model.graphs.model_dump().items() if path}
    keys = {path: key for key, path in reversed(files.items())}
    key = keys.get(error.where or "", "model.path" if error.where in (None, "model") else error.where)
    if key == "run_dir":
        return error
    return UserError(f"{files.get(str(key), spec.model.path)}: {error.what}", where=key, fix=error.fix)


def longest_sequence(dataset: Dataset) -> int:
    """Length of the longest column of one axis; 0 where there is none of one length."""
    return max((column.shape[0] for column in dataset.columns.values() if len(column.shape) == 1), default=0)


def check_outputs(run_dir: RunDir, spec: RunSpec) -> None:
    """Raise UserError where the export at the end would replace what ortflow has not written, or the model itself."""
    path, model = run_dir.root / spec.export.path, Path(spec.model.path)
    if path.exists() and model.exists() and path.samefile(model):
        raise UserError(f"{path} is the model to train", where="export.path", fix="choose another path")
    inside = path.relative_to(run_dir.root).parts if path.is_relative_to(run_dir.root) else ()
    if inside and inside[0] in RESERVED:
        raise UserError(f"{path} is a place that the run directory needs itself", where="export.path", fix=CHOOSE)
    check_export(path)


def saved(run_dir: RunDir, spec: RunSpec) -> bool:
    """Whether the run goes on from a checkpoint."""
    from ortflow.workflow.checkpoint.store import DirectoryStore

    return bool(DirectoryStore(run_dir.root / spec.checkpoint.directory).steps())


def fingerprint_of(spec: RunSpec) -> str:
    """A hash of everything the graphs are made from: model file, its section, the optimizer, us.

    The learning rate is an input of the optimizer's graph.
    """
    made_from = {
        "version": __version__,
        "model": spec.model.model_dump(mode="json"),
        "optimizer": spec.train.optimizer.model_dump(mode="json", exclude={"lr"}),
        "last_batch": spec.data.last_batch,
        "device": "cuda" if spec.on_gpus else "cpu",
        "files": [
            (path, Path(path).stat().st_size, Path(path).stat().st_mtime_ns)
            for path in (spec.model.path, *filter(None, spec.model.graphs.model_dump().values()))
            if Path(path).exists()
        ],
    }
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
