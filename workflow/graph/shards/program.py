"""What the nodes of a graph with shards do, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GRADIENT = "_grad"
"""Suffix to a parameter's name: its gradient."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Fetch:
    """Parameters that a node fetches from the ranks that hold them."""

    tensors: tuple[str, ...]
    kinds: tuple[int, ...] = ()
    """Element type of each tensor as ONNX counts them; empty if all are fp32."""


@dataclass(frozen=True)
class Send:
    """Parameters whose gradients a node sends to the ranks that hold them."""

    tensors: tuple[str, ...]


def largest(program: Sequence[Fetch | Send], counts: Mapping[str, int], kind: type[Fetch | Send]) -> int:
    """Size of the largest step of a kind, given the parameters' numbers of elements; 0 if there is none."""
    steps = (step for step in program if isinstance(step, kind))
    return max((sum(counts[name] for name in step.tensors) for step in steps), default=0)


Program = tuple[Fetch | Send, ...]
"""The steps in the order in which the nodes run: node n performs step n."""
