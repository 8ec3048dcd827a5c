"""Sums the squares of whole tensors over the ranks that hold pieces of them, to the same bits on every rank.

LAMB's trust ratios depend on them. Called by `divided_reduction`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ortflow.workflow.comm import Communicator
from ortflow.workflow.device import Buffer


def sum_over(sums: Buffer, terms: npt.NDArray[np.bool_], pieces: Communicator, parts: Communicator) -> None:
    """Sum over the ranks of a replica's stage: its parts, and the replicas if each has a piece of every tensor.

    `sums`: this rank's terms; replaced by the sums. `terms`: whether the parts' sum includes this rank's element. It
    does not where the first part has all of it. `pieces`: ranks that have pieces of the same tensors (ZeRO). `parts`:
    ranks that share the layers.
    """
    pieces.all_reduce(sums)
    sums.write(np.where(terms, sums.read(), 0))
    parts.all_reduce(sums)


def take_over_first(sums: Buffer, replicas: Communicator, parts: Communicator) -> None:
    """Replace the sums by those of the first part of the first replica, on all its stage's ranks.

    Each rank of a reduction may add in another order, and each replica has a reduction of its own. A sum with a single
    term that is not 0 has that term's bits in every order.
    """
    for ranks in (replicas, parts):
        if ranks.rank:
            sums.fill(0)
        ranks.all_reduce(sums)
