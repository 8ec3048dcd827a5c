"""Flags of sbatch and srun that are reserved, with alternatives. Pure; used by `slurm`."""

from __future__ import annotations

from collections.abc import Mapping

_LOGS = "remove it: the job's output is in the run directory's logs"
_OURS = "remove it: ortflow sets it"
_LOSES = "remove it: ortflow could not follow the job"
_NODES, _RANKS = "use resources.nodes", "use resources.ranks_per_node"
_CORES, _GPUS = "use resources.cpus_per_rank", "use resources.gpus_per_rank and backends.slurm.gpus_as"
_MEMORY = "use resources.memory and backends.slurm.memory_per"
_REQUEUE = "use backends.slurm.requeue"
_SWEEP = "remove it: `ortflow submit --set KEY=V1,V2` makes an array with a run for each value"


def _key(name: str) -> str:
    return f"use backends.slurm.{name}"


OWN_DIRECTIVES: dict[str, str] = {
    "nodes": _NODES, "ntasks": _RANKS, "ntasks-per-node": _RANKS, "tasks-per-node": _RANKS, "cpus-per-task": _CORES,
    "mincpus": _CORES, "gpus": _GPUS, "gpus-per-node": _GPUS, "gpus-per-task": _GPUS, "mem": _MEMORY,
    "mem-per-cpu": _MEMORY,
    "time": "use resources.time_limit", "requeue": _REQUEUE, "no-requeue": _REQUEUE,
    "signal": _key("signal_seconds"), "job-name": _key("job_name"),
    "mail-type": _key("mail.types"), "mail-user": _key("mail.user"),
    **{name: _key(name) for name in (
        "partition", "account", "qos", "constraint", "reservation", "exclusive", "nodelist", "exclude", "dependency",
        "begin", "nice", "gres",
    )},
    # ortflow's open-mode is append: a requeued job would otherwise begin its log anew.
    "output": _LOGS, "error": _LOGS, "open-mode": _LOGS,
    # A job is found by its comment if sbatch gets no answer: a slow controller may have accepted it (22.05). Without
    # kill-on-invalid-dep, a job whose dependency can never be met stays in the queue.
    "comment": _OURS, "kill-on-invalid-dep": _OURS, "wait": _LOSES, "parsable": _LOSES, "test-only": _LOSES,
    "quiet": _LOSES, "clusters": _LOSES, "help": _LOSES, "usage": _LOSES, "version": _LOSES,
    "wrap": "remove it: the script is ortflow's",
    "array": _SWEEP,
}  # fmt: skip
"""Flag of sbatch -> the alternative."""

OWN_SRUN: dict[str, str] = {
    "nodes": _NODES, "ntasks": _RANKS, "ntasks-per-node": _RANKS, "tasks-per-node": _RANKS, "cpus-per-task": _CORES,
    "gpus-per-task": _GPUS, "gpus": _GPUS, "gpu-bind": _key("gpu_bind"), "mpi": _key("mpi"),
    "container-image": _key("container"), "container-mounts": _key("container.mounts"),
    "output": _LOGS, "error": _LOGS, "label": _LOGS, "unbuffered": _LOGS,
    # Without kill-on-bad-exit, the ranks of other nodes wait in MPI_Init for one that could not start (22.05).
    "kill-on-bad-exit": _OURS, "wait": _OURS, "export": _OURS, "multi-prog": _LOSES, "test-only": _LOSES,
    "help": _LOSES, "usage": _LOSES, "version": _LOSES, "jobid": _LOSES,
}  # fmt: skip
"""Flag of srun -> the alternative."""

WHOLE = frozenset({"container"})
"""Allowed flags that are also abbreviations of a reserved one."""


def flag_name(text: str) -> str:
    """`mem` for --mem=4G."""
    return text.removeprefix("--").partition("=")[0]


def owner(text: str, reserved: Mapping[str, str]) -> str | None:
    """The alternative to a reserved flag; None if the flag is allowed. Slurm accepts abbreviations of flags."""
    name = flag_name(text)
    if name == "exclusive" and "=" in text:
        return None  # --exclusive=user has no key
    if name in reserved or name in WHOLE:
        return reserved.get(name)
    # getopt_long takes any unambiguous beginning of a flag: --nodel is --nodelist.
    return next((fix for flag, fix in reserved.items() if len(name) > 1 and flag.startswith(name)), None)
