"""The outputs of a model for every sample of a set, written as a table. Called by `ortflow predict`.

One process reads, runs and writes batch after batch, or several compute and one writes: memory does not grow with the
set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ortflow.workflow.data.batches import evaluation_batches
from ortflow.workflow.data.check import check_inputs
from ortflow.workflow.data.epoch_positions import LastBatch
from ortflow.workflow.data.feed import Feed
from ortflow.workflow.data.inputs import BatchInput, Limits, MicroBatch
from ortflow.workflow.data.samples import Samples
from ortflow.workflow.errors import UserError
from ortflow.workflow.inference.models import SampleOptions, scratch_run, trained_on
from ortflow.workflow.inference.outputs import Rows, writing
from ortflow.workflow.inference.ranks import in_order
from ortflow.workflow.inference.samples import Opened, opened, refuse_other_training
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.sessions.failures import SESSION_ERRORS
from ortflow.workflow.spec.data import DataSection
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.file.paths import moved
from ortflow.workflow.spec.losses import ClassLoss
from ortflow.workflow.spec.run import trainer_run
from ortflow.workflow.steps.export import export_checkpoint
from ortflow.workflow.trainer.export.inference import open_plain

TYPES: Mapping[str, str] = {
    "tensor(float)": "float32", "tensor(double)": "float64", "tensor(float16)": "float16", "tensor(int64)": "int64",
    "tensor(int32)": "int32", "tensor(int16)": "int16", "tensor(int8)": "int8", "tensor(uint8)": "uint8",
    "tensor(bool)": "bool",
}  # fmt: skip
"""ONNX Runtime's element types, and numpy's."""
PREDICTED = "predicted"
"""Column with the number of the class of the largest logit."""
CLASS = "predicted_class"
"""Column with its name."""


@dataclass(frozen=True)
class Labels:
    """What a run that learns classes says about its outputs."""

    output: str
    """The logits; empty for the only output."""
    axis: int
    names: tuple[str, ...]
    """The name of each class; empty if classes are numbers."""


@dataclass(frozen=True)
class OfRun:
    """How a run reads samples, and its loss if that is of classes."""

    data: DataSection
    seed: int
    loss: ClassLoss | None
    digest: str = ""
    """Hash of the samples that it was trained on."""

    def labels(self, sample_set: Opened) -> Labels | None:
        """The classes, None if the run does not learn any."""
        if self.loss is None:
            return None
        column = (self.data.eval or self.data.train).references.get(self.loss.label, self.loss.label)
        return Labels(self.loss.output or "", self.loss.class_axis, sample_set.classes.get(column, ()))


@dataclass(frozen=True)
class Predicted:
    """A file of outputs."""

    path: Path
    samples: int
    columns: tuple[str, ...]
    step: int | None
    """Of the checkpoint; None for a model file."""


def predict_run(run_dir: RunDir, step: int | None, options: SampleOptions, out: Path, ranks: int = 1) -> Predicted:
    """Write the outputs of a checkpoint's inference model, of the newest complete one if `step` is None.

    A run that learns classes has a further column `predicted`. Raises UserError.
    """
    spec = trainer_run(moved(load_run_file(run_dir.run_file, others=False), run_dir.root), "ortflow predict")
    data, loss = spec.data, None if spec.model is None else spec.onnx_model.loss
    rows = options.micro_batch or data.eval_micro_batch or data.micro_batch
    of_run = OfRun(data, spec.seed, loss if isinstance(loss, ClassLoss) else None, trained_on(run_dir))
    refuse_other_training(data, spec.seed, of_run.digest)
    with scratch_run() as scratch:
        model = scratch.root / "model.onnx"
        reached = export_checkpoint(run_dir, step, model, with_variants=False).step
        return _predicted(
            Prediction(model, SampleOptions(options.data, options.columns, rows), of_run), out, reached, ranks
        )


def predict_model(model: Path, options: SampleOptions, out: Path, ranks: int = 1) -> Predicted:
    """Write the outputs of an ONNX model. Raises UserError."""
    return _predicted(Prediction(model, options, None), out, None, ranks)


def _predicted(job: Prediction, out: Path, step: int | None, ranks: int) -> Predicted:
    """Write the outputs; with several ranks, each computes every so many micro-batches."""
    column_names: tuple[str, ...] = ()
    # Checked here, before any process is started.
    opened_here = job.open()
    with writing(out, opened_here.samples) as writer:
        for rows in opened_here.rows(0, 1) if ranks == 1 else in_order(job, ranks):
            column_names = tuple(rows)
            writer.write(rows)
    return Predicted(out, opened_here.samples, column_names, step)


@dataclass(frozen=True)
class Prediction:
    """A model, and the samples it is applied to; pickled for each rank."""

    model: Path
    options: SampleOptions
    of_run: OfRun | None

    def items(self, rank: int, world_size: int, threads: int) -> Iterator[Rows]:
        """The rows of this rank's micro-batches."""
        return self.open(threads).rows(rank, world_size)

    def open(self, threads: int = 0) -> OpenPrediction:
        """Open model and samples. Raises UserError if they do not fit each other."""
        session = open_plain(self.model, threads=threads)
        inputs = [_input(value) for value in session.get_inputs()]
        names = {batch_input.name for batch_input in inputs}
        data = None if self.of_run is None else self.of_run.data
        seed, digest = (0, "") if self.of_run is None else (self.of_run.seed, self.of_run.digest)
        sample_set = opened(self.options, data, seed, digest, names)
        dataset, columns = sample_set.samples, {k: v for k, v in sample_set.references.items() if k in names}
        pad = {} if data is None else data.pad_value
        limits = Limits(pad_value={name: value for name, value in pad.items() if name in names})
        fixed = next(
            (int(batch_input.shape[0]) for batch_input in inputs if batch_input.shape and batch_input.shape[0]), None
        )
        size = fixed or self.options.micro_batch or 32
        feeds = check_inputs(
            dataset, inputs, columns, limits, micro_batch=size, smaller_batch=fixed is None, key_path="--data"
        )
        if any(feed.length is None and dataset.columns[feed.source.column].variable for feed in feeds):
            size = 1  # padding would change what the model computes, and the rows' shapes
        labels = None if self.of_run is None else self.of_run.labels(sample_set)
        return OpenPrediction(session, dataset, feeds, size, "keep" if fixed is None else "pad", labels)


