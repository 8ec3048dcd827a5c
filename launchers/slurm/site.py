"""A cluster as printed by `scontrol show` and similar commands: settings, partitions, nodes, associations. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ortflow.launchers.slurm.jobs import read_seconds

_FIELD = re.compile(r"(?:^|\s)([A-Za-z]\w*(?:\[\d+\])?)=(.*?)(?=\s+[A-Za-z]\w*(?:\[\d+\])?=|\s*$)")
# A GPU may be followed by its sockets: gpu:a100:4(S:0-1).
_GPUS = re.compile(r"(?:^|,)gpu(?::([^:,()]+))*?:(\d+)(?=\(|,|$)")
_AWAY = ("DOWN", "DRAIN", "FAIL", "NOT_RESPONDING", "POWERED_DOWN", "MAINT", "INVAL", "FUTURE")
Settings = Mapping[str, str]
"""Of slurm.conf, by name."""
DEFAULT_EXPIRY = 120
"""Seconds for which a job's credential is valid if AuthInfo does not set it (cred_expire)."""


@dataclass(frozen=True)
class Partition:
    """A partition's rules; None for no limit."""

    name: str
    state: str
    """UP, DOWN, DRAIN or INACTIVE."""
    default: bool
    nodes: int
    max_nodes: int | None
    max_time: float | None
    """Seconds."""
    default_time: float | None
    """Seconds, for a job without a time limit; None: it gets the maximum."""
    preempt_mode: str
    grace: int
    """Seconds."""
    memory_per_cpu: int | None
    """MiB, for a job without a memory request."""
    memory_per_node: int | None
    allowed: dict[str, frozenset[str]]
    """Who may use it, by accounts, qos and groups; a missing key allows all."""
    denied: dict[str, frozenset[str]]
    qos: str | None = None
    """The QOS whose limits apply in it."""


@dataclass(frozen=True)
class Node:
    """A compute node."""

    name: str
    state: str
    """In Slurm's terms: IDLE, MIXED+DRAIN, DOWN*."""
    cpus: int
    memory: int
    """MiB."""
    gpus: int
    partitions: frozenset[str]
    kinds: tuple[tuple[str, int], ...] = ()
    """Its GPUs by type, if the site names types."""

    def gpus_of(self, kind: str | None) -> int:
        """GPUs of a type; all of them if no type is requested."""
        return self.gpus if kind is None else sum(count for name, count in self.kinds if name == kind)

    @property
    def up(self) -> bool:
        """Whether a job may start there, now or when another ends."""
        # A state with a * is that of a node that does not respond at the moment (sinfo(1)).
        return not any(word in self.state for word in _AWAY) and not self.state.endswith("*")


@dataclass(frozen=True)
class Association:
    """What an account allows a user."""

    account: str
    partition: str
    qos: tuple[str, ...]


def read_config(text: str) -> dict[str, str]:
    """Settings of `scontrol show config`; (null) is empty."""
    settings = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and name.strip():
            value = value.strip()
            settings[name.strip()] = "" if value == "(null)" else value
    return settings


def listed(settings: Settings, name: str) -> dict[str, str]:
    """A setting that is a list: each item of it, with the text after its `=`."""
    items = [word.partition("=") for word in settings.get(name, "").split(",") if word]
    return {key.strip(): value for key, _, value in items}


def restart_delay(settings: Settings) -> tuple[int, str]:
    """Seconds before a requeued job can start, and the setting that says so.

    Until Slurm 25.11 that was the time in which the job's old credential expires.
    """
    for name, key in (("SchedulerParameters", "requeue_delay"), ("AuthInfo", "cred_expire")):
        text = listed(settings, name).get(key, "")
        if text.isdigit():
            return int(text), f"{key} in {name}"
    return DEFAULT_EXPIRY, "cred_expire by default"


def seconds(text: str) -> float | None:
    """Seconds of settings such as `30 sec`; None for a keyword."""
    match = re.match(r"\d+", text)
    return float(match[0]) if match else None


def read_partitions(text: str) -> list[Partition]:
    """Partitions of `scontrol show partition --oneliner`."""
    return [_partition(dict(_FIELD.findall(line))) for line in text.splitlines() if line.startswith("PartitionName=")]


def read_nodes(text: str) -> list[Node]:
    """Nodes of `scontrol show node --oneliner`."""
    return [_node(dict(_FIELD.findall(line))) for line in text.splitlines() if line.startswith("NodeName=")]


def read_associations(text: str) -> list[Association]:
    """Rows of `sacctmgr -nP show assoc format=account,partition,qos`."""
    rows = [line.split("|") for line in text.splitlines()]
    return [Association(row[0], row[1], tuple(filter(None, row[2].split(",")))) for row in rows if len(row) == 3]


def read_plugins(text: str) -> list[str]:
    """Names of `srun --mpi=list`."""
    names = []
    for line in text.splitlines():
        word = line.removeprefix("srun:").strip()
        if re.fullmatch(r"\w+", word):
            names.append(word)
        elif match := re.match(r"specific pmix plugin versions available: (.*)", word):
            names += [name.strip() for name in match[1].split(",")]
    return names


def _partition(fields: dict[str, str]) -> Partition:
    allowed, denied = {}, {}
    for key, kind in (("Accounts", "accounts"), ("Qos", "qos"), ("Groups", "groups")):
        names = fields.get(f"Allow{key}", "ALL")
        if names not in ("ALL", "N/A", "(null)"):
            allowed[kind] = frozenset(names.split(","))
        if f"Deny{key}" in fields:
            denied[kind] = frozenset(fields[f"Deny{key}"].split(","))
    return Partition(
        name=fields["PartitionName"],
        state=fields.get("State", ""),
        default=fields.get("Default") == "YES",
        nodes=_count(fields.get("TotalNodes", "")) or 0,
        max_nodes=_count(fields.get("MaxNodes", "")),
        max_time=read_seconds(fields.get("MaxTime", "")),
        default_time=read_seconds(fields.get("DefaultTime", "")),
        preempt_mode=fields.get("PreemptMode", "OFF"),
        grace=_count(fields.get("GraceTime", "")) or 0,
        memory_per_cpu=_count(fields.get("DefMemPerCPU", "")),
        memory_per_node=_count(fields.get("DefMemPerNode", "")),
        allowed=allowed,
        denied=denied,
        qos=None if (qos := fields.get("QoS", "N/A")) in ("N/A", "(null)") else qos,
    )


def _node(fields: dict[str, str]) -> Node:
    kinds = [(kind, int(count)) for kind, count in _GPUS.findall(fields.get("Gres", ""))]
    return Node(
        name=fields["NodeName"],
        state=fields.get("State", ""),
        # The site may reserve cores for the system.
        cpus=_count(fields.get("CPUEfctv", "")) or _count(fields.get("CPUTot", "")) or 0,
        memory=_count(fields.get("RealMemory", "")) or 0,
        gpus=sum(count for _, count in kinds),
        partitions=frozenset(fields.get("Partitions", "").split(",")),
        kinds=tuple((kind, count) for kind, count in kinds if kind),
    )


def _count(text: str) -> int | None:
    return int(text) if text.isdigit() else None
