"""The loss and the metrics of a model on a set. Called by `ortflow evaluate`; one process, no MPI."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.data.batches import evaluation_batches
from ortflow.workflow.data.check import check_inputs
from ortflow.workflow.data.samples import reading_of
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.errors import UserError
from ortflow.workflow.inference.models import Asked, Objective, scratch_run, spec_of_model, spec_of_run, trained_on
from ortflow.workflow.inference.samples import opened
from ortflow.workflow.rundir import RunDir
from ortflow.workflow.spec.data import DataSection
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.steps.identity import COPIED, recorded_identity, refuse_other_runs
from ortflow.workflow.trainer import Report
from ortflow.workflow.trainer.graph import GraphTrainer
from ortflow.workflow.trainers import builder_of
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


def evaluate_run(run_dir: RunDir, step: int | None, asked: Asked) -> Evaluated:
    """Evaluate a checkpoint of a run, the newest complete one if `step` is None. Raises UserError."""
    data, spec = spec_of_run(run_dir, asked, "evaluate")
    store = DirectoryStore(run_dir.root / spec.checkpoint.directory)
    if (run := recorded_identity(run_dir, spec)) is not None:
        refuse_other_runs(store, run, COPIED)
    return _evaluated(spec, data, asked, store, step, trained_on(run_dir))


def evaluate_model(model: Path, objective: Objective, asked: Asked) -> Evaluated:
    """Evaluate an ONNX model. Raises UserError."""
    return _evaluated(spec_of_model(model, objective, asked), None, asked, None, None)


def _evaluated(
    spec: TrainerRunSpec,
    data: DataSection | None,
    asked: Asked,
    store: DirectoryStore | None,
    step: int | None,
    digest: str = "",
) -> Evaluated:
    found = opened(asked, data, spec.seed, digest)
    dataset = found.samples
    off = spec.export.model_copy(update={"enabled": False})
    section = spec.onnx_model.model_copy(update={"start_from": None})
    spec = spec.model_copy(update={"export": off, "model": section})
    with scratch_run() as here:
        builder = builder_of(spec, here, Report())
        builder.prepare(dataset, None)
        inputs, limits = builder.inputs()
        feeds = check_inputs(
            dataset,
            inputs,
            found.references,
            limits,
            micro_batch=spec.data.micro_batch,
            smaller_batch=spec.data.last_batch != "pad",
            where="--data",
        )
        trainer = builder.open(SoloCommunicator(), CpuDevice(), os.cpu_count() or 1, ())
        reached, averaged = None, False
        if store is not None:
            manifest, tensors = read_checkpoint(store, step)
            assert isinstance(trainer, GraphTrainer)
            trainer.load_tensors(tensors)
            reached, averaged = manifest.step, is_averaged(manifest)
        batches = evaluation_batches(
            dataset,
            feeds,
            micro_batch=spec.data.micro_batch,
            rank=0,
            world_size=1,
            mode="replicated",
            last_batch="pad" if spec.data.last_batch == "pad" else "keep",
        )
        with batches:
            outcome = trainer.evaluate(batches, lambda: ())
    if not outcome.samples:
        raise UserError("has no samples", where=str(asked.data))
    reading = reading_of(dataset)
    return Evaluated(
        outcome.metrics, outcome.samples, reached, outcome.tables, averaged, reading.skipped, reading.bad_rows
    )
