"""The text of a line of a program, to name a call that leaves no frame: those of compiled packages, such as mpi4py."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ortflow.workflow.spec.problem import printable
from ortflow.workflow.system.files import read_whole

LARGEST = 4 << 20
"""Bytes of a source file that is read."""
LONGEST = 100
"""Characters of a line that are shown."""
_CALLS = (
    "Allgather|Allgatherv|Allreduce|Alltoall|Alltoallv|Alltoallw|Barrier|Bcast|Exscan|Gather|Gatherv|Probe|Recv|Reduce|"
    "Reduce_scatter|Reduce_scatter_block|Scan|Scatter|Scatterv|Send|Sendrecv|Ssend|Wait|Waitall|Fence|Split|Dup|Disconnect|"
    "allgather|allreduce|alltoall|barrier|bcast|exscan|gather|probe|recv|reduce|scan|scatter|send|sendrecv|ssend|wait|waitall"
)
"""Methods of mpi4py that wait for other processes."""
_MPI_CALL = re.compile(rf"\b(\w+)\.({_CALLS})\(")
_COMMUNICATOR = re.compile(r"comm|mpi|world", re.IGNORECASE)


@dataclass(frozen=True)
class SourceLine:
    """A line of a source file."""

    text: str = ""
    """Without the space around it, at most LONGEST characters; empty if it cannot be read."""
    uses_mpi: bool = False
    """Whether its file mentions mpi4py."""


def source_line(path: str, number: int) -> SourceLine:
    """A line of a file by its number, from 1. Does not raise."""
    try:
        text = read_whole(path, LARGEST).decode(errors="replace")
    except (OSError, ValueError):
        return SourceLine()
    lines = text.splitlines()
    if not 1 <= number <= len(lines):
        return SourceLine()
    line = printable(lines[number - 1].strip())
    return SourceLine(line if len(line) <= LONGEST else line[: LONGEST - 1] + "…", "mpi4py" in text)


def mpi_call(line: SourceLine) -> str | None:
    """The first call of mpi4py in a line; None if there is none. Pure."""
    for receiver, name in _MPI_CALL.findall(line.text):
        if line.uses_mpi or _COMMUNICATOR.search(receiver):
            return str(name)
    return None
