"""What run files ask of GPUs and no scheduler can give: told before anything is submitted. Pure; called by `check`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.checks import kubernetes_syntax
from ortflow.workflow.spec.checks.slurm_syntax import gpus_in
from ortflow.workflow.spec.problem import KeyPath, Problem, shown
from ortflow.workflow.spec.run import RunSpec
from ortflow.workflow.spec.units import parse_memory

GPUS: KeyPath = ("resources", "gpus_per_rank")
TYPE: KeyPath = ("resources", "gpu_type")
RANKS: KeyPath = ("resources", "ranks_per_node")
_TYPE = re.compile(r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?")
_SLICE = re.compile(r"(?:^|[/_-])\d+g\.\d+gb(?:$|[.+_-])")


def check_gpus(spec: RunSpec) -> Iterator[Problem]:
    """Every contradiction about GPUs between `resources` and the backends."""
    yield from _kind(spec)
    yield from _slurm(spec)
    yield from _kubernetes(spec)


def is_slice(name: str) -> bool:
    """Whether a GPU of this name is a slice of one (MIG), such as 1g.10gb or nvidia.com/mig-1g.10gb."""
    return _SLICE.search(name) is not None


def _kind(spec: RunSpec) -> Iterator[Problem]:
    kind = spec.resources.gpu_type
    if kind is None:
        return
    if len(kind) > 63 or not _TYPE.fullmatch(kind):
        fix = "write it as the cluster does, such as h100 or NVIDIA-H100-80GB-HBM3"
        yield Problem(TYPE, f"is not a kind of GPU: {shown(kind).removeprefix('the text ')}", fix)
    if not spec.on_gpus:
        what = f"is {kind}, and resources.gpus_per_rank is 0"
        yield Problem(TYPE, what, "set resources.gpus_per_rank to 1, or remove it", others=(GPUS,))


def _slurm(spec: RunSpec) -> Iterator[Problem]:
    slurm, kind, here = spec.backends.slurm, spec.resources.gpu_type, ("backends", "slurm")
    ranks = spec.resources.ranks_per_node
    if slurm.gpu_bind is not None and not spec.on_gpus:
        what = "binds GPUs, and resources.gpus_per_rank is 0"
        yield Problem((*here, "gpu_bind"), what, "take it away", others=(GPUS,))
    if slurm.gpu_bind is not None and slurm.mpi == "mpirun":
        what = "is srun's, and backends.slurm.mpi is mpirun"
        yield Problem((*here, "gpu_bind"), what, "remove one of them", others=((*here, "mpi"),))
    if kind is not None and gpus_in(slurm.gres) is not None:
        what = f"is {kind}, and backends.slurm.gres names the GPUs, too ({slurm.gres})"
        yield Problem(TYPE, what, "give one of them", others=((*here, "gres"),))
    if kind is not None and is_slice(kind) and ranks > 1 and spec.on_gpus and slurm.gpus_as != "gpus-per-task":
        what = f"is {slurm.gpus_as}, which shows all slices ({kind}) to each of {ranks} ranks, and CUDA uses the first"
        yield Problem((*here, "gpus_as"), what, "set it to gpus-per-task", others=(TYPE, RANKS))


def _kubernetes(spec: RunSpec) -> Iterator[Problem]:
    k8s, here, ranks = spec.backends.kubernetes, ("backends", "kubernetes"), spec.resources.ranks_per_node
    if is_slice(k8s.gpu.resource) and spec.on_gpus and ranks > 1:
        what = f"is {k8s.gpu.resource}, a slice of a GPU: of {ranks} in a pod CUDA uses the first alone"
        fix = "set resources.ranks_per_node to 1, and raise resources.nodes"
        yield Problem((*here, "gpu", "resource"), what, fix, others=(RANKS, GPUS))
    label = k8s.gpu.type_label
    if not kubernetes_syntax.is_qualified(label):
        fix = "write [DOMAIN/]NAME with letters, digits, - _ . and a letter or digit first and last"
        yield Problem((*here, "gpu", "type_label"), "is not a name of a label", fix)
    elif spec.resources.gpu_type is not None:
        for key in ("node_selector", "worker_node_selector"):
            if label in getattr(k8s, key):
                what = "cannot be combined with resources.gpu_type"
                yield Problem((*here, key, label), what, "give one of them", others=(TYPE,))
    memory, shared = _bytes(spec.resources.memory), _bytes(k8s.shared_memory)
    if memory is not None and shared is not None and shared > memory:
        what = f"is {k8s.shared_memory}, which counts as memory of the pod, and that is {spec.resources.memory}"
        fix = "lower it, or raise resources.memory"
        yield Problem((*here, "shared_memory"), what, fix, others=(("resources", "memory"),))


def _bytes(text: str | None) -> int | None:
    """None where there is none, or where another check tells what is wrong with it."""
    try:
        return parse_memory(text) if text is not None else None
    except UserError:
        return None
