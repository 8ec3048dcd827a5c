"""Why a graph's work on a GPU cannot be captured, and whether two graphs draw the same random numbers. Reads graphs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import onnx

from ortflow.workflow.graph.attention.find import drops_weights
from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.sessions.binding import Binding

SEEDED = frozenset(
    {
        "BiasDropout", "BitmaskBiasDropout", "BitmaskDropout", "Dropout", "Multinomial", "RandomNormal",
        "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli",
    }
)  # fmt: skip
"""Operators whose ONNX Runtime kernels count on the host: a captured one would draw the same numbers again.

Dropouts are ortflow's, which read a seed from the GPU's memory, unless their ratio varies or its kernels are not used.
"""

_OF_SIZES = frozenset({"Shape", "Size"})


def copied_by(binding: Binding) -> str:
    """Why runs of a binding must not be captured; empty if they may."""
    copied = sorted(binding.read_on_host)
    if not copied:
        return ""
    return f"ONNX Runtime computes with {copied[0]!r} on the CPU, and copies it to the host for each micro-batch"


def obstacle_in(graph: Path) -> str:
    """Why runs of a graph must not be captured; empty if they may."""
    return obstacle_of(onnx.load(graph))


def obstacle_of(model: onnx.ModelProto) -> str:
    """The same of a model."""
    if operators := _drawn_on_host(walk.all_nodes(model)):
        return f"ONNX Runtime's {', '.join(operators)} would draw the same numbers every time"
    branch = _chosen_by_data(model)
    return f"{walk.called(branch)} would take the same branch every time" if branch else ""


def draw_alike(graphs: Iterable[Path]) -> bool:
    """Whether forms of one graph draw the same random numbers from a seed: ONNX Runtime and cuDNN draw others."""
    return not any(_drawn_on_host(nodes) or any(map(drops_weights, nodes)) for nodes in map(_nodes_of, graphs))


def _drawn_on_host(nodes: Iterable[onnx.NodeProto]) -> list[str]:
    return sorted({node.op_type for node in nodes if node.domain in ("", MICROSOFT)} & SEEDED)


def _chosen_by_data(model: onnx.ModelProto) -> onnx.NodeProto | None:
    """An If or Loop whose condition depends on the numbers of a batch, not only on its sizes; None without any."""
    makers = {name: node for node in walk.all_nodes(model) for name in node.output}
    constants = {tensor.name for graph in walk.all_graphs(model) for tensor in graph.initializer}
    for node in walk.all_nodes(model):
        if node.op_type == "Loop" and node.domain == "":
            return node
        waiting, visited = [node.input[0]] if walk.is_if(node) else [], set(constants)
        while waiting:
            name = waiting.pop()
            if name in visited:
                continue
            visited.add(name)
            if name not in makers:
                return node
            if makers[name].op_type not in _OF_SIZES:
                waiting += walk.inputs(makers[name])
    return None


def _nodes_of(graph: Path) -> list[onnx.NodeProto]:
    return list(walk.all_nodes(onnx.load(graph)))
