"""A hash of everything that the graphs of a run are made from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from ortflow import __version__
from ortflow.workflow.spec.losses import CrossEntropy, Divergence, Focal
from ortflow.workflow.spec.model import ModelSection, single_losses
from ortflow.workflow.spec.run import TrainerRunSpec


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


def input_files(model: ModelSection) -> list[str]:
    """The files that losses and metrics read."""
    weighted_losses = [loss for loss in single_losses(model.loss).values() if isinstance(loss, CrossEntropy | Focal)]
    weights = [loss.class_weights for loss in weighted_losses if isinstance(loss.class_weights, str)]
    teachers = [loss.teacher for loss in single_losses(model.loss).values() if isinstance(loss, Divergence)]
    return [*weights, *filter(None, teachers)] + [metric.path for metric in model.metrics if metric.path is not None]


def _groups_of(spec: TrainerRunSpec) -> object:
    """What the run file says of groups; a learning rate of its own is a multiple of the optimizer's."""
    train = spec.train
    if not train.groups and train.layer_decay is None and train.optimizer.name != "muon":
        return None
    layers = None if train.layer_decay is None else train.layer_decay.model_dump(mode="json")
    return [[group.model_dump(mode="json") for group in train.groups], layers, train.optimizer.lr]
