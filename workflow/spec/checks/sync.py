"""What `train.sync_batch_norm` excludes. Pure; called by `check`."""

from __future__ import annotations

from collections.abc import Iterator

from ortflow.workflow.spec.problem import KeyPath, Problem
from ortflow.workflow.spec.run import TrainerRunSpec

_WHERE: KeyPath = ("train", "sync_batch_norm")


def check_sync(spec: TrainerRunSpec) -> Iterator[Problem]:
    """Every contradiction about statistics over all ranks."""
    if not spec.train.sync_batch_norm:
        return
    off = "set it to false"
    if spec.trainer.name != "graph":
        message = f"is true, and statistics are those of the trainer {spec.trainer.name}"
        yield Problem(_WHERE, message, off, others=(("trainer", "name"),))
    elif spec.model is not None and spec.model.graphs.train:
        message = "is true, and statistics are exchanged by graphs that ortflow has made: model.graphs.train is given"
        yield Problem(_WHERE, message, "remove one of them", others=(("model", "graphs", "train"),))
    if spec.on_gpus:
        gpus = spec.resources.gpus_per_rank
        message = (
            f"is true, and graphs on GPUs cannot exchange values in this version: resources.gpus_per_rank is {gpus}"
        )
        yield Problem(_WHERE, message, off, others=(("resources", "gpus_per_rank"),))
    if spec.resources.kernels == "onnxruntime":
        message = "is true, and statistics are exchanged by ortflow's kernels: resources.kernels is onnxruntime"
        yield Problem(
            _WHERE, message, "set it to false, or resources.kernels to auto", others=(("resources", "kernels"),)
        )
    for name, degree in (("pipeline", spec.parallel.pipeline), ("horizontal", spec.parallel.horizontal)):
        if degree > 1:
            message = f"is true, and statistics run over ranks that hold the whole model: parallel.{name} is {degree}"
            yield Problem(_WHERE, message, off, others=(("parallel", name),))
    if spec.data.last_batch == "keep":
        message = (
            "is true, and a rank without samples at the end of an epoch could not take part: data.last_batch is keep"
        )
        yield Problem(_WHERE, message, "set data.last_batch to drop or pad", others=(("data", "last_batch"),))
