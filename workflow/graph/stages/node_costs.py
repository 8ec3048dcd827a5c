"""Measured costs of the nodes of a forward graph, as plain data that a run directory keeps. Pure.

Made by `ortflow.workflow.assembly.timing`. The record decides where later attempts cut the model: a clock never gives
the same times twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx

from ortflow.workflow.graph.stages.costs import Costs

NAME = "costs.json"
"""Name of the file in the folder of graphs."""


@dataclass(frozen=True)
class NodeCosts:
    """Costs of the nodes of one graph."""

    key: str
    """`key_of` the graph and its sizes."""
    nodes: Mapping[str, tuple[float, int]]
    """First output of a node -> seconds of its forward pass, and its operations as `Costs` counts them; of the nodes
    that could be timed."""
    batch: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Input -> shape of its samples in the micro-batch that was measured."""
    fault: str | None = None
    """Why nothing was measured; None if it was."""

    @property
    def known(self) -> bool:
        """Whether some node takes time."""
        return self.fault is None and any(seconds > 0 for seconds, _ in self.nodes.values())

    def seconds(self, costs: Costs) -> Callable[[onnx.NodeProto], float]:
        """The seconds of a node of the graph, or of a part of it whose layers are divided, which has other shapes.

        A node of a part takes the share of the whole node's time that its operations have. Nodes without a
        time take as long as their operations do on average.
        """
        operations = sum(counted for _, counted in self.nodes.values())
        average = sum(seconds for seconds, _ in self.nodes.values()) / max(1, operations)

        def of(node: onnx.NodeProto) -> float:
            operations, measured = costs.operations(node), self.nodes.get(result_of(node))
            if measured is None:
                return operations * average
            seconds, counted = measured
            return seconds * min(1.0, operations / counted) if counted else seconds

        return of

    def to_bytes(self) -> bytes:
        """Content of the file."""
        batch = {name: list(shape) for name, shape in self.batch.items()}
        nodes = {name: list(cost) for name, cost in self.nodes.items()}
        body = {"key": self.key, "fault": self.fault, "batch": batch, "nodes": nodes}
        return (json.dumps({**body, "hash": _hash(body)}, indent=1) + "\n").encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> NodeCosts:
        """Read what `to_bytes` wrote. Raises ValueError if it is damaged."""
        try:
            body = dict(json.loads(content))
            if body.pop("hash") != _hash(body):
                raise ValueError("it does not match its hash")
            nodes = {name: (float(seconds), int(counted)) for name, (seconds, counted) in body["nodes"].items()}
            return cls(body["key"], nodes, body["batch"], body["fault"])
        except (AttributeError, LookupError, RecursionError, TypeError) as error:
            raise ValueError(f"not a record of costs: {error}") from None


def key_of(model: onnx.ModelProto, batch: Mapping[str, Sequence[int]]) -> str:
    """A hash of a graph and the shapes of its batch."""
    state = hashlib.blake2b(model.SerializeToString(deterministic=True), digest_size=16)
    state.update(json.dumps(dict(batch), sort_keys=True).encode())
    return state.hexdigest()


def result_of(node: onnx.NodeProto) -> str:
    """The first output of a node, by which it is known."""
    return next((str(name) for name in node.output if name), "")


def _hash(body: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()