@dataclass(frozen=True)
class OpenPrediction:
    """What one process computes with."""

    session: Any
    dataset: Samples
    feeds: Sequence[Feed]
    micro_batch: int
    last_batch: LastBatch
    labels: Labels | None

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.dataset)

    def rows(self, rank: int, world_size: int) -> Iterator[Rows]:
        """The outputs of this rank's micro-batches: every `world_size`-th."""
        outputs = [value.name for value in self.session.get_outputs()]
        batches = evaluation_batches(
            self.dataset, self.feeds, micro_batch=self.micro_batch, rank=rank, world_size=world_size,
            last_batch=self.last_batch,
        )  # fmt: skip
        with batches:
            yield from _rows(self.session, batches, outputs, self.labels)


def _rows(session: Any, batches: Iterator[MicroBatch], outputs: list[str], labels: Labels | None) -> Iterator[Rows]:
    for batch in batches:
        try:
            values = session.run(outputs, dict(batch.arrays))
        except SESSION_ERRORS as error:
            raise UserError(f"the model cannot be run on the samples ({' '.join(str(error).split())})") from None
        length = len(next(iter(batch.arrays.values())))
        rows: dict[str, Any] = {}
        for name, value in zip(outputs, values, strict=True):
            if not np.ndim(value) or len(value) != length:
                raise UserError(
                    f"the output {name!r} has the shape {list(np.shape(value))} for {length} samples, so it has no row"
                    " for each",
                    fix="export the model without it",
                )
            rows[name] = value[: batch.count]
        yield rows | _classes(rows, outputs, labels)


def _classes(rows: Rows, outputs: list[str], labels: Labels | None) -> dict[str, Any]:
    """The number of the largest logit's class and, where classes have names, its name."""
    if labels is None:
        return {}
    output = labels.output or (outputs[0] if len(outputs) == 1 else "")
    if output not in rows or PREDICTED in rows:
        return {}
    numbers = np.argmax(rows[output], axis=labels.axis)
    if not labels.names or rows[output].shape[labels.axis] != len(labels.names) or CLASS in rows:
        return {PREDICTED: numbers}
    return {PREDICTED: numbers, CLASS: np.array(labels.names)[numbers]}


def _input(value: Any) -> BatchInput:
    if value.type not in TYPES:
        raise UserError(f"the input {value.name!r} has the type {value.type}, which samples do not have")
    # ONNX Runtime gives an open axis its symbol, or None.
    shape = tuple(size if isinstance(size, int) else None for size in value.shape)
    return BatchInput(value.name, TYPES[value.type], shape)
