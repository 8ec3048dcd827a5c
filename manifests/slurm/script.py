"""The batch script: directives, prologue, the supervisor process with its command, epilogue."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ortflow.manifests import batch
from ortflow.manifests.slurm.directives import directives
from ortflow.manifests.slurm.inherited import unset_lines
from ortflow.manifests.slurm.launch import rank, starter
from ortflow.manifests.slurm.placement import TASK, Placement
from ortflow.manifests.slurm.quoting import shell, shell_line
from ortflow.workflow.spec.problem import printable

if TYPE_CHECKING:
    from ortflow.workflow.spec.run import RunSpec

SUPERVISOR_MODULE = "ortflow.launchers.slurm.run_supervisor"
WARNINGS = "USR1 USR2"
"""Ours ahead of the time limit is USR2; a user who edits `--signal`, or sets SBATCH_SIGNAL, usually asks for USR1."""


def script(spec: RunSpec, placement: Placement) -> str:
    """The whole text; the same input gives the same bytes. Raises UserError if a value does not fit a script."""
    return "\n".join([*_head(spec, placement), *_body(spec, placement)]) + "\n"


def _head(spec: RunSpec, placement: Placement) -> Iterator[str]:
    yield "#!/bin/bash"
    title = "a training run of ortflow" if placement.array is None else "training runs of ortflow, one a task"
    yield f"# {printable(spec.name)}: {title}, in {printable(str(placement.run_dir).replace(TASK, '%a'))}"
    if placement.run_file is not None:
        yield "# For sbatch: starts or resumes the run whose run file is at the end."
    yield "#"
    yield from directives(spec, placement)


def code_lines(placement: Placement) -> Iterator[str]:
    """Lines that put the copied code on the path: after the prologue, before any other installation."""
    # In the script and not in the environment, which --export=NONE or a module would remove.
    if placement.code is not None:
        yield "# The code copied with the submission."
        yield f'export PYTHONPATH={shlex.quote(str(placement.code))}"${{PYTHONPATH:+:$PYTHONPATH}}"'
        yield ""


def _body(spec: RunSpec, placement: Placement) -> Iterator[str]:
    slurm = spec.backends.slurm
    command = (_run_supervisor(placement), starter(spec, placement), rank(spec, placement))
    yield ""
    # Slurm may signal a start that is shorter than the lead before the supervisor process listens: it must not die of
    # it.
    yield f"trap '' {WARNINGS}"
    yield ""
    yield from unset_lines(directives(spec, placement))
    yield ""
    if slurm.prologue:
        yield from map(shell_line, slurm.prologue)
        yield ""
    yield from code_lines(placement)
    yield "# The supervisor process starts the ranks, restarts them when they fail, and requeues a preempted job."
    if not slurm.epilogue:
        yield batch.LEAVE
        # exec: the signal of `--signal=B:` reaches this shell alone, so the supervisor process must take its place.
        yield from batch.with_input(shell(["exec", *command[0]], *command[1:]), placement.run_file)
        return
    # Slurm's signals are for the supervisor process; this shell must outlive them.
    yield "trap '' TERM INT HUP"
    yield f"""trap 'kill -s USR2 "$ortflow_run_supervisor" 2>/dev/null && ortflow_wait=1' {WARNINGS}"""
    yield f"( trap '' {WARNINGS}"
    yield batch.LEAVE
    yield from batch.with_input(shell(["exec", *command[0]], *command[1:]), placement.run_file)
    yield ") &"
    yield "ortflow_run_supervisor=$! ortflow_wait=1"
    # bash's wait returns at a trapped signal, while the supervisor process still runs (bash(1), SIGNALS).
    yield 'while [ "$ortflow_wait" ]; do ortflow_wait=; wait "$ortflow_run_supervisor"; ortflow_code=$?; done'
    yield ""
    yield from map(shell_line, slurm.epilogue)
    yield 'exit "$ortflow_code"'


def _run_supervisor(placement: Placement) -> list[str]:
    return batch.supervisor(
        placement.run_supervisor_python,
        SUPERVISOR_MODULE,
        placement.run_dir,
        has_run_file=placement.run_file is not None,
        folder=placement.prepare_in,
    )
