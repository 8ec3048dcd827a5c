"""What two nodes exchange in a second, and the sum over all ranks; through the communicator of a trainer's ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from ortflow.workflow.comm import TAGS, Communicator
from ortflow.workflow.device.cpu import HostBuffer

ROUNDS = 3
"""Partners of a node. A good node has a good partner among them; all of a bad node's are slow."""
EXCHANGES, MESSAGE = 5, 1 << 20
"""Messages to and from each partner, and bytes of one."""
SUM_SECONDS, SUM_FLOATS = 0.5, 1 << 20
_TAG = TAGS - 1


def pairings(count: int, rounds: int = ROUNDS) -> list[list[tuple[int, int]]]:
    """Disjoint pairs of nodes for each round, by the circle method: no two nodes meet twice. Pure."""
    places: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    schedule = []
    for _ in range(min(rounds, len(places) - 1) if count > 1 else 0):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        schedule.append([(first, second) for first, second in pairs if first is not None and second is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return schedule


def link_rates(ranks: Communicator, firsts: Sequence[int]) -> dict[int, float]:
    """MB/s that this rank's node exchanges with each of its partners; empty on other ranks, and for one node.

    `firsts`: the first rank of each node, by which partners are named. Collective.
    """
    own_node = firsts.index(ranks.rank) if ranks.rank in firsts else None
    rates = {}
    sent, received = (HostBuffer(np.zeros(MESSAGE, np.uint8)) for _ in range(2))
    for pairs in pairings(len(firsts)):
        ranks.barrier()
        partner = next((node for pair in pairs if own_node in pair for node in pair if node != own_node), None)
        if partner is None:
            continue
        seconds = []
        for _ in range(EXCHANGES):
            begun = time.perf_counter()
            request = ranks.start_receive(received, firsts[partner], _TAG)
            ranks.send(sent, firsts[partner], _TAG)
            request.wait()
            seconds.append(time.perf_counter() - begun)
        # Without the first, for which a connection is made.
        rates[partner] = (EXCHANGES - 1) * MESSAGE / 1e6 / max(sum(seconds[1:]), 1e-9)
    ranks.barrier()
    return rates


def best_links(rates: Sequence[Mapping[int, float]]) -> list[float | None]:
    """The rate of each node with the best of its partners; None for a node without one. Pure.

    `rates`: what each node has measured with its partners. A pair is as fast as the slower of its two measurements: the
    other end may only have begun later.
    """
    pairs = [
        [min(rate, rates[partner].get(node, rate)) for partner, rate in measured.items()]
        for node, measured in enumerate(rates)
    ]
    return [max(measured, default=None) for measured in pairs]


def sum_rate(ranks: Communicator) -> float | None:
    """MB/s of the sum of a buffer over all ranks, which all of them wait for; None for one rank. Collective."""
    if ranks.world_size == 1:
        return None
    buffer = HostBuffer(np.zeros(SUM_FLOATS, np.float32))
    ranks.all_reduce(buffer)  # connections are made
    begun, count = time.perf_counter(), 0
    again = True
    while again:
        ranks.all_reduce(buffer)
        count += 1
        again = ranks.broadcast_object(time.perf_counter() - begun < SUM_SECONDS)
    return count * buffer.array.nbytes / 1e6 / (time.perf_counter() - begun)
