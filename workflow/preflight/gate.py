"""The gate of a trainer's ranks, once they are connected."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from types import MappingProxyType

from ortflow.workflow.comm import Communicator
from ortflow.workflow.device import Device
from ortflow.workflow.preflight.judge import slow_nodes
from ortflow.workflow.preflight.links import best_links, link_rates, sum_rate
from ortflow.workflow.preflight.measure import own_figures
from ortflow.workflow.preflight.report import ROUNDS, SlowNodes, best_of, conclude, of_nodes
from ortflow.workflow.ranks import Place, node_of
from ortflow.workflow.run.events import EventLog


def gate(ranks: Communicator, device: Device, place: Place, cores: int, events: EventLog) -> None:
    """Measure, and raise SlowNodes on every rank if a node is too slow. Collective.

    Parameters
    ----------
    ranks
        The communicator over host memory.
    device
        This rank's device, which is measured too if it is a GPU.
    place
        This rank's.
    cores
        Cores of this rank.
    events
        Where rank 0 records the figures.
    """
    ranks.barrier()
    begun = time.perf_counter()
    device_figures: dict[str, float] = {}
    if device.kind == "cuda":
        from ortflow.workflow.preflight.gpu import gpu_figures

        device_figures = gpu_figures(device)
    nodes, together = best_measure(ranks, node_of(place, os.environ), cores, device_figures)
    reason = None if nodes is None else conclude(events, nodes, together, time.perf_counter() - begun)
    reason = ranks.broadcast_object(reason)
    if reason is not None:
        raise SlowNodes(reason)


def best_measure(
    ranks: Communicator, node: str, cores: int, device_figures: Mapping[str, float] = MappingProxyType({})
) -> tuple[dict[str, dict[str, float]] | None, float | None]:
    """The same as `measure`, whose best figures count: it measures again while a node is slow. Collective."""
    best: dict[str, dict[str, float]] = {}
    again, rounds = True, 0
    while again:
        nodes, together = measure(ranks, node, cores, device_figures)
        rounds += 1
        if nodes is not None:
            best = best_of(best, nodes)
            again = rounds < ROUNDS and bool(slow_nodes(best))
        again = ranks.broadcast_object(again)
    return best or None, together


def measure(
    ranks: Communicator, node: str, cores: int, device_figures: Mapping[str, float] = MappingProxyType({})
) -> tuple[dict[str, dict[str, float]] | None, float | None]:
    """The figures of all nodes, on rank 0, and MB/s of a sum over all ranks. Collective.

    Parameters
    ----------
    ranks
        The communicator over host memory.
    node
        The name of this rank's node.
    cores
        Cores of this rank.
    device_figures
        Figures of this rank's device, if it is a GPU.
    """
    gathered = ranks.broadcast_object(ranks.gather(node))
    figures = {**own_figures(cores), **device_figures}
    firsts = [gathered.index(name) for name in dict.fromkeys(gathered)]
    links = link_rates(ranks, firsts)
    together = sum_rate(ranks)
    all_figures = ranks.gather((figures, links))
    if all_figures is None:
        return None, together
    of_ranks = [of_rank for of_rank, _ in all_figures]
    for first, network in zip(firsts, best_links([all_figures[first][1] for first in firsts]), strict=True):
        of_ranks[first] |= {} if network is None else {"network": network}
    return of_nodes(gathered, of_ranks), together
