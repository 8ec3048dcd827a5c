"""Step 3: open the data, check it against the model, and go to the place where the run stands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ortflow.workflow.data.batches import Batches, StepBatch, evaluation_batches, sample_order
from ortflow.workflow.data.check import Limits, check_inputs
from ortflow.workflow.data.dataset import Dataset
from ortflow.workflow.data.feed import Feed
from ortflow.workflow.data.plan import Position
from ortflow.workflow.errors import Faults, UserError
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.plan import Plan
from ortflow.workflow.progress import Progress
from ortflow.workflow.ranks import Place
from ortflow.workflow.spec.data import DataSection, DataSet
from ortflow.workflow.spec.model import BinaryCrossEntropy, CrossEntropy
from ortflow.workflow.spec.run import RunSpec
from ortflow.workflow.steps.context import Context
from ortflow.workflow.steps.gradient import check_gradient
from ortflow.workflow.steps.tokens import count_tokens, token_labels
from ortflow.workflow.trainer import MicroBatch

Source = tuple[Dataset, tuple[Feed, ...]]


class Stream:
    """This rank's samples: training from the run's position on, the evaluation set as often as it is asked for.

    Raises Faults where the data does not fit the model.
    """

    def __init__(self, spec: RunSpec, plan: Plan, graphs: GraphSet, place: Place, progress: Progress) -> None:
        self._spec, self._place, self._graphs = spec, place, graphs
        section = spec.data
        self._token_labels = token_labels(graphs.inputs)
        (dataset, feeds), self._held_out = self._open_both(section)
        batches = Batches(
            dataset,
            sample_order(dataset, section, spec.seed),
            feeds,
            micro_batch=plan.micro_batch,
            accumulation=plan.gradient_accumulation,
            rank=place.rank,
            world_size=place.world_size,
            last_batch=section.last_batch,
        )
        self._training = batches.read_from(Position(progress.epoch, progress.sample))

    def _open_both(self, section: DataSection) -> tuple[Source, Source]:
        """Training set and held-out set (the training set where there is no other); tells all faults of both."""
        faults: list[UserError] = []
        sources: list[Source] = []
        sets = [(section.train, "data.train"), *([(section.eval, "data.eval")] if section.eval else [])]
        for data, where in sets:
            try:
                sources.append(self._open(data, where))
            except Faults as error:
                faults += error.faults
            except UserError as error:
                faults.append(error)
        if faults:
            raise Faults(faults)
        return sources[0], sources[-1]

    def _open(self, data: DataSet, where: str) -> Source:
        section, loss = self._spec.data, self._spec.model.loss
        dataset = Dataset.open(Path(data.path))
        evaluating = where == "data.eval"
        micro_batch = self._evaluation_batch if evaluating else section.micro_batch
        limits = Limits(
            self._graphs.vocabulary,
            loss.ignore_index if isinstance(loss, CrossEntropy) else None,
            section.pad_value,
            [loss.label] if isinstance(loss, BinaryCrossEntropy) else [],
        )
        feeds = check_inputs(
            dataset,
            self._graphs.inputs,
            data.columns,
            limits,
            micro_batch=micro_batch,
            smaller_batch=section.last_batch == "keep" or (evaluating and section.last_batch == "drop"),
            samples=section.eval_samples if evaluating else None,
            where=where,
        )
        return dataset, feeds

    @property
    def _evaluation_batch(self) -> int:
        return self._spec.data.eval_micro_batch or self._spec.data.micro_batch

    def next(self) -> StepBatch:
        """The next step's micro-batches; endless."""
        return next(self._training)

    def tokens(self, batch: StepBatch, samples: int) -> int | None:
        """Tokens among the samples of a step over all ranks; None where the model has none."""
        return count_tokens(batch.micro_batches, self._token_labels, self._spec.model.loss, samples)

    def evaluation(self) -> Iterator[MicroBatch]:
        """This rank's part of the evaluation set, once."""
        mode = self._spec.data.eval_mode
        return self._held_out_batches(self._place.rank, self._place.world_size, mode == "replicated")

    def samples(self) -> Iterator[MicroBatch]:
        """The held-out samples from the first one on, whatever the rank; of the training set where none is held out."""
        return self._held_out_batches(0, 1, replicated=True)

    def _held_out_batches(self, rank: int, world_size: int, replicated: bool) -> Iterator[MicroBatch]:
        dataset, feeds = self._held_out
        section = self._spec.data
        reader = evaluation_batches(
            dataset,
            feeds,
            micro_batch=self._evaluation_batch,
            rank=rank,
            world_size=world_size,
            mode="replicated" if replicated else "partitioned",
            last_batch=section.last_batch,
            samples=section.eval_samples,
        )
        with reader:
            yield from reader

    def close(self) -> None:
        """Stop reading ahead."""
        self._training.close()


def shard(context: Context) -> None:
    """Open this rank's part of the data at the run's position; with real samples, try the export and the gradient."""
    from ortflow.workflow.steps.export import try_export

    context.stream = Stream(context.spec, context.plan, context.graphs, context.place, context.progress)
    try_export(context)
    context.leave_if_asked()
    check_gradient(context)
    context.trainer.give_memory_back()
