"""Findings from the ranks of a trial job: whether MPI connects them, their cores, their GPUs. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ortflow.launchers.findings import Finding, fault, ok, untested, warning
from ortflow.launchers.slurm.checks import FITTING, NAMES
from ortflow.launchers.slurm.probe import Start
from ortflow.launchers.slurm.srun_output import verdict
from ortflow.launchers.slurm.trial import Results
from ortflow.launchers.view.lines import counted, duration
from ortflow.manifests.slurm.trial import CONNECT
from ortflow.workflow.comm.nccl_messages import trouble
from ortflow.workflow.preflight.judge import slow_nodes, summary

KILLED = (124, 137)
"""Exit codes of `timeout`."""
_ERROR = re.compile(r"error|fail|cannot|unable|abort|invalid|no such", re.IGNORECASE)
_CONSEQUENCE = re.compile(r"Exited with|Terminating|CANCELLED|srun: error: \S+: tasks? |Force Terminated")


def world_of(results: Results, world: int, start: Start, gate: bool) -> Iterator[Finding]:
    """Whether the ranks form one world of size `world`; if so, the rest. `gate`: the run has `preflight: true`."""
    about, ranks = "MPI", results.ranks
    mode = "mpirun" if start.how == "mpirun" else f"--mpi={start.how}"
    sizes = {rank.get("size") for rank in ranks}
    if errors := sorted({str(rank["error"]) for rank in ranks if "error" in rank}):
        yield fault(about, f"the ranks cannot import mpi4py: {errors[0]}", "`pip install 'ortflow[train,mpich]'`")
    elif len(ranks) == world and sizes == {world}:
        seconds = duration(max(float(rank["seconds"]) for rank in ranks))
        text = f"{counted(world, 'rank')} on {counted(len(results.nodes), 'node')} connect with {mode} in {seconds}"
        yield ok(about, f"{text} ({ranks[0]['library']})")
        yield from _cores(ranks)
        yield from _speed(ranks, gate)
        yield _nccl(ranks, world)
    elif sizes == {1} and world > 1:
        yield fault(about, f"each of {world} ranks is alone in a world of 1 with {mode}", _advice(start))
    elif not ranks and results.codes.get("ranks") in KILLED:
        yield fault(about, f"{world} ranks did not connect with {mode} within {CONNECT} s", _advice(start))
    else:
        output = results.logs.get("ranks", "")
        reason = verdict(output, results.codes.get("ranks", 1))
        message = reason.sentence if reason is not None else relevant_line(output)
        yield fault(about, f"{len(ranks)} of {world} ranks connected with {mode}: {message}", _advice(start))


def relevant_line(text: str) -> str:
    """The most relevant line of a log: the first error that is not a consequence of another."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)]
    causes = [line for line in errors if not _CONSEQUENCE.search(line)]
    return next(iter([*causes, *errors, *lines[-1:]]), "no output")


def _advice(start: Start) -> str:
    if start.kind is not None and start.how != "mpirun" and FITTING[start.kind] != start.how:
        return f"the ranks have {NAMES[start.kind]}: set backends.slurm.mpi to auto, {FITTING[start.kind]} or mpirun"
    return "set backends.slurm.mpi to another: pmi2 is for MPICH, pmix for Open MPI, mpirun for either"


def _cores(ranks: list[dict[str, Any]]) -> Iterator[Finding]:
    if cores := sorted({int(rank["cores"]) for rank in ranks if rank.get("cores") is not None}):
        text = str(cores[0]) if len(cores) == 1 else f"{cores[0]} to {cores[-1]}"
        yield ok("cores", f"a rank may run on {text}", cores=cores)


def _speed(ranks: list[dict[str, Any]], gate: bool) -> Iterator[Finding]:
    """Whether the nodes are equally fast, as measured by the gate of `preflight`."""
    # Other jobs on a shared node slow it for a moment: without the gate, the run would train there.
    of_slow_node = fault if gate else warning
    about, reports = "preflight", [rank["preflight"] for rank in ranks if rank.get("preflight")]
    if errors := sorted({str(report["error"]) for report in reports if "error" in report}):
        yield untested(about, f"the ranks cannot measure their nodes: {errors[0]}")
    for nodes in (report["nodes"] for report in reports if "nodes" in report):
        for node, reason in slow_nodes(nodes).items():
            yield of_slow_node(about, f"{node} {reason}", "leave it out with backends.slurm.exclude", nodes=nodes)
        if not slow_nodes(nodes):
            yield ok(about, f"{counted(len(nodes), 'node')}: {summary(nodes)}", nodes=nodes)


def _nccl(ranks: list[dict[str, Any]], world: int) -> Finding:
    about, reports = "NCCL", [rank["gpus"] for rank in ranks if "gpus" in rank]
    if not reports:
        return untested(about, "the run asks for no GPUs (resources.gpus_per_rank), so NCCL is not tested")
    if errors := sorted({str(report["error"]) for report in reports if "error" in report}):
        if (advice := next(filter(None, map(trouble, errors)), None)) is not None:
            return fault(about, f"{advice.what} ({errors[0]})", advice.fix)
        return fault(about, errors[0], "the nodes need GPUs, their driver, and NCCL, which the ranks' python must see")
    if any(report.get("sum") != world for report in reports):
        return fault(about, f"the sum over the GPUs of {world} ranks is not {world}")
    version = int(reports[0]["nccl"])
    version_text = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    return ok(about, f"{counted(world, 'rank')} sum over their GPUs (NCCL {version_text})")
