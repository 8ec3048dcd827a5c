"""Parses what mpirun prints when it loses a node of a job. Pure.

It notices within seconds, before Slurm does: srun would wait for Slurm, and name the node.
"""

from __future__ import annotations

import re

from ortflow.launchers.attempts.cause import Cause
from ortflow.launchers.records import Outcome
from ortflow.manifests.local import MpiKind
from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PREEMPTED

_CLOSED = re.compile(r"^\[mpiexec@\S+\] control_cb \(.+\): assert \(!closed\) failed$", re.MULTILINE)
_RANK_ENDED = "BAD TERMINATION"


def lost_node(kind: MpiKind, output: str, returncode: int) -> Cause | None:
    """The cause if MPICH's mpirun has lost its process on a node, and no rank ended before; None otherwise."""
    if kind != "mpich" or returncode in (EXIT_DONE, EXIT_PREEMPTED) or _RANK_ENDED in output:
        return None
    if _CLOSED.search(output) is None:
        return None
    return Cause(Outcome.LOST, EXIT_FAILURE, "mpirun has lost the connection to a node")
