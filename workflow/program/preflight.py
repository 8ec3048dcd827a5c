"""The gate of a program's ranks, before the program starts: their processes are connected with rank 0 alone."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from ortflow.workflow.errors import CommunicationError
from ortflow.workflow.preflight.judge import slow_nodes
from ortflow.workflow.preflight.measure import own_figures
from ortflow.workflow.preflight.report import ROUNDS, SlowNodes, best_of, conclude, of_nodes
from ortflow.workflow.program.channel import Lost, Peer
from ortflow.workflow.ranks import Place, node_of
from ortflow.workflow.run.events import EventLog

SECONDS = 60.0
"""Longest wait for an answer."""
EXCHANGES, MESSAGE = 4, 1 << 20
"""Messages from rank 0 to each node and back, and bytes of one."""


def gate(peers: Mapping[int, Peer], place: Place, cores: int, events: EventLog) -> None:
    """Measure, and raise SlowNodes on every rank if a node is too slow. Called by all ranks.

    Parameters
    ----------
    peers
        The other ranks on rank 0; rank 0's on the others.
    place
        This rank's.
    cores
        Cores of this rank.
    events
        Where rank 0 records the figures.
    """
    try:
        reason = _lead(peers, place, cores, events) if place.rank == 0 else _follow(peers[0], place, cores)
    except Lost as error:
        raise CommunicationError(f"another rank has ended in the preflight: {error}") from error
    if reason is not None:
        raise SlowNodes(reason)


def _lead(peers: Mapping[int, Peer], place: Place, cores: int, events: EventLog) -> str | None:
    begun = time.perf_counter()
    best: dict[str, dict[str, float]] = {}
    for _ in range(ROUNDS):
        best = best_of(best, _measure(peers, place, cores))
        if not slow_nodes(best):
            break
    reason = conclude(events, best, None, time.perf_counter() - begun)
    for peer in peers.values():
        peer.send({"why": reason})
    return reason


def _measure(peers: Mapping[int, Peer], place: Place, cores: int) -> dict[str, dict[str, float]]:
    for peer in peers.values():
        peer.send({"measure": True})
    figures: dict[int, dict[str, float]] = {0: own_figures(cores)}
    nodes = {0: node_of(place, os.environ)}
    for rank, peer in peers.items():
        answer = peer.receive(SECONDS)
        figures[rank], nodes[rank] = answer["figures"], str(answer["node"])
    ranks = sorted(figures)
    measured_nodes = {nodes[0]}
    for rank in ranks:
        if nodes[rank] not in measured_nodes:
            measured_nodes.add(nodes[rank])
            figures[rank]["network"] = _exchange(peers[rank])
    return of_nodes([nodes[rank] for rank in ranks], [figures[rank] for rank in ranks])


def _follow(peer: Peer, place: Place, cores: int) -> str | None:
    while True:
        message = peer.receive(SECONDS)
        if "measure" in message:
            peer.send({"figures": own_figures(cores), "node": node_of(place, os.environ)})
        elif "echo" in message:
            peer.send(message)
        else:
            return None if message["why"] is None else str(message["why"])


def _exchange(peer: Peer) -> float:
    """MB/s with one rank of another node, in both directions."""
    text = "x" * MESSAGE
    best = 0.0
    for _ in range(EXCHANGES):
        begun = time.perf_counter()
        peer.send({"echo": text})
        peer.receive(SECONDS)
        best = max(best, 2 * MESSAGE / 1e6 / (time.perf_counter() - begun))
    return best
