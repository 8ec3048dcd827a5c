"""The figures of all nodes, from those of the ranks, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.preflight.judge import sentence, slow_nodes, summary
from ortflow.workflow.run.events import EventLog

EVENT = "preflight"


class SlowNodes(OrtflowError):
    """Nodes that must not train; the launcher takes them out of the next attempts."""


def of_nodes(names: Sequence[str], figures: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """The figures of each node, from the node and the figures of each rank. Pure."""
    nodes: dict[str, dict[str, float]] = {}
    for name, of_rank in zip(names, figures, strict=True):
        node = nodes.setdefault(name, {})
        for quantity, value in of_rank.items():
            node[quantity] = node.get(quantity, 0.0) + value
    return nodes


ROUNDS = 3
"""Measurements before a node counts as slow: one that other work has held up is not slow in all of them."""


def best_of(
    before: Mapping[str, Mapping[str, float]], now: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """The better figure of two measurements, for each node and quantity. Pure."""
    return {
        node: {name: max(value, before.get(node, {}).get(name, value)) for name, value in figures.items()}
        for node, figures in now.items()
    }


def conclude(
    events: EventLog, nodes: Mapping[str, Mapping[str, float]], all_reduce: float | None, seconds: float
) -> str | None:
    """Rank 0: record the figures; returns why the attempt must end, or None."""
    bad = slow_nodes(nodes)
    rounded: dict[str, Any] = {
        node: {name: float(f"{value:.4g}") for name, value in figures.items()} for node, figures in nodes.items()
    }
    events.write(
        EVENT, nodes=rounded, bad=bad, seconds=round(seconds, 3),
        all_reduce=None if all_reduce is None else float(f"{all_reduce:.4g}"),
    )  # fmt: skip
    many = f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}"
    print(f"preflight of {many} in {seconds:.1f} s: {summary(nodes, all_reduce)}", flush=True)
    return sentence(bad) if bad else None
