"""The builder of the trainer `graph`: checks the runtime, makes the graphs of a run, and opens sessions over them.

Named by `ortflow.workflow.trainers`. A restart keeps the graphs of the previous attempt if nothing they were made from
has changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ortflow import __version__
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.comm import Communicator
from ortflow.workflow.data.inputs import BatchInput, Limits
from ortflow.workflow.device import Device
from ortflow.workflow.errors import Faults, UserError
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.head import check_export
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.graph_hashes import damage, hashes_of
from ortflow.workflow.layout import TRAINED
from ortflow.workflow.parallel.division import folder_of
from ortflow.workflow.parallel.stage import StageSet
from ortflow.workflow.rundir import write_atomically
from ortflow.workflow.sessions.settings import Settings, merged
from ortflow.workflow.spec.base import Section
from ortflow.workflow.spec.losses import ClassLoss, CrossEntropy, Divergence, Focal, TargetLoss
from ortflow.workflow.spec.mapping import ColumnReference, parse_reference
from ortflow.workflow.spec.metric_targets import Compared, compared
from ortflow.workflow.spec.metrics import METRICS
from ortflow.workflow.spec.model import ModelSection, single_losses
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import Metrics, Prepared, Trainer, TrainerBuilder, TrainerContext
from ortflow.workflow.weights.kept import read_record

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ortflow.workflow.assembly.timing import Timing
    from ortflow.workflow.data.samples import Samples
    from ortflow.workflow.sessions.session import Sessions


class GraphBuilder(TrainerBuilder):
    """See the protocol."""

    Options = Section

    def __init__(self, context: TrainerContext) -> None:
        self._context, self._spec, self._report = context, context.spec, context.report

    def check_machine(self) -> Settings:
        """The machine's result for sessions. Raises UserError if the runtime of this machine is unusable."""
        from ortflow.workflow.runtime_check.remember import runtime_here

        found = runtime_here()
        outcome = found.outcome
        self._report.record(
            "runtime_check",
            package=found.package,
            version=found.version,
            settings=str(outcome.settings),
            faults=dict(outcome.faults),
            seconds=None if found.seconds is None else round(found.seconds, 6),
        )
        if outcome.faults:
            wrong = "; ".join(f"{need} ({fault})" for need, fault in outcome.faults.items())
            self._report.warn(
                f"{found.package} {found.version} computes wrong results: {wrong}; sessions are opened without: "
                f"{outcome.settings}"
            )
        return outcome.settings

    def prepare(self, dataset: Samples, before: Prepared | None) -> Prepared:
        """The graphs: those of the previous attempt if they are complete and nothing has changed, else new ones."""
        spec, folder = self._spec, self._context.folder
        if self._context.export_path is not None:
            _check_export(self._context.export_path, spec)
        lengths = lengths_of(dataset, spec.data.train.references)
        depends = spec.parallel.sequence_parallel or spec.on_gpus
        fingerprint = fingerprint_of(spec, lengths if depends else {})
        if before is not None and before.fingerprint == fingerprint and self._starts_as_before():
            fault = damage(folder, before.files)
            if fault is None:
                return before
            self._report.warn(f"{fault}: the graphs are rebuilt")
        graphs = self._build(dataset, lengths)
        for line in graphs.notes:
            self._report.note(line)
        for message in graphs.warnings:
            self._report.warn(message)
        if (started := read_record(folder)) is not None:
            self._report.record("start_from", path=started.section["path"], digest=started.digest)
        self._report_stages()
        trained = sum(e.tensor.count for e in graphs.index if e.tensor.group in TRAINED)
        return Prepared(trained, fingerprint, hashes_of(folder))

    def _starts_as_before(self) -> bool:
        """Whether the weights that the run starts with are those of the graphs, or are no longer needed."""
        if self._spec.onnx_model.start_from is None or self._resumed:
            return True
        record = read_record(self._context.folder)
        return record is not None and record.is_current

    @property
    def _resumed(self) -> bool:
        """Whether the run continues from a checkpoint."""
        folder = self._context.folder.parent / self._spec.checkpoint.directory
        return bool(DirectoryStore(folder).steps())

    def _build(self, dataset: Samples, lengths: Mapping[str, int]) -> GraphSet:
        from ortflow.workflow.assembly.build import build_graphs
        from ortflow.workflow.graph.autodiff.compose import compose
        from ortflow.workflow.kernels.graph import with_kernels
        from ortflow.workflow.optim.gradient import gradient_graph
        from ortflow.workflow.optim.graph import optimizer_graph
        from ortflow.workflow.optim.segments import segments_of

        spec = self._spec
        timing = timing_of(spec, dataset) if self._context.starting else None
        try:
            graphs = build_graphs(
                spec, self._context.folder, longest_sequence(dataset), lengths, timing, resumed=self._resumed
            )
        except UserError as error:
            raise about_model(error, spec) from error
        if not graphs.user_optimizer_graph:
            rule, cuts = spec.train.optimizer, segments_of(spec.train, graphs.index)
            plain, own = optimizer_graph(rule, cuts), with_kernels(optimizer_graph(rule, cuts, kernels=True))
            for path, each in ((graphs.optimizer, plain), (Form.KERNELS.of(graphs.optimizer), own)):
                write_atomically(path, compose(each).SerializeToString())
        if spec.on_gpus:
            write_forms(graphs, spec.train.precision)
        scaling = gradient_graph()
        for path, each in ((graphs.gradient, scaling), (Form.KERNELS.of(graphs.gradient), with_kernels(scaling))):
            write_atomically(path, each.SerializeToString())
        return graphs

    def _report_stages(self) -> None:
        """The event `stages`, if the model has some."""
        section = self._spec.parallel
        if section.pipeline == 1:
            return
        stages = StageSet.load(folder_of(self._context.folder, 0)).stages
        costs = [stage.cost for stage in stages if stage.cost is not None]
        seconds = [cost.seconds for cost in costs]
        cuts, known = list[list[str]](), set[str]()
        for stage in stages[:-1]:
            cuts.append([value.name for value in stage.sends if value.name not in known])
            known.update(cuts[-1])
        self._report.record(
            "stages",
            chosen="named" if section.cuts is not None else "counted" if None in seconds else "measured",
            cuts=cuts,
            stage_seconds=seconds,
            operations=[cost.operations for cost in costs],
            sent_bytes=[cost.sent for cost in costs[:-1]],
        )

    def inputs(self) -> tuple[Sequence[BatchInput], Limits]:
        """The training and the evaluation graph."""
        graphs, losses = GraphSet.load(self._context.folder), single_losses(self._spec.onnx_model.loss).values()
        truths = [loss.label for loss in losses if isinstance(loss, TargetLoss | Divergence)]
        classes = [loss.label for loss in losses if isinstance(loss, ClassLoss)]
        model = self._spec.onnx_model
        found = [compared(metric, model.loss) for metric in model.metrics if METRICS[metric.name].tasks]
        truths += [each.label for each in found if isinstance(each, Compared) and each.task == "targets"]
        classes += [each.label for each in found if isinstance(each, Compared) and each.task == "classes"]
        ignored = next((loss.ignore_index for loss in losses if isinstance(loss, ClassLoss)), None)
        return graphs.inputs, Limits(graphs.vocabulary, ignored, truths=truths, classes=classes)

    def output_metrics(self) -> Metrics:
        """What evaluates the outputs of a model file; see `Scoring`."""
        from ortflow.workflow.trainer.output_metrics import OutputMetrics

        return OutputMetrics(self._context.folder / "eval.onnx", self._spec.onnx_model)

    def open(
        self,
        communicator: Communicator,
        device: Device,
        threads: int,
        machines: Sequence[Settings],
        *,
        training: bool = True,
    ) -> Trainer:
        """Sessions on the device, with what any of the machines needs, and the parameters of the model file."""
        from ortflow.workflow.kernels.library import library_for
        from ortflow.workflow.sessions.session import Sessions
        from ortflow.workflow.trainer.opening import open_trainer
        from ortflow.workflow.trainer.tensors import FileTensors

        graphs, spec = GraphSet.load(self._context.folder), self._spec
        library = library_for(spec.kernels) if training else None
        sessions = Sessions(
            device,
            threads,
            spec.monitor.runtime_log,
            library.path if library else None,
            merged(machines),
            fuse=spec.resources.kernels == "auto",
        )
        if training and spec.divides:
            from ortflow.workflow.trainer.divided_opening import open_divided

            return open_divided(graphs, spec, sessions, communicator, self._report)
        if training and spec.synced_ranks:
            _connect(sessions, communicator)
        trainer = open_trainer(graphs, spec, sessions, communicator, self._report, training=training)
        if training:
            trainer.load_tensors(FileTensors(graphs.initial))
        if library is not None and communicator.rank == 0:
            self._report.note(f"CPU kernels: {library.note}")
        return trainer


