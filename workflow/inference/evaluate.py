"""The loss and the metrics of a model on a set. Called by `ortflow evaluate`; one process or several, no MPI."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.data.ahead import ReadAhead
from ortflow.workflow.data.batches import evaluation_batches
from ortflow.workflow.data.check import check_inputs
from ortflow.workflow.data.epoch_positions import LastBatch
from ortflow.workflow.data.feed import Feed
from ortflow.workflow.data.inputs import MicroBatch
from ortflow.workflow.data.samples import Samples, reading_of
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.errors import UserError
from ortflow.workflow.inference.models import (
    Objective,
    SampleOptions,
    scratch_run,
    spec_of_model,
    spec_of_run,
    trained_on,
)
from ortflow.workflow.inference.ranks import in_order
from ortflow.workflow.inference.samples import opened
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.data import DataSection
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.steps.identity import COPIED, recorded_identity, refuse_other_runs
from ortflow.workflow.steps.trainers import builder_of
from ortflow.workflow.trainer import Report
from ortflow.workflow.trainer.evaluator import BatchSums
from ortflow.workflow.trainer.step import GraphTrainer
from ortflow.workflow.weights.checkpoints import is_averaged, read_checkpoint


@dataclass(frozen=True)
class Evaluated:
    """The values, and what they are of."""

    metrics: Mapping[str, float]
    """By name, with `loss`."""
    samples: int
    step: int | None
    """Of the checkpoint; None for a model file."""
    tables: Mapping[str, list[list[int]]]
    """Confusion matrices: rows are labels, columns predictions."""
    averaged: bool
    """Whether the weights are the average of `train.average`."""
    skipped: int = 0
    """Bad rows of a table, which are not among the samples."""
    bad_rows: Sequence[str] = ()
    """The first of them, each with file and line."""


def evaluate_run(run_dir: RunDir, step: int | None, options: SampleOptions, ranks: int = 1) -> Evaluated:
    """Evaluate a checkpoint of a run, the newest complete one if `step` is None. Raises UserError."""
    data, spec = spec_of_run(run_dir, options, "evaluate")
    store = DirectoryStore(run_dir.root / spec.checkpoint.directory)
    if (run := recorded_identity(run_dir, spec)) is not None:
        refuse_other_runs(store, run, COPIED)
    with scratch_run() as scratch:
        return _evaluated(Evaluation(scratch, spec, data, options, store, step, trained_on(run_dir)), ranks)


def evaluate_model(model: Path, objective: Objective, options: SampleOptions, ranks: int = 1) -> Evaluated:
    """Evaluate an ONNX model. Raises UserError."""
    with scratch_run() as scratch:
        return _evaluated(
            Evaluation(scratch, spec_of_model(model, objective, options), None, options, None, None), ranks
        )


def _evaluated(job: Evaluation, ranks: int) -> Evaluated:
    """Evaluate; of several ranks, each computes every so many micro-batches, whose sums are added up in order."""
    evaluation = job.open(prepare=True)
    if ranks == 1:
        with evaluation.batches(0, 1) as batches:
            outcome = evaluation.trainer.evaluate(batches, lambda: ())
    else:
        outcome = evaluation.trainer.training.evaluator.of_sums(in_order(job, ranks))
    if not outcome.samples:
        raise UserError("has no samples", where=str(job.options.data))
    reading = reading_of(evaluation.dataset)
    return Evaluated(
        outcome.metrics,
        outcome.samples,
        evaluation.step,
        outcome.tables,
        evaluation.averaged,
        reading.skipped,
        reading.bad_rows,
    )


@dataclass(frozen=True)
class Evaluation:
    """A model, its objective and the samples; pickled for each rank."""

    folder: RunDir
    """Where the graphs are."""
    spec: TrainerRunSpec
    data: DataSection | None
    """`data` of the run."""
    options: SampleOptions
    store: DirectoryStore | None
    """The checkpoints of the run."""
    step: int | None
    digest: str = ""

    def items(self, rank: int, world_size: int, threads: int) -> Iterator[BatchSums]:
        """The sums of this rank's micro-batches."""
        evaluation = self.open(threads)
        with evaluation.batches(rank, world_size) as batches:
            for number, batch in enumerate(batches):
                yield evaluation.trainer.training.evaluator.batch_sums(batch, number * world_size + rank)

    def open(self, threads: int = 0, *, prepare: bool = False) -> OpenEvaluation:
        """Open samples and model, with the checkpoint's weights; `prepare` also makes the graphs. Raises UserError."""
        sample_set = opened(self.options, self.data, self.spec.seed, self.digest)
        dataset = sample_set.samples
        off = self.spec.export.model_copy(update={"enabled": False})
        section = self.spec.onnx_model.model_copy(update={"start_from": None})
        spec = self.spec.model_copy(update={"export": off, "model": section})
        builder = builder_of(spec, self.folder, Report())
        if prepare:
            builder.prepare(dataset, None)
        inputs, limits = builder.inputs()
        feeds = check_inputs(
            dataset,
            inputs,
            sample_set.references,
            limits,
            micro_batch=spec.data.micro_batch,
            smaller_batch=spec.data.last_batch != "pad",
            key_path="--data",
        )
        trainer = builder.open(SoloCommunicator(), CpuDevice(), threads or os.cpu_count() or 1, ())
        assert isinstance(trainer, GraphTrainer)
        reached, averaged = None, False
        if self.store is not None:
            manifest, tensors = read_checkpoint(self.store, self.step)
            trainer.load_tensors(tensors)
            reached, averaged = manifest.step, is_averaged(manifest)
        last: LastBatch = "pad" if spec.data.last_batch == "pad" else "keep"
        return OpenEvaluation(trainer, dataset, feeds, spec.data.micro_batch, last, reached, averaged)


@dataclass(frozen=True)
class OpenEvaluation:
    """What one process computes with."""

    trainer: GraphTrainer
    dataset: Samples
    feeds: Sequence[Feed]
    micro_batch: int
    last_batch: LastBatch
    step: int | None
    averaged: bool

    def batches(self, rank: int, world_size: int) -> ReadAhead[MicroBatch]:
        """This rank's micro-batches: every `world_size`-th."""
        return evaluation_batches(
            self.dataset,
            self.feeds,
            micro_batch=self.micro_batch,
            rank=rank,
            world_size=world_size,
            last_batch=self.last_batch,
        )
