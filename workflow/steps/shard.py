"""Step 3: opens the data, checks it against the trainer's inputs, and seeks to the run's position."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ortflow.workflow.data.ahead import WORTHWHILE_SECONDS, ReadAhead
from ortflow.workflow.data.augmented import augmented, like_training
from ortflow.workflow.data.batches import Batches, StepBatch, evaluation_batches, sample_order
from ortflow.workflow.data.check import check_inputs
from ortflow.workflow.data.digest import digest_of
from ortflow.workflow.data.epoch_positions import Position
from ortflow.workflow.data.feed import Feed
from ortflow.workflow.data.inputs import BatchInput, Limits
from ortflow.workflow.data.pooled import pooled
from ortflow.workflow.data.samples import Samples, reading_of
from ortflow.workflow.data.scan import first_not_finite
from ortflow.workflow.data.sources import open_evaluation, open_other, open_training
from ortflow.workflow.data.vocabulary import transforms_of
from ortflow.workflow.data.workers import Workers
from ortflow.workflow.errors import Faults, UserError
from ortflow.workflow.ranks import Place
from ortflow.workflow.run.progress import Progress
from ortflow.workflow.spec.data import DataSection, DataSet, EvalSet
from ortflow.workflow.spec.locations import url_of
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.steps.context import Context
from ortflow.workflow.steps.run_plan import Plan
from ortflow.workflow.steps.tokens import count_tokens, token_labels
from ortflow.workflow.system.cores import cores_per_rank
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer_protocol.capabilities import Prefetching, Releasing

CHECK = "check"
"""Phase of the trainer's check before the first step, which may take longer than the rest of the step."""
Source = tuple[Samples, tuple[Feed, ...]]


