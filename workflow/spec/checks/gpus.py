"""Checks of GPU requests that no scheduler can satisfy. Pure; called by `check`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ortflow.workflow.spec.optimizers import moments
from ortflow.workflow.spec.problem import KeyPath, Problem, shown
from ortflow.workflow.spec.run import RunSpec, TrainerRunSpec

GPUS: KeyPath = ("resources", "gpus_per_rank")
TYPE: KeyPath = ("resources", "gpu_type")
RANKS: KeyPath = ("resources", "ranks_per_node")
OFFLOAD: KeyPath = ("train", "offload")
_TYPE = re.compile(r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?")
_SLICE = re.compile(r"(?:^|[/_-])\d+g\.\d+gb(?:$|[.+_-])")


def check_gpus(spec: RunSpec) -> Iterator[Problem]:
    """Report every contradiction about GPUs within `resources` and `train`; launchers check their own keys."""
    if isinstance(spec, TrainerRunSpec) and spec.train.offload != "none":
        yield from _offload(spec)
    kind = spec.resources.gpu_type
    if kind is None:
        return
    if len(kind) > 63 or not _TYPE.fullmatch(kind):
        fix = "use the cluster's name, such as h100 or NVIDIA-H100-80GB-HBM3"
        yield Problem(TYPE, f"is not a GPU type: {shown(kind).removeprefix('the text ')}", fix)
    if not spec.on_gpus:
        message = f"is {kind}, and resources.gpus_per_rank is 0"
        yield Problem(TYPE, message, "set resources.gpus_per_rank to 1, or remove it", others=(GPUS,))


def _offload(spec: TrainerRunSpec) -> Iterator[Problem]:
    """What excludes state on the host."""

    def problem(message: str, *related_keys: KeyPath, fix: str = "set it to none") -> Problem:
        return Problem(OFFLOAD, f"is {spec.train.offload}, and {message}", fix, others=related_keys)

    if not spec.on_gpus:
        yield problem("ranks on CPUs have the optimizer's state in the host's memory already", GPUS)
    if spec.trainer.name != "graph":
        yield problem(f"the optimizer's state is that of the trainer {spec.trainer.name}", ("trainer", "name"))
    elif spec.model is not None and spec.model.graphs.optimizer:
        yield problem("model.graphs.optimizer updates all parameters together", ("model", "graphs", "optimizer"))
    if not moments(spec.train.optimizer):
        yield problem("this optimizer keeps no state", ("train", "optimizer", "name"))
    if spec.divides:
        yield problem(
            "the state of a divided model is not streamed in this version",
            ("parallel", "pipeline"), ("parallel", "horizontal"),
        )  # fmt: skip


def is_slice(name: str) -> bool:
    """Whether a GPU of this name is a slice of one (MIG), such as 1g.10gb or nvidia.com/mig-1g.10gb."""
    # Slices matter because a process enumerates one of them, however many it is shown (NVIDIA's MIG user guide, CUDA
    # Device Enumeration: CUDA 11 and 12).
    return _SLICE.search(name) is not None
