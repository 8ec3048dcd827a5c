"""A trainer for ortflow without a graph: linear regression in numpy, trained by SGD with momentum.

`trainer: {name: linear, options: {target: y}}` fits `weight` and `bias` so that x · weight + bias is near the column
`target`, by mean squared error. The exported model is an .npz file with both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ortflow.workflow.comm import Communicator
from ortflow.workflow.data.dataset import Dataset
from ortflow.workflow.data.inputs import BatchInput, Limits
from ortflow.workflow.device import Buffer, Device
from ortflow.workflow.errors import UserError
from ortflow.workflow.layout import FlatIndex, Tensor
from ortflow.workflow.run.rundir import replacing, write_atomically
from ortflow.workflow.spec.base import Section, Text
from ortflow.workflow.spec.optimizers import Sgd
from ortflow.workflow.trainer import (
    EvaluationOutcome,
    MicroBatch,
    Prepared,
    StepOutcome,
    Trainer,
    TrainerBuilder,
    TrainerContext,
)

CONTROL_VALUES = 3
"""Where the control values begin in what the ranks add up behind the gradient: loss, elements and samples come
first."""


class Options(Section):
    """`trainer.options` of a linear regression."""

    target: Text
    """Column that is predicted."""
    features: Text = "x"
    """Column that it is predicted from."""


class LinearBuilder(TrainerBuilder):
    """Reads the sizes from the set and stores them in the folder for all ranks."""

    Options = Options

    def __init__(self, context: TrainerContext) -> None:
        self._context, self._options = context, context.options

    def prepare(self, dataset: Dataset, before: Prepared | None) -> Prepared:
        spec, path = self._context.spec, self._context.export_path
        if not isinstance(spec.train.optimizer, Sgd):
            raise UserError("must be sgd for a linear regression", where="train.optimizer.name")
        if path is not None and path.suffix != ".npz":
            raise UserError(f"{path} must end in .npz", where="export.path")
        column = dataset.columns.get(self._options.features)
        if column is None or len(column.shape) != 1:
            raise UserError(
                f"{dataset.path} has no column {self._options.features!r} of one axis", where="trainer.options.features"
            )
        write_atomically(self._sizes, json.dumps({"features": column.shape[0]}).encode())
        return Prepared(parameters=column.shape[0] + 1)

    @property
    def _sizes(self) -> Path:
        return self._context.folder / "sizes.json"

    def _features(self) -> int:
        return int(json.loads(self._sizes.read_text())["features"])

    def inputs(self) -> tuple[Sequence[BatchInput], Limits]:
        return (
            BatchInput(self._options.features, "float32", (None, self._features())),
            BatchInput(self._options.target, "float32", (None,), "label"),
        ), Limits()

    def open(
        self,
        communicator: Communicator,
        device: Device,
        threads: int,
        machines: Sequence[Any],
        *,
        training: bool = True,
    ) -> LinearTrainer:
        return LinearTrainer(self._context, self._features(), communicator, device)


class LinearTrainer(Trainer):
    """Parameters and momentum in flat buffers; everything is computed in numpy, and summed over the ranks in fp64."""

    def __init__(self, context: TrainerContext, features: int, communicator: Communicator, device: Device) -> None:
        self.index = FlatIndex.place([Tensor("weight", (features,), "decay"), Tensor("bias", (1,), "no_decay")])
        self.before_update: Callable[[], None] = lambda: None
        self._options, self._communicator, self._features = context.options, communicator, features
        self._optimizer: Sgd = context.spec.train.optimizer
        self._clip = context.spec.train.clip_norm or math.inf
        self._parameters = device.allocate(self.index.size, np.float32)
        self._momentum = device.allocate(self.index.size, np.float32)
        self._sums = device.allocate(features + 1 + CONTROL_VALUES + 16, np.float64)

    def state(self) -> Mapping[str, Buffer]:
        return {"parameters": self._parameters, "momentum": self._momentum}

    def environment(self) -> Mapping[str, str]:
        return {"numpy": np.__version__}

    def step(
        self,
        batches: Sequence[MicroBatch],
        *,
        learning_rate: float,
        update: int,
        seeds: Sequence[int],
        control_values: Sequence[float],
    ) -> StepOutcome:
        width = self._features + 1
        sums = np.zeros(self._sums.count)
        for batch in batches:
            inputs, error = self._error(batch)
            sums[:width] += 2 * np.append(inputs.T @ error, error.sum())
            sums[width : width + CONTROL_VALUES] += error @ error, batch.count, batch.count
        sums[width + CONTROL_VALUES : width + CONTROL_VALUES + len(control_values)] = control_values
        totals = self._summed(sums)
        squares, weight, samples = totals[width : width + CONTROL_VALUES]
        summed = totals[width + CONTROL_VALUES : width + CONTROL_VALUES + len(control_values)].astype(np.float32)
        gradient, loss = totals[:width] / max(weight, 1), squares / max(weight, 1)
        norm = float(np.linalg.norm(gradient))
        if not weight or not math.isfinite(norm + loss):
            return StepOutcome(float(loss), norm, int(samples), summed, f"the loss is {loss}")
        gradient *= min(1.0, self._clip / norm) if norm else 1.0
        self.before_update()
        self._update(gradient, learning_rate, first=update == 1)
        return StepOutcome(float(loss), norm, int(samples), summed, None)

    def _update(self, gradient: np.ndarray, rate: float, *, first: bool) -> None:
        for entry, part in zip(self.index, (gradient[:-1], gradient[-1:]), strict=True):
            kept = self._momentum.slice(entry.offset, entry.end)
            values = self._parameters.slice(entry.offset, entry.end)
            if entry.tensor.group == "decay":
                part = part + self._optimizer.weight_decay * values.read()
            velocity = part if first else self._optimizer.momentum * kept.read() + part
            kept.write(velocity.astype(np.float32))
            values.write((values.read() - rate * velocity).astype(np.float32))

    def evaluate(
        self, batches: Iterable[MicroBatch], control_values: Callable[[], Sequence[float]]
    ) -> EvaluationOutcome:
        sums = np.zeros(self._sums.count)
        for batch in batches:
            _, error = self._error(batch)
            sums[:2] += error @ error, batch.count
        mine = control_values()
        sums[CONTROL_VALUES : CONTROL_VALUES + len(mine)] = mine
        totals = self._summed(sums)
        loss = totals[0] / totals[1] if totals[1] else math.nan
        return EvaluationOutcome(
            {"loss": float(loss)}, int(totals[1]), totals[CONTROL_VALUES : CONTROL_VALUES + len(mine)]
        )

    def export(
        self, path: Path, samples: Sequence[MicroBatch], tolerance: float | None, *, trial: bool = False
    ) -> float | None:
        if trial:
            return None
        weight, bias = self._tensor("weight"), self._tensor("bias")
        with replacing(path) as file:
            np.savez(file, weight=weight, bias=bias)
        with np.load(path) as saved:
            found = [self._inputs(batch) @ (saved["weight"] - weight) + saved["bias"] - bias for batch in samples]
        return max((float(np.abs(each).max()) for each in found if each.size), default=None)

    def _error(self, batch: MicroBatch) -> tuple[np.ndarray, np.ndarray]:
        """Features [samples, features] and prediction minus target [samples], in fp64."""
        inputs = self._inputs(batch)
        target = batch.arrays[self._options.target][: batch.count]
        return inputs, inputs @ self._tensor("weight") + self._tensor("bias") - target

    def _inputs(self, batch: MicroBatch) -> np.ndarray:
        return batch.arrays[self._options.features][: batch.count].astype(np.float64)

    def _tensor(self, name: str) -> np.ndarray:
        entry = self.index[name]
        return self._parameters.slice(entry.offset, entry.end).read()

    def _summed(self, sums: np.ndarray) -> np.ndarray:
        self._sums.write(sums)
        self._communicator.all_reduce(self._sums)
        return self._sums.read()
