"""Rules of `train.groups` and `train.layer_decay`."""

from __future__ import annotations

from collections.abc import Iterator

from ortflow.workflow.errors import UserError
from ortflow.workflow.run.durations import parse_duration
from ortflow.workflow.spec.checks.gpu_updates import only_whole_on_gpus
from ortflow.workflow.spec.optimizers import OPTIMIZERS
from ortflow.workflow.spec.problem import KeyPath, Problem
from ortflow.workflow.spec.run import TrainerRunSpec

GROUPS: KeyPath = ("train", "groups")


def check_groups(spec: TrainerRunSpec) -> Iterator[Problem]:
    """Report groups that contradict themselves, or that the run's trainer or layout does not have."""
    train = spec.train
    for key, setting in (("groups", train.groups), ("layer_decay", train.layer_decay)):
        if not setting:
            continue
        if spec.model is None:
            yield Problem(("train", key), "is for the trainer graph", "remove it", others=(("trainer", "name"),))
        elif spec.onnx_model.graphs.optimizer:
            message = "divides the parameters, and model.graphs.optimizer updates all of them together"
            yield Problem(("train", key), message, "remove one of them", others=(("model", "graphs", "optimizer"),))
    for place, group in enumerate(train.groups):
        path = (*GROUPS, place)
        if group.lr is not None and group.lr_scale is not None:
            yield Problem((*path, "lr_scale"), "cannot be combined with lr", "use one of them")
        if not any(value is not None for key, value in group if key != "match"):
            yield Problem(path, "changes nothing", "give lr, lr_scale, weight_decay or frozen_until")
        if group.frozen_until is not None:
            yield from _frozen(spec, (*path, "frozen_until"), group.frozen_until)


def _frozen(spec: TrainerRunSpec, path: KeyPath, text: str) -> Iterator[Problem]:
    try:
        parse_duration(text)
    except UserError as error:
        yield Problem(path, error.what, error.fix)
    properties = OPTIMIZERS[spec.train.optimizer.name]
    if spec.on_gpus:
        yield from only_whole_on_gpus(spec, path)
    elif (spec.parallel.zero or spec.divides) and properties.whole_tensors and not properties.shapes:
        layout = "under ZeRO" if spec.parallel.zero else "in a divided model"
        message = f"is not supported with {spec.train.optimizer.name} {layout}, where ranks share the norms of tensors"
        fix = "set parallel.zero to 0" if spec.parallel.zero else "set parallel.pipeline and horizontal to 1"
        yield Problem(path, message, fix, others=(("parallel",),))