class Stream:
    """The samples of this rank's replica: training samples from the run's position, and the evaluation set on request.

    `prefetch` is called with the micro-batches of the next step while one is computed. Raises Faults if the data does
    not fit `inputs` and `limits`.
    """

    def __init__(
        self,
        spec: TrainerRunSpec,
        plan: Plan,
        inputs: Sequence[BatchInput],
        limits: Limits,
        place: Place,
        progress: Progress,
        prefetch: Callable[[Sequence[MicroBatch]], None] | None = None,
    ) -> None:
        self._spec, self._inputs = spec, inputs
        self._replica = spec.grid.place(place.rank).data
        # An export reads all samples alone that the ranks of a run share.
        self._replicas = spec.replicas if place.world_size == spec.world_size else place.world_size
        section = spec.data
        self._limits = replace(limits, pad_value=section.pad_value)
        self._token_labels = token_labels(inputs)
        resources = spec.resources
        cores = cores_per_rank(resources.cpus_per_rank, resources.ranks_per_node)
        self._workers = Workers(cores if section.workers is None else section.workers)
        self.waited, self._begun = 0.0, False
        """Seconds in which steps after the first waited for their samples."""
        self._opened: Samples | None = None
        self._sets = self._open_both(section)
        (dataset, feeds), self._held_out = self._sets
        self._further = {name: self._open(data, f"data.eval_sets.{name}") for name, data in section.eval_sets.items()}
        batches = Batches(
            dataset,
            sample_order(dataset, section, spec.seed),
            feeds,
            micro_batch=plan.micro_batch,
            accumulation=plan.gradient_accumulation,
            rank=self._replica,
            world_size=self._replicas,
            last_batch=section.last_batch,
        )
        self._read = batches.read_from(Position(progress.epoch, progress.sample))
        self._training = self._read if prefetch is None else prefetched(self._read, prefetch)

    def _open_both(self, section: DataSection) -> tuple[Source, Source]:
        """Training set and held-out set (the training set if there is none). Raises Faults with all their problems."""
        faults: list[UserError] = []
        sources: list[Source] = []
        sets = [(section.train, "data.train"), *([(section.eval, "data.eval")] if section.eval else [])]
        for data, key_path in sets:
            try:
                sources.append(self._open(data, key_path))
            except Faults as error:
                faults += error.faults
            except UserError as error:
                faults.append(error)
        if faults:
            raise Faults(faults)
        return sources[0], sources[-1]

    def _open(self, data: DataSet, key_path: str) -> Source:
        section = self._spec.data
        evaluating = key_path != "data.train"
        if evaluating and key_path != "data.eval":
            dataset = open_other(data, section, self._spec.seed, key_path)
            section = section.model_copy(update={"eval": EvalSet.model_validate(data.model_dump())})  # for workers
        else:
            part = (open_evaluation if evaluating else open_training)(section, self._spec.seed)
            dataset = part if part is not None else open_training(section, self._spec.seed)
        if evaluating:
            dataset = like_training(dataset, self._opened, key_path)
        transforms = transforms_of(data, key_path)
        changed = augmented(dataset, transforms, self._spec.seed, key_path) if transforms else dataset
        self._opened = changed if not evaluating else self._opened
        micro_batch = self.evaluation_batch_size if evaluating else section.micro_batch
        feeds = check_inputs(
            changed,
            self._inputs,
            data.references,
            self._limits,
            micro_batch=micro_batch,
            smaller_batch=section.last_batch == "keep" or (evaluating and section.last_batch == "drop"),
            samples=section.eval_samples if evaluating else None,
            key_path=key_path,
        )
        return pooled(changed, section, self._spec.seed, key_path, self._workers), feeds

    def next(self) -> StepBatch:
        """The micro-batches of the next step. Never ends."""
        begun = time.perf_counter()
        batch = next(self._training)
        # The first step's samples have no step before them, during which they could be read.
        if self._begun:
            self.waited += time.perf_counter() - begun
        self._begun = True
        return batch

    def tokens(self, batch: StepBatch, samples: int) -> int | None:
        """Tokens among the samples of a step over all ranks; None if there are none."""
        return count_tokens(batch.micro_batches, self._token_labels, self._limits.ignore_index, samples)

    @property
    def tokens_per_sample(self) -> int | None:
        """Labels of a sample, counted or not; None if their number varies, or if there are no tokens."""
        for feed in self._sets[0][1]:
            if feed.input == self._token_labels:
                column = self._sets[0][0].columns[feed.source.column]
                fixed = len(column.shape) == 1 and not column.variable
                return len(range(column.shape[0])[feed.source.slice]) if fixed else None
        return None

    def evaluation(self, name: str | None = None) -> Iterator[MicroBatch]:
        """The replica's part of the evaluation set, once; `name` is that of a further set."""
        mode = self._spec.data.eval_mode
        source = self._held_out if name is None else self._further[name]
        return self._held_out_batches(self._replica, self._replicas, mode == "replicated", source)

    def samples(self) -> Iterator[MicroBatch]:
        """The held-out samples from the first on, for any rank; training samples if none are held out."""
        return self._held_out_batches(0, 1, replicated=True)

    def _held_out_batches(
        self, replica: int, replicas: int, replicated: bool, source: Source | None = None
    ) -> Iterator[MicroBatch]:
        dataset, feeds = source or self._held_out
        section = self._spec.data
        reader = evaluation_batches(
            dataset,
            feeds,
            micro_batch=self.evaluation_batch_size,
            rank=replica,
            world_size=replicas,
            mode="replicated" if replicated else "partitioned",
            last_batch=section.last_batch,
            samples=section.eval_samples,
        )
        with reader:
            yield from reader

    def not_finite(self) -> list[str]:
        """Columns whose recorded range is NaN or infinite, with the first such sample, and what follows from it."""
        sources = [(self._sets[0], "steps with such samples are skipped")]
        if self._spec.data.eval is not None:
            sources.append((self._sets[-1], "evaluations on it have no finite loss"))
        sources += [(source, "evaluations on it have no finite loss") for source in self._further.values()]
        return [
            f"{text}: {effect}"
            for source, effect in sources
            if source[0].has_ranges and (text := first_not_finite_of(source))
        ]

    def skipped(self) -> list[dict[str, Any]]:
        """Sets with bad rows that are skipped: where, how many of how many, and the first."""
        separate_files = self._spec.data.eval is not None and self._spec.data.eval.fraction is None
        sets = [("data.train", self._sets[0]), *([("data.eval", self._sets[-1])] if separate_files else [])]
        readings = [(key_path, reading_of(source[0]), len(source[0])) for key_path, source in sets]
        return [
            {"set": key_path, "skipped": reading.skipped, "samples": samples, "first": reading.bad_rows[0]}
            for key_path, reading, samples in readings
            if reading.skipped
        ]

    @property
    def fields(self) -> dict[str, Any]:
        """Input -> how the training set makes it, as plain data; empty if its samples are stored as they are."""
        dataset, feeds = self._sets[0]
        columns = reading_of(dataset).fields
        return {feed.input: columns[feed.source.column] for feed in feeds if feed.source.column in columns}

    def first_not_finite(self) -> str:
        """The first sample of the training set with NaN or infinity; empty if there is none."""
        return first_not_finite_of(self._sets[0])

    @property
    def evaluation_batch_size(self) -> int:
        """Samples of a micro-batch of evaluation."""
        return self._spec.data.eval_micro_batch or self._spec.data.micro_batch

    def evaluation_place(self, number: int | None) -> int | None:
        """Among the micro-batches of the whole evaluation set, the place of number `number` of this replica."""
        if number is None or self._spec.data.eval_mode == "replicated":
            return number
        return number * self._replicas + self._replica

    def evaluation_batch(self, place: int) -> MicroBatch:
        """The micro-batch at a place in the whole evaluation set, for any rank."""
        return next(self._held_out_batches(place, place + 1, replicated=False))

    def close(self) -> None:
        """Stop reading training samples."""
        self._training.close()
        self._read.close()
        self._workers.close()


