"""What the nodes of a graph with shards do, as plain data. Must import nothing."""

from __future__ import annotations

from dataclasses import dataclass

GRADIENT = "_grad"
"""Behind the name of a parameter: its gradient."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Fetch:
    """Parameters that a node brings from the ranks that hold them."""

    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Send:
    """Parameters whose gradients a node takes to the ranks that hold them."""

    tensors: tuple[str, ...]


Program = tuple[Fetch | Send, ...]
"""In the order in which the nodes run: node number n does step n."""