def timing_of(spec: TrainerRunSpec, dataset: Samples) -> Timing:
    """How to time the nodes of the model: on the first samples of the training set."""
    import numpy as np

    from ortflow.workflow.assembly.timing import Timing
    from ortflow.workflow.cores import cores_per_rank
    from ortflow.workflow.data.check import check_inputs
    from ortflow.workflow.data.feed import collate

    rows, data = spec.data.micro_batch, spec.data

    def batch(inputs: Sequence[BatchInput]) -> Mapping[str, npt.NDArray[np.generic]]:
        limits = Limits(pad_value=data.pad_value)
        columns = data.train.references
        feeds = check_inputs(
            dataset, inputs, columns, limits, micro_batch=rows, smaller_batch=False, where="data.train"
        )  # fmt: skip
        return collate(dataset, feeds, [np.arange(rows) % len(dataset)])[0]

    return Timing(batch, cores_per_rank(spec.resources.cpus_per_rank, spec.resources.ranks_per_node))


def _connect(sessions: Sessions, communicator: Communicator) -> None:
    """Let the graphs' statistics run over the ranks."""
    from ortflow.workflow.kernels.library import remedy
    from ortflow.workflow.parallel.division import STATISTICS
    from ortflow.workflow.sessions.collectives import connect

    if sessions.library is None:
        raise UserError(
            "is true, and this machine has no kernels of ortflow's, which exchange the statistics",
            where="train.sync_batch_norm",
            fix=f"{remedy()}, or set it to false",
        )
    connect(sessions.library, {STATISTICS: communicator})


