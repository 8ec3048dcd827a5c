"""The graphs of a run in a temporary folder, and its first micro-batch, as its ranks would have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.run.rundir import RunDir, scratch_folder
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import MicroBatch, TrainerBuilder


@dataclass(frozen=True)
class Built:
    """What step `configure` makes."""

    run_dir: RunDir
    builder: TrainerBuilder
    graphs: GraphSet
    batch: MicroBatch
    """The first of rank 0."""
    length: int
    """Length of the longest column with a single axis; 0 if there is none."""
    lengths: Mapping[str, int]
    """Input -> length of its samples, if all have the same."""
    warnings: tuple[str, ...] = ()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the batch."""
        return {name: array.shape for name, array in self.batch.arrays.items()}

    @property
    def bytes(self) -> int:
        """Bytes of the batch."""
        return sum(array.nbytes for array in self.batch.arrays.values())


@contextmanager
def built(spec: TrainerRunSpec) -> Iterator[Built]:
    """Build the graphs of a run with absolute paths, and remove them afterwards.

    If the run has started, its record of the nodes' costs is in the folder of the graphs.

    Raises
    ------
    UserError
        If its model or data is unusable, or its trainer is another one than `graph`.
    """
    from ortflow.workflow.assembly.timing import copy_record
    from ortflow.workflow.data.sources import open_training
    from ortflow.workflow.ranks import Place
    from ortflow.workflow.run.progress import Progress
    from ortflow.workflow.steps.configure import prepare
    from ortflow.workflow.steps.run_plan import Plan
    from ortflow.workflow.steps.shard import Stream
    from ortflow.workflow.steps.trainers import builder_of
    from ortflow.workflow.trainer import Report
    from ortflow.workflow.trainer.sample_lengths import lengths_of, longest_sequence

    if spec.trainer.name != "graph":
        raise UserError(
            f"is {spec.trainer.name}, and memory is predicted only for the trainer graph",
            where="trainer.name",
            fix="start the run: its event memory reports it",
        )
    warnings: list[str] = []
    # Nothing is fsynced in a scratch folder: the graphs of a small GPT cost 37 calls, seconds on a slow disk.
    with scratch_folder("ortflow-plan-") as folder:
        run_dir, report = RunDir(folder), Report(warn=warnings.append)
        if spec.run_dir is not None:
            copy_record(RunDir(Path(spec.run_dir)).graphs, run_dir.graphs)
        builder = builder_of(spec, run_dir, report)
        prepare(builder, run_dir, spec, report)
        place = Place(0, spec.world_size, 0, spec.resources.ranks_per_node, "none", "localhost")
        stream = Stream(spec, Plan.load(run_dir.plan), *builder.inputs(), place, Progress())
        try:
            batch = stream.next().micro_batches[0]
        finally:
            stream.close()
        dataset = open_training(spec.data, spec.seed)
        length, lengths = longest_sequence(dataset), lengths_of(dataset, spec.data.train.references)
        yield Built(run_dir, builder, GraphSet.load(run_dir.graphs), batch, length, lengths, tuple(warnings))
