"""The #SBATCH lines of a job: only options that are set, always in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from typing_extensions import assert_never

from ortflow.manifests.slurm.placement import TASK, Placement
from ortflow.manifests.slurm.quoting import directive
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.checks.nodes import permitted
from ortflow.workflow.spec.checks.slurm_syntax import carries_control, gpus_in
from ortflow.workflow.spec.problem import printable
from ortflow.workflow.spec.units import parse_memory, parse_time

if TYPE_CHECKING:
    from ortflow.workflow.spec.run import RunSpec

SIGNAL = "USR2"
"""Sent to the supervisor process before the time limit: the ranks save, and it has the job requeued."""

_MIB = 1024**2


def directives(spec: RunSpec, placement: Placement) -> list[str]:
    """The lines. Raises UserError if a value cannot be written in one."""
    omitted = spec.backends.slurm.omit
    options = _asked(spec, placement)
    lines = [directive(name, value) for name, value in options if name.removeprefix("no-") not in omitted]
    for text in spec.backends.slurm.directives:
        name, equals, value = text.removeprefix("--").partition("=")
        lines.append(directive(name, value if equals else None))
    for name, parameter in spec.backends.slurm.additional_parameters.items():
        lines.append(directive(name.replace("_", "-"), None if parameter is True else str(parameter)))
    return lines


def _asked(spec: RunSpec, placement: Placement) -> Iterator[tuple[str, str | None]]:
    yield from _who(spec, placement)
    yield from _what(spec, placement)
    yield from _where(spec)
    yield from _when(spec, placement)
    yield from _how(spec, placement)


def _who(spec: RunSpec, placement: Placement) -> Iterator[tuple[str, str | None]]:
    slurm = spec.backends.slurm
    yield "job-name", slurm.job_name or spec.name
    yield "comment", f"ortflow {placement.submission}"
    if placement.array is not None:
        yield "array", placement.array
    for name in ("partition", "account", "qos", "reservation"):
        value: str | None = getattr(slurm, name)
        if value is not None:
            yield name, value


def _what(spec: RunSpec, placement: Placement) -> Iterator[tuple[str, str | None]]:
    resources = spec.resources
    if spec.elastic:
        # Of a range Slurm gives as many nodes as it can without delaying the start, but no more than it counts tasks:
        # sbatch takes those of the smallest number of nodes. So cores are requested for each node.
        fitting = permitted(spec)
        yield "nodes", f"{fitting[0]}-{fitting[-1]}"
        yield "mincpus", str(resources.ranks_per_node * (resources.cpus_per_rank or 1))
    else:
        yield "nodes", str(spec.asked_nodes)
        if resources.spares:
            # The job outlives a lost node, whose place another takes.
            yield "no-kill", None
        yield "ntasks-per-node", str(resources.ranks_per_node)
        if resources.cpus_per_rank is not None:
            yield "cpus-per-task", str(resources.cpus_per_rank)
    yield from _gpus(spec, placement.start)
    if resources.memory is not None:
        mebibytes = -(-parse_memory(resources.memory) // _MIB)
        match spec.backends.slurm.memory_per:
            case "node":
                yield "mem", _mebibytes(mebibytes)
            case "cpu":
                cores = resources.ranks_per_node * (resources.cpus_per_rank or 1)
                yield "mem-per-cpu", _mebibytes(-(-mebibytes // cores))
            case other:
                assert_never(other)


def _gpus(spec: RunSpec, start: str) -> Iterator[tuple[str, str | None]]:
    slurm, per_rank = spec.backends.slurm, spec.resources.gpus_per_rank
    of_node = per_rank * spec.resources.ranks_per_node
    gres = [slurm.gres] if slurm.gres is not None else []
    if per_rank and gpus_per_task(spec, start) and not spec.elastic:
        yield "gpus-per-task", counted(spec, per_rank)
    elif per_rank:
        match slurm.gpus_as:
            case "gpus-per-task" | "gpus-per-node":
                yield "gpus-per-node", counted(spec, of_node)
            case "gres":
                if gpus_in(slurm.gres) is None:
                    gres.insert(0, f"gpu:{counted(spec, of_node)}")
            case other:
                assert_never(other)
    if gres:
        yield "gres", ",".join(gres)


def gpus_per_task(spec: RunSpec, start: str) -> bool:
    """Whether GPUs are requested per rank."""
    # mpirun's daemons are one task per node, which would get one rank's GPUs. Programs take the GPU of LOCAL_RANK among
    # all of the node; a task's own GPU would be number 0 in each.
    return spec.backends.slurm.gpus_as == "gpus-per-task" and start != "mpirun" and spec.program is None


def counted(spec: RunSpec, gpus: int) -> str:
    """GPUs as Slurm counts them: 4, or h100:4."""
    kind = spec.resources.gpu_type
    return f"{kind}:{gpus}" if kind is not None else str(gpus)


def _where(spec: RunSpec) -> Iterator[tuple[str, str | None]]:
    slurm = spec.backends.slurm
    if slurm.constraint is not None:
        yield "constraint", slurm.constraint
    if slurm.exclusive:
        yield "exclusive", None
    if slurm.nodelist is not None:
        yield "nodelist", slurm.nodelist
    if slurm.exclude is not None:
        yield "exclude", slurm.exclude


def _when(spec: RunSpec, placement: Placement) -> Iterator[tuple[str, str | None]]:
    slurm = spec.backends.slurm
    if spec.resources.time_limit is not None:
        yield "time", _time(parse_time(spec.resources.time_limit))
    if slurm.begin is not None:
        yield "begin", slurm.begin
    if slurm.nice is not None:
        yield "nice", str(slurm.nice)
    dependency = placement.dependency or slurm.dependency
    if dependency is not None:
        yield "dependency", dependency
    # Without it, a job that depends on a failed one waits forever.
    yield "kill-on-invalid-dep", "yes"


def _how(spec: RunSpec, placement: Placement) -> Iterator[tuple[str, str | None]]:
    slurm = spec.backends.slurm
    if not slurm.requeue:
        yield "no-requeue", None
    else:
        yield "requeue", "expedite" if placement.expedite else None
    # Sent to the supervisor process only, which knows whether the limit has changed and notifies the ranks in time.
    limit = spec.resources.time_limit
    # Slurm may send it up to a minute too early (sbatch(1)).
    ahead = min(slurm.signal_seconds, parse_time(limit) // 2) if limit is not None else slurm.signal_seconds
    yield "signal", f"B:{SIGNAL}@{max(1, ahead)}"
    # Otherwise a requeued job truncates its log (JobFileAppend is 0 by default).
    yield "open-mode", "append"
    if placement.run_file is None:
        # If its folder does not exist, Slurm starts nothing: a run directory created by the job cannot contain it.
        yield "output", _output(placement)
    if slurm.mail.types:
        yield "mail-type", ",".join(slurm.mail.types)
    if slurm.mail.user is not None:
        yield "mail-user", slurm.mail.user


def _output(placement: Placement) -> str:
    logs = str(placement.run_dir / "logs")
    if placement.array is None:
        return f"{_pattern(logs)}/slurm-%j.log"
    return "%a".join(map(_pattern, logs.split(TASK))) + "/slurm-%A_%a.log"


def _pattern(path: str) -> str:
    """A path in --output, where `%` starts a pattern, and a backslash disables all patterns."""
    if "\\" in path or carries_control(path):
        raise UserError(
            f"{printable(path)} contains a backslash or a line break, which Slurm does not accept in the path of a log",
            where="run_dir",
            fix="choose another run_dir",
        )
    return path.replace("%", "%%")


def _time(seconds: int) -> str:
    """Slurm's [days-]hours:minutes:seconds."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hour:02d}:{minute:02d}:{second:02d}"


def _mebibytes(amount: int) -> str:
    """Slurm's units are binary: its G is 2^30."""
    return f"{amount // 1024}G" if amount % 1024 == 0 else f"{amount}M"
