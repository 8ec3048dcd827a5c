"""Which nodes are too slow to train, by their figures. Pure.

A node is compared with the median of the others, so that one bad node of many is named and never a good one; floors
find nodes that are all slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

SHARE = 0.5
"""Of the peers' median. Nodes of one kind differ by a few percent, and in a moment of other load by a third."""


@dataclass(frozen=True)
class Quantity:
    """What is measured on a node."""

    verb: str
    unit: str
    floor: float
    """A node below it cannot train in any useful time."""


QUANTITIES = {
    "compute": Quantity("computes", "GFLOP/s", 0.5),
    "copy": Quantity("copies memory", "GB/s", 0.1),
    "gpu": Quantity("computes on its GPUs", "TFLOP/s", 0.1),
    "gpu_copy": Quantity("copies GPU memory", "GB/s", 10.0),
    "network": Quantity("exchanges data", "MB/s", 1.0),
}
"""By the names of the figures. Each is of all ranks of a node together, in `network` of its first rank."""

Figures = Mapping[str, float]


def slow_nodes(nodes: Mapping[str, Figures], share: float = SHARE) -> dict[str, str]:
    """The nodes that must not train, with the reason and its numbers; `nodes` are the figures by node.

    Of two nodes the slower one is named. A node has one reason, the first of `QUANTITIES` in which it is too slow.
    """
    reasons: dict[str, str] = {}
    for name, quantity in QUANTITIES.items():
        values = {node: figures[name] for node, figures in nodes.items() if name in figures}
        for node, value in values.items():
            peer_values = [peer_value for peer, peer_value in values.items() if peer != node]
            usual = median(peer_values) if peer_values else value
            if value < share * usual:
                reason = (
                    f"{quantity.verb} at {value / usual:.0%} of its peers' median "
                    f"({shown(value)} against {shown(usual)} {quantity.unit})"
                )
                reasons.setdefault(node, reason)
            elif value < quantity.floor:
                reasons.setdefault(
                    node, f"{quantity.verb} at {shown(value)} {quantity.unit}, below {shown(quantity.floor)}"
                )
    return {node: reasons[node] for node in nodes if node in reasons}


def sentence(bad: Mapping[str, str]) -> str:
    """`preflight: node n3 computes at 38% of its peers' median (12 against 32 GFLOP/s)`."""
    return "preflight: " + "; ".join(f"node {node} {reason}" for node, reason in bad.items())


def summary(nodes: Mapping[str, Figures], all_reduce: float | None = None) -> str:
    """The range of each figure over the nodes: `compute 31 to 33 GFLOP/s, copy 9.8 to 10 GB/s`.

    `all_reduce`: MB/s of a sum over all ranks, if it was measured.
    """
    parts = []
    for name, quantity in QUANTITIES.items():
        values = [figures[name] for figures in nodes.values() if name in figures]
        if values:
            low, high = shown(min(values)), shown(max(values))
            span = low if low == high else f"{low} to {high}"
            parts.append(f"{name.replace('_', ' ')} {span} {quantity.unit}")
    if all_reduce is not None:
        parts.append(f"all-reduce {all_reduce:.0f} MB/s")
    return ", ".join(parts)


def shown(value: float) -> str:
    """Two significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 10 else f"{float(f'{value:.2g}'):g}"
