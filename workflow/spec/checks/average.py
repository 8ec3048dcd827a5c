"""Rules of `train.average`."""

from __future__ import annotations

from collections.abc import Iterator

from ortflow.workflow.errors import UserError
from ortflow.workflow.run.durations import parse_duration
from ortflow.workflow.spec.checks.gpu_updates import only_whole_on_gpus
from ortflow.workflow.spec.problem import KeyPath, Problem
from ortflow.workflow.spec.run import TrainerRunSpec

PATH: KeyPath = ("train", "average")


def check_average(spec: TrainerRunSpec) -> Iterator[Problem]:
    """Report durations that are none, and runs whose weights are not averaged."""
    section = spec.train.average
    if section is None:
        return
    for key in ("start", "every"):
        text = getattr(section, key)
        if text is not None:
            try:
                parse_duration(text)
            except UserError as error:
                yield Problem((*PATH, key), error.what, error.fix)
    if spec.model is None:
        yield Problem(PATH, "is for the trainer graph", "remove it", others=(("trainer", "name"),))
    elif spec.onnx_model.graphs.optimizer:
        message = "is part of the update, which model.graphs.optimizer replaces"
        yield Problem(PATH, message, "remove one of them", others=(("model", "graphs", "optimizer"),))
    else:
        yield from only_whole_on_gpus(spec, PATH)
