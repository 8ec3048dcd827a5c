"""Whether a partition can hold a run. Pure.

Slurm accepts most jobs that do not fit and lets them wait forever (EnforcePartLimits=NO), so this is checked before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortflow.launchers.slurm.site import Node, Partition
from ortflow.workflow.spec.checks.nodes import permitted
from ortflow.workflow.spec.checks.slurm_syntax import gpus_in
from ortflow.workflow.spec.units import parse_memory, parse_time

if TYPE_CHECKING:
    from ortflow.workflow.spec.run import RunSpec

_MIB = 2**20


@dataclass(frozen=True)
class Asked:
    """What a run requests from a cluster."""

    nodes: int
    cpus: int
    """On each node."""
    memory: int | None
    """MiB of each node; None for the partition's default."""
    gpus: int
    """On each node."""
    time: int | None
    """Seconds; None for the partition's default."""
    partitions: tuple[str, ...]
    """The partitions that it names; empty for the default one."""
    account: str | None
    qos: str | None
    gpu_type: str | None = None

    def __str__(self) -> str:
        parts = [f"{self.nodes} node{'s' if self.nodes > 1 else ''} with {self.cpus} cores"]
        if self.gpus:
            parts.append(f"{self.gpus} {self.named}")
        if self.memory:
            parts.append(f"{self.memory} MiB")
        suffix = " each" if self.nodes > 1 else ""
        return ", ".join(parts) + suffix + (f", for {clock(self.time)}" if self.time else "")

    @property
    def named(self) -> str:
        """The name of its GPUs in messages."""
        return f"GPUs of type {self.gpu_type}" if self.gpu_type else "GPUs"


@dataclass(frozen=True)
class Misfit:
    """Why a partition cannot hold a run, and the fix."""

    what: str
    fix: str
    never: bool = True
    """False if it can when nodes that are down are back."""


def asked(spec: RunSpec) -> Asked:
    """What a run file requests."""
    resources, slurm = spec.resources, spec.backends.slurm
    gpus = resources.ranks_per_node * resources.gpus_per_rank
    return Asked(
        # An elastic run can start on fewer.
        nodes=permitted(spec)[0] + spec.resources.spares,
        cpus=resources.ranks_per_node * (resources.cpus_per_rank or 1),
        memory=-(-parse_memory(resources.memory) // _MIB) if resources.memory is not None else None,
        gpus=gpus if gpus else (gpus_in(slurm.gres) or 0),
        time=parse_time(resources.time_limit) if resources.time_limit is not None else None,
        partitions=tuple(name.strip() for name in (slurm.partition or "").split(",") if name.strip()),
        account=slurm.account,
        qos=slurm.qos,
        gpu_type=resources.gpu_type,
    )


def chosen(request: Asked, partitions: Iterable[Partition]) -> list[Partition]:
    """The partitions that Slurm would consider."""
    return [
        partition
        for partition in partitions
        if (partition.name in request.partitions if request.partitions else partition.default)
    ]


def misfits(request: Asked, partition: Partition, nodes: Sequence[Node]) -> list[Misfit]:
    """Everything that keeps the run out of a partition; `nodes` are the cluster's."""
    return [
        *_rules(request, partition),
        *_machines(request, [node for node in nodes if partition.name in node.partitions]),
    ]


def _rules(request: Asked, partition: Partition) -> Iterator[Misfit]:
    if partition.state != "UP":
        yield Misfit(f"is {partition.state}", "choose another backends.slurm.partition, or wait", never=False)
    if request.time is not None and partition.max_time is not None and request.time > partition.max_time:
        limit = clock(partition.max_time)
        yield Misfit(f"gives a job {limit}, and the run asks for {clock(request.time)}",
                     f"set resources.time_limit to {limit} at most: the run continues in the next job")  # fmt: skip
    if partition.max_nodes is not None and request.nodes > partition.max_nodes:
        yield Misfit(f"gives a job {partition.max_nodes} nodes, and the run asks for {request.nodes}",
                     f"set resources.nodes to {partition.max_nodes} at most")  # fmt: skip
    for key, kind, value in (("account", "accounts", request.account), ("qos", "qos", request.qos)):
        allowed, denied = partition.allowed.get(kind), partition.denied.get(kind, frozenset())
        if value is not None and (value in denied or (allowed is not None and value not in allowed)):
            names = f": it takes {', '.join(sorted(allowed))}" if allowed else ""
            yield Misfit(f"does not accept {key} {value}{names}", f"change backends.slurm.{key} or partition")


def _machines(request: Asked, nodes: Sequence[Node]) -> Iterator[Misfit]:
    if request.nodes > len(nodes):
        yield Misfit(f"has {len(nodes)} nodes, and the run asks for {request.nodes}", "lower resources.nodes")
        return
    fitting = [node for node in nodes if _fits(request, node)]
    if len(fitting) < request.nodes:
        yield from _short(request, nodes, len(fitting))
    elif (up := sum(node.up for node in fitting)) < request.nodes:
        message = f"has {len(fitting)} nodes that fit, and {up} of them are up: the run waits for {request.nodes}"
        yield Misfit(message, "`sinfo -R` shows why nodes are down", never=False)


def _fits(request: Asked, node: Node) -> bool:
    return (
        node.cpus >= request.cpus
        and node.memory >= (request.memory or 0)
        and node.gpus_of(request.gpu_type) >= request.gpus
    )


def _short(request: Asked, nodes: Sequence[Node], fitting: int) -> Iterator[Misfit]:
    """The requests that too few nodes meet; nodes may meet each one, but none meet all of them."""
    is_short = False
    for resource, need, key, has in (
        ("cores", request.cpus, "ranks_per_node or cpus_per_rank", [node.cpus for node in nodes]),
        ("MiB of memory", request.memory or 0, "memory", [node.memory for node in nodes]),
        (request.named, request.gpus, _gpu_keys(request), [node.gpus_of(request.gpu_type) for node in nodes]),
    ):
        able = sum(amount >= need for amount in has)
        if able < request.nodes:
            is_short = True
            text = f"has {able} nodes with {need} {resource}, and the run asks for {request.nodes}"
            if not able:
                most = f"more than {max(has)} {resource}" if max(has) else resource
                text = f"has no node with {most}, and the run asks for {need} on each"
            kinds = sorted({kind for node in nodes for kind, _ in node.kinds})
            kinds_text = (
                f" (there are {', '.join(kinds)})" if request.gpu_type and resource == request.named and kinds else ""
            )
            yield Misfit(text + kinds_text, f"lower resources.{key}")
    if not is_short:
        yield Misfit(f"has {fitting} nodes with all of that, and the run asks for {request.nodes}",
                     "lower what resources asks for")  # fmt: skip


def _gpu_keys(request: Asked) -> str:
    return "ranks_per_node, or change resources.gpu_type" if request.gpu_type else "ranks_per_node"


def clock(amount: float) -> str:
    """Seconds in the run file's format: [days-]hours:minutes:seconds."""
    minutes, second = divmod(int(amount), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hour:02d}:{minute:02d}:{second:02d}"
