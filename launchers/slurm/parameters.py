"""submitit's parameters as keys of a run file. Pure; used by `ortflow.launchers.slurm.executor`.

submitit knows them by two names: Slurm's (`partition`, in AutoExecutor `slurm_partition`), and for some a common one of
every cluster (`timeout_min`, `mem_gb`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ortflow.workflow.errors import Faults, UserError

PREFIX = "slurm_"
SLURM = "backends.slurm"


class Key(NamedTuple):
    """The place of a parameter in a run file."""

    path: str
    convert: Callable[[Any], Any] = lambda value: value


def _minutes(value: Any) -> Any:
    """submitit's minutes; Slurm's other time formats unchanged."""
    return str(value)


def _gibibytes(value: Any) -> Any:
    """mem_gb, a number: in Slurm a GB is 2^30 bytes."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return f"{int(value)}Gi" if value == int(value) else f"{int(value * 1024)}Mi"


def _memory(value: Any) -> Any:
    """mem, as Slurm writes it: 4GB, 4G, 512M, or mebibytes."""
    match = re.fullmatch(r"([0-9]+)([KMGT]?)B?", str(value), re.IGNORECASE)
    return f"{match[1]}{(match[2] or 'M').upper()}i" if match else value


def _words(value: Any) -> Any:
    """Several values, which submitit accepts as text with commas."""
    return value.split(",") if isinstance(value, str) else value


def _start(value: Any) -> Any:
    return "auto" if value else "mpirun"


KEYS: Mapping[str, Key] = {
    "job_name": Key(f"{SLURM}.job_name"),
    "time": Key("resources.time_limit", _minutes),
    "nodes": Key("resources.nodes"),
    "ntasks_per_node": Key("resources.ranks_per_node"),
    "cpus_per_task": Key("resources.cpus_per_rank"),
    "gpus_per_task": Key("resources.gpus_per_rank"),
    "mem": Key("resources.memory", _memory),
    **{
        name: Key(f"{SLURM}.{name}")
        for name in (
            "partition", "qos", "constraint", "exclude", "account", "gres", "nodelist", "dependency", "exclusive",
            "additional_parameters",
        )
    },
    "setup": Key(f"{SLURM}.prologue"),
    "teardown": Key(f"{SLURM}.epilogue"),
    "signal_delay_s": Key(f"{SLURM}.signal_seconds"),
    "mail_type": Key(f"{SLURM}.mail.types", _words),
    "mail_user": Key(f"{SLURM}.mail.user"),
    "srun_args": Key(f"{SLURM}.srun_arguments", lambda value: list(value)),
    "use_srun": Key(f"{SLURM}.mpi", _start),
}  # fmt: skip
"""submitit's name -> the run file's key."""

OTHERS: Mapping[str, str] = {
    "name": "job_name",
    "timeout_min": "time",
    "mem_gb": "mem",
    "tasks_per_node": "ntasks_per_node",
}
"""AutoExecutor's names -> submitit's for Slurm."""

NEVER: Mapping[str, str] = {
    "comment": "ortflow finds its jobs by it: leave it out",
    "gpus_per_node": "give gpus_per_task: every rank has its own",
    "num_gpus": "give gpus_per_task: every rank has its own",
    "cpus_per_gpu": "give cpus_per_task, of a rank",
    "mem_per_gpu": "give mem, of a node",
    "mem_per_cpu": "give mem, of a node, and backends.slurm.memory_per: cpu in the run file",
    "wckey": "give it in additional_parameters",
    "stderr_to_stdout": "a run has one log of each rank anyway: leave it out",
    "array_parallelism": "`ortflow submit --set KEY=VALUES --at-once N` makes an array",
}
"""Parameters of submitit that a run does not have -> the fix."""


def renamed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters by submitit's names for Slurm; None means not given. Raises Faults."""
    result: dict[str, Any] = {}
    faults = []
    for parameter, value in parameters.items():
        plain = parameter.removeprefix(PREFIX)
        name = OTHERS.get(plain, plain)
        if name in NEVER:
            faults.append(UserError("is not a parameter of a run", where=parameter, fix=NEVER[name]))
        elif name not in KEYS:
            faults.append(
                UserError("is not a parameter of submitit", where=parameter, fix=f"there are {', '.join(KEYS)}")
            )
        elif value is not None and not (parameter in OTHERS and OTHERS[parameter] in parameters):
            result[name] = _gibibytes(value) if plain == "mem_gb" else value
    if faults:
        raise Faults(faults)
    return result


def overrides(parameters: Mapping[str, Any]) -> list[str]:
    """The same as values on a command line, KEY=VALUE each."""
    return [f"{KEYS[name].path}={json.dumps(KEYS[name].convert(value))}" for name, value in parameters.items()]