def write_forms(graphs: GraphSet, precision: str = "fp32") -> None:
    """The graphs of a step for GPUs, with ONNX Runtime's kernels only and with ortflow's, for a `train.precision`."""
    import onnx

    from ortflow.workflow.assembly.gpu_forms import gpu_forms
    from ortflow.workflow.fusion.groups import fuse
    from ortflow.workflow.fusion.half import HALVES
    from ortflow.workflow.fusion.rounded import writing_rounded
    from ortflow.workflow.fusion.scalars import scalars_in_one
    from ortflow.workflow.optim.gradient import queued_gradient_graph
    from ortflow.workflow.optim.guard import guarded

    placed = onnx.load(Form.PLACED.of(graphs.train)) if Form.PLACED.of(graphs.train).exists() else None
    for form, train in gpu_forms(onnx.load(graphs.train), placed).items():
        write_atomically(form.of(graphs.train), train.SerializeToString())
    write_atomically(Form.CUDA.of(graphs.gradient), queued_gradient_graph().SerializeToString())
    write_atomically(Form.CUDA.of(graphs.optimizer), guarded(onnx.load(graphs.optimizer)).SerializeToString())
    update = guarded(onnx.load(graphs.optimizer), multiplied=True)
    if precision in HALVES:
        update = writing_rounded(update, HALVES[precision])
    update, taken = fuse(update)
    if taken:
        scaling = scalars_in_one(queued_gradient_graph(fused=True))
        write_atomically(Form.FUSED.of(graphs.optimizer), scalars_in_one(update)[0].SerializeToString())
        write_atomically(Form.FUSED.of(graphs.gradient), scaling[0].SerializeToString())


