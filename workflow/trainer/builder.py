"""The builder of the trainer `graph`: checks the runtime, makes the graphs of a run, and opens sessions over them.

Named by `ortflow.workflow.steps.trainers`. A restart keeps the graphs of the previous attempt if nothing they were made
from has changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.comm import Communicator
from ortflow.workflow.data.inputs import BatchInput, LabelSequences, Limits
from ortflow.workflow.device import Device
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.head import check_export
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.layout import TRAINED
from ortflow.workflow.parallel.division import folder_of
from ortflow.workflow.parallel.stage import StageSet
from ortflow.workflow.run.graph_hashes import damage, hashes_of
from ortflow.workflow.sessions.settings import Settings, merged
from ortflow.workflow.spec.base import Section
from ortflow.workflow.spec.losses import ClassLoss, Ctc, Divergence, Hinge, Poisson, TargetLoss
from ortflow.workflow.spec.metric_targets import Compared, compared
from ortflow.workflow.spec.metrics import METRICS
from ortflow.workflow.spec.model import single_losses
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import Metrics, Prepared, Trainer, TrainerBuilder, TrainerContext
from ortflow.workflow.trainer.fingerprint import fingerprint_of
from ortflow.workflow.trainer.model_errors import about_model
from ortflow.workflow.trainer.sample_lengths import lengths_of, longest_sequence
from ortflow.workflow.weights.kept import read_record

if TYPE_CHECKING:
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

        runtime = runtime_here()
        outcome = runtime.outcome
        self._report.record(
            "runtime_check",
            package=runtime.package,
            version=runtime.version,
            settings=str(outcome.settings),
            faults=dict(outcome.faults),
            seconds=None if runtime.seconds is None else round(runtime.seconds, 6),
        )
        if outcome.faults:
            wrong = "; ".join(f"{need} ({fault})" for need, fault in outcome.faults.items())
            self._report.warn(
                f"{runtime.package} {runtime.version} computes wrong results: {wrong}; sessions are opened without: "
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
        from ortflow.workflow.assembly.first_samples import timing_of
        from ortflow.workflow.assembly.updates import write_updates

        spec = self._spec
        timing = timing_of(spec, dataset) if self._context.starting else None
        try:
            graphs = build_graphs(
                spec, self._context.folder, longest_sequence(dataset), lengths, timing, resumed=self._resumed
            )
        except UserError as error:
            raise about_model(error, spec) from error
        write_updates(graphs, spec)
        return graphs

    def _report_stages(self) -> None:
        """The event `stages`, if the model has some."""
        section = self._spec.parallel
        if section.pipeline == 1:
            return
        stages = StageSet.load(folder_of(self._context.folder, 0)).stages
        costs = [stage.cost for stage in stages if stage.cost is not None]
        seconds = [cost.seconds for cost in costs]
        cuts, earlier_names = list[list[str]](), set[str]()
        for stage in stages[:-1]:
            cuts.append([value.name for value in stage.sends if value.name not in earlier_names])
            earlier_names.update(cuts[-1])
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
        signs = [loss.label for loss in losses if isinstance(loss, Hinge)]
        classes = [loss.label for loss in losses if isinstance(loss, ClassLoss)]
        counts = [loss.label for loss in losses if isinstance(loss, Poisson)]
        sequences = {
            loss.label: LabelSequences(loss.blank, loss.target_lengths) for loss in losses if isinstance(loss, Ctc)
        }
        model = self._spec.onnx_model
        comparisons = [compared(metric, model.loss) for metric in model.metrics if METRICS[metric.name].tasks]
        truths += [c.label for c in comparisons if isinstance(c, Compared) and c.task == "targets"]
        classes += [c.label for c in comparisons if isinstance(c, Compared) and c.task == "classes"]
        ignored = next((loss.ignore_index for loss in losses if isinstance(loss, ClassLoss)), None)
        return graphs.inputs, Limits(
            graphs.vocabulary,
            ignored,
            truths=truths,
            signs=signs,
            classes=classes,
            counts=counts,
            sequences=sequences,
        )

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


def _check_export(path: Path, spec: TrainerRunSpec) -> None:
    """Raise UserError if the export would replace the model to train, or a file that ortflow has not written."""
    model = Path(spec.onnx_model.path)
    if path.exists() and model.exists() and path.samefile(model):
        raise UserError(f"{path} is the model to train", where="export.path", fix="choose another path")
    check_export(path)
