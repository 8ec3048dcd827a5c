"""The batch script: directives, prologue, the keeper with what it starts, epilogue."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ortflow.manifests.slurm.directives import directives
from ortflow.manifests.slurm.launch import rank, starter
from ortflow.manifests.slurm.placement import TASK, Placement
from ortflow.manifests.slurm.quoting import shell, shell_line
from ortflow.workflow.spec.problem import printable

if TYPE_CHECKING:
    from ortflow.workflow.spec.run import RunSpec

KEEPER_MODULE = "ortflow.launchers.slurm.keeper"


def script(spec: RunSpec, placement: Placement) -> str:
    """The whole text; the same input gives the same bytes. Raises UserError where a value has no place in a script."""
    return "\n".join([*_head(spec, placement), *_body(spec, placement)]) + "\n"


def _head(spec: RunSpec, placement: Placement) -> Iterator[str]:
    yield "#!/bin/bash"
    what = "a training run of ortflow" if placement.array is None else "training runs of ortflow, one a task"
    yield f"# {printable(spec.name)}: {what}, in {printable(str(placement.run_dir).replace(TASK, '%a'))}"
    yield "#"
    yield from directives(spec, placement)


def code_lines(placement: Placement) -> Iterator[str]:
    """What has the job find the code that was brought along: behind the prologue, before whatever else is installed.

    In the script and not in the environment, which --export=NONE or a module would take away.
    """
    if placement.code is not None:
        yield "# The code that came along with the submission."
        yield f'export PYTHONPATH={shlex.quote(str(placement.code))}"${{PYTHONPATH:+:$PYTHONPATH}}"'
        yield ""


def _body(spec: RunSpec, placement: Placement) -> Iterator[str]:
    slurm = spec.backends.slurm
    keeper = [placement.keeper_python, "-m", KEEPER_MODULE, str(placement.run_dir), "--"]
    command = (starter(spec, placement), rank(spec, placement))
    yield ""
    if slurm.prologue:
        yield from map(shell_line, slurm.prologue)
        yield ""
    yield from code_lines(placement)
    yield "# The keeper starts the ranks, starts them again when they fail, and has a preempted job requeued."
    if not slurm.epilogue:
        yield from shell(["exec", *keeper], *command)
        return
    # Slurm's SIGTERM is the keeper's to answer; this shell has to outlive it.
    yield "trap '' TERM"
    yield from shell(keeper, *command)
    yield "ortflow_code=$?"
    yield ""
    yield from map(shell_line, slurm.epilogue)
    yield 'exit "$ortflow_code"'