def first_not_finite_of(source: Source) -> str:
    """The first sample of a set with NaN or infinity in a column that an input takes; empty if there is none."""
    dataset, feeds = source
    for feed in feeds:
        if (outlier := first_not_finite(dataset, feed.source)) is not None:
            return f"sample {outlier[0]} of {dataset.path} has {outlier[1]} in column {feed.source.column!r}"
    return ""


def prefetched(
    steps: Iterable[StepBatch],
    prefetch: Callable[[Sequence[MicroBatch]], None],
    worthwhile: float = WORTHWHILE_SECONDS,
) -> ReadAhead[StepBatch]:
    """The steps, the next one of which is given to `prefetch` in the background: see `Prefetching`."""

    def each() -> Iterator[list[StepBatch]]:
        for step in steps:
            prefetch(step.micro_batches)
            yield [step]

    return ReadAhead(each(), 1, worthwhile)


def shard(context: Context) -> None:
    """Open this rank's part of the data at the run's position. Tries the export and the training with real samples."""
    from ortflow.workflow.steps.export import try_export

    (inputs, limits), trainer = context.builder.inputs(), context.trainer
    prefetch = trainer.prefetch if isinstance(trainer, Prefetching) and trainer.prefetches else None
    context.stream = Stream(context.spec, context.plan, inputs, limits, context.place, context.progress, prefetch)
    _refuse_other_version(context)
    if context.leads:
        for warning in context.stream.not_finite():
            context.monitor.warn(warning)
        for record in context.stream.skipped():
            context.events.write("bad_rows", **record)
            print(
                f"{record['set']}: {record['skipped']} bad samples are skipped; the first: {record['first']}",
                flush=True,
            )
    try_export(context)
    context.leave_if_asked()
    with context.engine.apart(CHECK, "shard"):
        if trainer.together:
            # A rank that fails alone must end the others, not tell them: they wait for its messages within the check.
            trainer.check(context.stream.samples())
        else:
            context.try_on_rank_0(lambda: trainer.check(context.stream.samples()))
    context.leave_if_asked()
    if isinstance(trainer, Releasing):
        trainer.give_memory_back()


def _refuse_other_version(context: Context) -> None:
    """Raise UserError if this rank has fetched other samples than rank 0: a URL may have changed in between."""
    section = context.spec.data
    if not context.plan.data or all(url_of(path) is None for path in section.train.paths):
        return
    if digest_of(open_training(section, context.spec.seed)) != context.plan.data:
        raise UserError(
            f"{section.train.title} has changed between the fetches of two ranks",
            where="data.train.path",
            fix="start again when it is complete",
        )
