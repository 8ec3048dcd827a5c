"""The rank's number and place, from the variables that each process manager sets.

Read before MPI is initialised, so that a rank can name its log and rank 0 can begin to configure. Step `runtime`
compares the numbers with MPI's own: with the wrong process manager, each rank silently becomes a world of one.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

TABLE: tuple[tuple[str, str, str, str, str], ...] = (
    # process manager, rank, world size, local rank, ranks on this node
    (
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # Of Slurm's variables, only those of a step: in the batch script and salloc's shell SLURM_PROCID is 0, too.
    ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    ("PMIx", "PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE"),
)

HOST = "ORTFLOW_HOST"
"""Name of the rank's machine, where the launcher knows it by another name than its own."""
NODE = "ORTFLOW_NODE"
"""Name of the machine of a rank's pod."""
NODE_NAMES = "ORTFLOW_NODE_NAMES"
"""Names of an attempt's nodes in the order of the ranks, where all ranks have the host name of one machine."""


@dataclass(frozen=True)
class Place:
    """A rank's place in the world according to its process manager."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    manager: str
    host: str

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Place:
        """Read the first process manager of the table that set a rank; rank 0 of 1 if none did."""
        for manager, rank, world, local_rank, local_size in TABLE:
            if rank in environment and world in environment:
                return cls(
                    rank=int(environment[rank]),
                    world_size=int(environment[world]),
                    # srun uses PMI for MPICH, and sets variables of its own for the local rank.
                    local_rank=int(environment.get(local_rank) or environment.get("SLURM_LOCALID") or "0"),
                    local_size=_local_size(environment, local_size),
                    manager=manager,
                    host=environment.get(HOST) or socket.gethostname(),
                )
        return cls(0, 1, 0, 1, "none", socket.gethostname())


def node_of(place: Place, environment: Mapping[str, str]) -> str:
    """The name of a rank's node: its host's, that of its pod's node, or a simulated node's."""
    names = environment.get(NODE_NAMES, "").split(",")
    return names[place.rank * len(names) // place.world_size] if names[0] else environment.get(NODE) or place.host


def _local_size(environment: Mapping[str, str], name: str) -> int:
    if name in environment and not name.startswith("SLURM_"):
        return int(environment[name])
    counts = _counts(environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    node = int(environment.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else counts[0]


def _counts(text: str) -> list[int]:
    """Expand the tasks of each node of a step, which Slurm writes as `2(x3),1`."""
    task_groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in task_groups for _ in range(int(times or 1))] or [1]
