"""The batch script of `ortflow doctor --job`: every node reports what it sees, in the same kind of job as a run's.

Directives, prologue, interpreter, container and the start of the ranks are the run's. A node that does not see the
shared folder must not make the script fail: the job is to report that.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ortflow.manifests import batch
from ortflow.manifests.slurm import container
from ortflow.manifests.slurm.directives import directives
from ortflow.manifests.slurm.launch import settings, starter
from ortflow.manifests.slurm.placement import Placement
from ortflow.manifests.slurm.quoting import shell, shell_line
from ortflow.manifests.slurm.script import code_lines
from ortflow.workflow.spec.slurm import Mail

if TYPE_CHECKING:
    from ortflow.workflow.spec.run import RunSpec
    from ortflow.workflow.spec.slurm import DirectiveName

LIMIT = 120
"""Time limit of the job, in seconds."""
REPORT_LIMIT, CONNECT = 55, 45
"""Seconds for the nodes' reports, and for the ranks to connect."""
UNSEEN = 77
"""Exit code of a job whose first node does not see the folder."""
REPORT = "node_report.py"
"""The program in the folder that each node runs: a copy of ortflow.launchers.slurm.node_report."""
_OMIT: tuple[DirectiveName, ...] = ("open-mode", "signal")
_NODE = (
    'cd /; [ "${SLURM_LOCALID:-0}" = 0 ] || exit 0; me="$1/$SLURMD_NODENAME"; shift; '
    # In braces: a shell's own message, that it cannot open the file, comes before a redirection behind it.
    '{ date +%s.%N >"$me.seen"; } 2>/dev/null || exit 0; '
    '"$@" >"$me.log" 2>&1; echo $? >"$me.code"'
)
"""A task's program on its node, before any Python: $1 is the folder; the interpreter and its program follow."""


def trial_spec(spec: RunSpec, nodes: int | None) -> RunSpec:
    """The run for the trial: two minutes, immediately, on the given number of nodes, and without mails."""
    resources = spec.resources.model_copy(update={"time_limit": f"00:{LIMIT // 60:02d}:{LIMIT % 60:02d}"})
    # Also of an elastic run, and with the nodes in reserve: what would work on fewer nodes is not the question.
    nodes = nodes or spec.asked_nodes
    resources = resources.model_copy(update={"nodes": nodes, "min_nodes": None, "spares": 0})
    section = spec.backends.slurm
    changes = {"job_name": None, "dependency": None, "begin": None, "mail": Mail(), "omit": [*section.omit, *_OMIT]}
    backends = spec.backends.model_copy(update={"slurm": section.model_copy(update=changes)})
    return spec.model_copy(update={"name": "ortflow-doctor", "resources": resources, "backends": backends})


def script(spec: RunSpec, placement: Placement) -> str:
    """The whole text for a `trial_spec`; the placement's run directory is the trial's folder."""
    return "\n".join([*_head(spec, placement), *_body(spec, placement)]) + "\n"


def _head(spec: RunSpec, placement: Placement) -> Iterator[str]:
    yield "#!/bin/bash"
    yield "# ortflow doctor: every node reports its checks, within two minutes"
    yield "#"
    yield from (line for line in directives(spec, placement) if not line.startswith("#SBATCH --output="))
    # An output that a node cannot open would keep the job from starting.
    yield "#SBATCH --output=/dev/null"


def _body(spec: RunSpec, placement: Placement) -> Iterator[str]:
    folder = str(placement.run_dir)
    log = shlex.quote(f"{folder}/job.log")
    yield ""
    yield "code=0"
    yield f"if [ -w {shlex.quote(folder)} ]; then exec >{log} 2>&1; else code={UNSEEN}; fi"
    yield ""
    yield from map(shell_line, spec.backends.slurm.prologue)
    yield from code_lines(placement)
    for name, value in settings(spec, placement).items():
        # MPI settings of the prologue take precedence, as in a run.
        yield f"export {name}=${{{name}-{shlex.quote(value)}}}"
    yield ""
    yield batch.LEAVE
    yield "# The supervisor process's interpreter, on the node where it would run."
    run_supervisor = [placement.run_supervisor_python, "-c", "import ortflow.launchers.slurm.run_supervisor"]
    yield from _recorded(shell(run_supervisor), folder, "run_supervisor")
    yield ""
    yield "# What the supervisor process asks Slurm there to queue the job again."
    yield from _recorded(['scontrol show job --oneliner "$SLURM_JOB_ID"'], folder, "scontrol")
    yield from _recorded(["command -v sbatch"], folder, "sbatch")
    yield ""
    yield "# Each node separately: the step of the run, without MPI."
    program = [*container.rank_prefix(spec, placement), _python(spec, placement), f"{folder}/{REPORT}"]
    yield from shell(
        ["timeout", "--kill-after=5", str(REPORT_LIMIT)], _step(spec, placement), ["sh", "-c", _NODE, "sh", folder],
        [*program, "node", folder],
    )  # fmt: skip
    yield ""
    yield "# All ranks."
    ranks = shell(
        ["timeout", "--kill-after=5", str(CONNECT)], starter(spec, placement), [*program, "rank", folder]
    )  # fmt: skip
    yield from _recorded(ranks, folder, "ranks")
    yield 'exit "$code"'


def _recorded(lines: list[str], folder: str, name: str) -> Iterator[str]:
    """A command whose output and exit code are stored under a name."""
    log, code = shlex.quote(f"{folder}/{name}.log"), shlex.quote(f"{folder}/{name}.code")
    yield from lines[:-1]
    yield f"{lines[-1]} >{log} 2>&1"
    yield f"echo $? >{code}"


def _step(spec: RunSpec, placement: Placement) -> list[str]:
    """srun as in the run, but without MPI. `starter` needs a plug-in for several ranks, which is then replaced."""
    arguments = starter(spec, replace(placement, start="pmi2"))
    return [
        {"--mpi=pmi2": "--mpi=none", "--kill-on-bad-exit=1": "--kill-on-bad-exit=0"}.get(argument, argument)
        for argument in arguments
    ]


def _python(spec: RunSpec, placement: Placement) -> str:
    if container.inside(spec) is not None:
        return spec.resources.python or "python"
    return placement.rank_python
