"""The start variables of a rank's program: one union, whatever started the rank. Pure.

PyTorch, Lightning, Accelerate, DeepSpeed, Horovod, JAX and TensorFlow each read some of them. Variables of MPI and of
Slurm stay as the process manager set them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ortflow.workflow.ranks import Place


@dataclass(frozen=True)
class World:
    """All ranks, as they found each other; the same on every rank."""

    hosts: tuple[str, ...]
    """Name of each rank's machine."""
    addresses: tuple[str, ...]
    """Address of each rank's machine, as rank 0 sees it."""
    ports: tuple[int, ...]
    """A free port on each rank's machine, for that rank."""
    main_port: int
    """A free port on rank 0's machine, for PyTorch's store."""
    jax_port: int
    """The same for JAX's coordinator."""
    cores: tuple[int, ...]
    """Cores of each rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    @property
    def nodes(self) -> list[str]:
        """The machines, in the order of their first rank."""
        return list(dict.fromkeys(self.hosts))

    @property
    def single(self) -> bool:
        """Whether all ranks are on one machine."""
        return len(self.nodes) == 1

    @property
    def address(self) -> str:
        """Address of rank 0, for all ranks."""
        return self.addresses[0]


def start_variables(place: Place, world: World, attempt: int, restarts: int, name: str) -> dict[str, str]:
    """The variables of one rank.

    Parameters
    ----------
    place
        The rank's place.
    world
        All ranks.
    attempt
        Number of the attempt.
    restarts
        Failures after which the run is restarted.
    name
        The run's name.
    """
    nodes = world.nodes
    node = nodes.index(world.hosts[place.rank])
    variables: dict[str, int | str] = {
        "RANK": place.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size,
        "NODE_RANK": node,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": len(nodes),
        "ROLE_RANK": place.rank,
        "ROLE_WORLD_SIZE": world.size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": world.address,
        "MASTER_PORT": world.main_port,
        # torch.distributed.is_torchelastic_launched() asks for this one.
        "TORCHELASTIC_RUN_ID": name,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_MAX_RESTARTS": restarts,
        "HOROVOD_RANK": place.rank,
        "HOROVOD_SIZE": world.size,
        "HOROVOD_LOCAL_RANK": place.local_rank,
        "HOROVOD_LOCAL_SIZE": place.local_size,
        "HOROVOD_CROSS_RANK": node,
        "HOROVOD_CROSS_SIZE": len(nodes),
        "HOROVOD_HOSTNAME": world.hosts[place.rank],
        "JAX_COORDINATOR_ADDRESS": f"{world.address}:{world.jax_port}",
        "JAX_NUM_PROCESSES": world.size,
        "JAX_PROCESS_ID": place.rank,
    }
    if world.size > 1:
        variables["TF_CONFIG"] = tf_config(world, place.rank)
    return {key: str(value) for key, value in variables.items()}


def tf_config(world: World, rank: int) -> str:
    """TensorFlow's description of the cluster, for MultiWorkerMirroredStrategy."""
    workers = [f"{address}:{port}" for address, port in zip(world.addresses, world.ports, strict=True)]
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})


def default_variables(cores: int) -> dict[str, str]:
    """Variables for a program whose environment does not set them."""
    return {
        # A traceback of every thread when a signal such as SIGSEGV ends Python.
        "PYTHONFAULTHANDLER": "1",
        # The growth of the log is a sign that the program moves: lines must reach it when they are printed.
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(cores),
    }


def for_launcher(start: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the launcher of a framework: without variables that would replace those of its processes."""
    # horovodrun 0.28 writes its own environment behind the place of each process, and env takes the last of a name.
    wrong = PLACES if start == "horovod" else ()
    return {name: value for name, value in environment.items() if name not in wrong}


PLACES: Sequence[str] = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE", "HOROVOD_HOSTNAME",
)  # fmt: skip
"""Variables by which a process knows its place."""


def environment_of(
    outer: Mapping[str, str],
    cores: int,
    variables: Mapping[str, str],
    run_variables: Mapping[str, str],
    overrides: Mapping[str, str],
) -> dict[str, str]:
    """The complete environment of the program.

    Start variables replace those of the surrounding environment, such as another job's; the run file's replace all.
    """
    inherited = {name: value for name, value in outer.items() if name not in DROPPED}
    return {**default_variables(cores), **inherited, **variables, **run_variables, **overrides}


DROPPED: Sequence[str] = ("ORTFLOW_DIE_WITH_PARENT", "ORTFLOW_OWNER", "ORTFLOW_LAUNCHER")
"""Variables that are for the rank's process alone."""