def about_model(error: UserError, spec: TrainerRunSpec) -> UserError:
    """Add to an error about the model both the key of the run file and the file. Pure."""
    if isinstance(error, Faults):
        return Faults([about_model(fault, spec) for fault in error.faults])
    model = spec.onnx_model
    files = {"model.path": model.path}
    files |= {f"model.graphs.{key}": path for key, path in model.graphs.model_dump().items() if path}
    keys = {path: key for key, path in reversed(files.items())}
    if error.where in ("model.start_from.path", "model.start_from.step"):
        return error
    if str(error.where).startswith("model.start_from"):
        start = model.start_from.path if model.start_from is not None else ""
        return UserError(f"{start}: {error.what}", where=error.where, fix=error.fix)
    key = keys.get(error.where or "", "model.path" if error.where in (None, "model") else error.where)
    if key == "run_dir":
        return error
    return UserError(f"{files.get(str(key), model.path)}: {error.what}", where=key, fix=error.fix)


def longest_sequence(dataset: Samples) -> int:
    """Length of the longest column with a single axis; 0 if there is none of fixed length."""
    return max((column.shape[0] for column in dataset.columns.values() if len(column.shape) == 1), default=0)


def lengths_of(dataset: Samples, columns: Mapping[str, str]) -> dict[str, int]:
    """Input -> length of its samples, where all have one axis of that length; `columns` as in the run file."""
    references = {name: ColumnReference(name) for name in dataset.columns}
    references |= {name: parse_reference(text, f"data.train.columns.{name}") for name, text in columns.items()}
    found = {}
    for name, reference in references.items():
        column = dataset.columns.get(reference.column)
        if column is not None and len(column.shape) == 1 and not column.variable:
            found[name] = len(range(column.shape[0])[reference.slice])
    return found


def input_files(model: ModelSection) -> list[str]:
    """The files that losses and metrics read."""
    weighted = [each for each in single_losses(model.loss).values() if isinstance(each, CrossEntropy | Focal)]
    weights = [each.class_weights for each in weighted if isinstance(each.class_weights, str)]
    teachers = [each.teacher for each in single_losses(model.loss).values() if isinstance(each, Divergence)]
    return [*weights, *filter(None, teachers)] + [metric.path for metric in model.metrics if metric.path is not None]


def _check_export(path: Path, spec: TrainerRunSpec) -> None:
    """Raise UserError if the export would replace the model to train, or a file that ortflow has not written."""
    model = Path(spec.onnx_model.path)
    if path.exists() and model.exists() and path.samefile(model):
        raise UserError(f"{path} is the model to train", where="export.path", fix="choose another path")
    check_export(path)


def _groups_of(spec: TrainerRunSpec) -> object:
    """What the run file says of groups; a learning rate of its own is a multiple of the optimizer's."""
    train = spec.train
    if not train.groups and train.layer_decay is None and train.optimizer.name != "muon":
        return None
    layers = None if train.layer_decay is None else train.layer_decay.model_dump(mode="json")
    return [[group.model_dump(mode="json") for group in train.groups], layers, train.optimizer.lr]


def fingerprint_of(spec: TrainerRunSpec, lengths: Mapping[str, int] | None = None) -> str:
    """A hash of everything the graphs are made from: model file, its section, optimizer, precision, ortflow's version.

    The learning rate is an input of the optimizer's graph. `lengths` are those that the graphs depend on.
    """
    model = spec.onnx_model
    made_from = {
        "version": __version__,
        "model": model.model_dump(mode="json"),
        "optimizer": spec.train.optimizer.model_dump(mode="json", exclude={"lr"}),
        "groups": _groups_of(spec),
        "averaged": spec.train.average is not None,
        "last_batch": spec.data.last_batch,
        "parallel": spec.parallel.model_dump(exclude={"data", "zero", "schedule"}) if spec.divides else None,
        "synced": spec.synced_ranks,
        "lengths": dict(lengths or {}),
        "device": "cuda" if spec.on_gpus else "cpu",
        "precision": spec.train.precision,
        "files": [
            (path, Path(path).stat().st_size, Path(path).stat().st_mtime_ns)
            for path in (model.path, *filter(None, model.graphs.model_dump().values()), *input_files(model))
            if Path(path).exists()
        ],
    }
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
