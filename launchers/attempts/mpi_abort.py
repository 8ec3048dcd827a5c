"""Why MPI ended all ranks of an attempt before mpirun could report how one of them had ended. Pure.

MPICH writes `Abort(CODE) on node N (rank R in comm C): …` into the rank's log, for a call of MPI_Abort and for an error
that its library cannot return, such as a lost peer in a shared segment. Hydra (5.0) then ends with the low byte of the
code, 143 for "Other MPI error", and prints no exit status of any rank: one that was killed just before is not named.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ortflow.launchers.attempts.cause import Cause
from ortflow.launchers.records import Outcome

_ABORT = re.compile(r"^Abort\(-?\d+\) on node \d+ \(rank \d+ in comm \w+\): (.+)$", re.MULTILINE)
LOG_BYTES = 1 << 14
"""How much of the end of each log is searched."""


def ended_by_mpi(returncode: int, order: Sequence[int], logs: Mapping[int, str]) -> Cause | None:
    """The cause if a rank's MPI ended all ranks; None if no log says so.

    `order` are the ranks by their end, as far as it is known; `logs` has the end of each rank's log.
    """
    reasons = {rank: lines[-1].strip() for rank, text in logs.items() if (lines := _ABORT.findall(text))}
    if not reasons:
        return None
    first = next(iter(order), None)
    aborting = first if first in reasons else min(reasons)
    sentence = f"MPI on rank {aborting} ended all ranks ({reasons[aborting]})"
    if first is None or first in reasons:
        return Cause(Outcome.FAILURE, returncode, sentence, aborting)
    return Cause(Outcome.FAILURE, returncode, f"rank {first} ended without a report; then {sentence}", first)
