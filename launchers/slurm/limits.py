"""Limits of a QOS or an account that a run alone exceeds: Slurm accepts such a job, and it waits forever. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ortflow.launchers.slurm.fit import Asked, Misfit, clock
from ortflow.launchers.slurm.jobs import read_seconds

MOST = {
    "MaxTRESPerJob": "a job", "MaxTRESPerNode": "a job on each node", "MaxTRESPerUser": "all jobs of a user together",
    "MaxTRESPerAccount": "all jobs of an account together", "GrpTRES": "all jobs together",
}  # fmt: skip
"""Upper limits and their scope; each also limits a single job."""
LEAST = "MinTRESPerJob"
WALL = "MaxWall"
QOS_COLUMNS = ("Name", *MOST, LEAST, WALL)
ACCOUNT_COLUMNS = ("Account", "MaxTRESPerJob", "MaxTRESPerNode", "GrpTRES", WALL)
ASSOC_FORMAT = ("Account", "MaxTRES", "MaxTRESPerNode", "GrpTRES", "MaxWall")
"""The same as `sacctmgr show assoc` calls it."""
_KEYS = {
    "cpu": ("cores", "lower resources.nodes, ranks_per_node or cpus_per_rank"),
    "node": ("nodes", "lower resources.nodes"),
    "mem": ("MiB of memory", "lower resources.memory"),
    "gres/gpu": ("GPUs", "lower resources.ranks_per_node or nodes"),
}  # fmt: skip
_MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}


@dataclass(frozen=True)
class Limits:
    """What one QOS or account allows."""

    name: str
    bounds: Mapping[str, Mapping[str, float]]
    """By the limit's name, then the resource: cpu, node, mem (MiB), gres/gpu."""
    wall: float | None
    """Seconds that a job may take."""


def read_limits(text: str, columns: tuple[str, ...]) -> list[Limits]:
    """Rows of `sacctmgr -nP show qos format=COLUMNS`, or of assoc."""
    limits = []
    for line in text.splitlines():
        values = dict(zip(columns, line.split("|"), strict=False))
        if len(values) == len(columns):
            bounds = {name: _amounts(value) for name, value in values.items() if name in (*MOST, LEAST) and value}
            limits.append(Limits(values[columns[0]], bounds, read_seconds(values[WALL])))
    return limits


def breaks(request: Asked, limits: Limits) -> Iterator[Misfit]:
    """Each limit that the run exceeds; resources that it does not set are not counted."""
    per_node = {"cpu": float(request.cpus), "gres/gpu": float(request.gpus)}
    if request.memory is not None:
        per_node["mem"] = float(request.memory)
    amounts = {**{key: amount * request.nodes for key, amount in per_node.items()}, "node": float(request.nodes)}
    for name, whose in MOST.items():
        for key, most in limits.bounds.get(name, {}).items():
            need = (per_node if name == "MaxTRESPerNode" else amounts).get(key)
            if need is not None and need > most:
                resource, fix = _KEYS[key]
                resource = resource.removesuffix("s") if most == 1 else resource
                text = f"gives {whose} {most:g} {resource} ({name}), and the run asks for {need:g}"
                yield Misfit(text, f"{fix}, or choose another backends.slurm.qos or account")
    for key, least in limits.bounds.get(LEAST, {}).items():
        need = amounts.get(key)
        if need is not None and need < least:
            text = f"takes no job with less than {least:g} {_KEYS[key][0]} ({LEAST}), and the run asks for {need:g}"
            yield Misfit(text, "ask for more, or choose another backends.slurm.qos")
    if limits.wall is not None and request.time is not None and request.time > limits.wall:
        text = f"gives a job {clock(limits.wall)} ({WALL}), and the run asks for {clock(request.time)}"
        yield Misfit(
            text, f"set resources.time_limit to {clock(limits.wall)} at most: the run continues in the next job"
        )


def _amounts(text: str) -> dict[str, float]:
    """cpu=2,mem=4G,gres/gpu=1 as numbers; amounts in other formats are left out."""
    amounts = {}
    for word in text.split(","):
        key, _, amount = word.partition("=")
        if key in _KEYS and (match := re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)", amount)):
            amounts[key] = float(match[1]) * (_MIB[match[2] or "M"] if key == "mem" else 1.0)
    return amounts
