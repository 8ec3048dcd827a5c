"""The in-place rule of update graphs: each reader of a buffer comes before the node that writes the buffer.

The trainer binds an output `NAME.out` to the memory of the input `NAME`. A node that reads and writes a buffer must be
elementwise. ONNX Runtime (seen with 1.19.2) runs nodes in an order of its own, not in that of the file, and keeps only
their dependencies. So "before" means that the writer depends on the reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx

from ortflow.workflow.graph.domains import CPU_DOMAIN, CUDA_DOMAIN, MICROSOFT
from ortflow.workflow.graph.ir import walk

OUT = ".out"
"""End of the names of outputs that have the memory of an input."""
ELEMENTWISE = {
    "Abs", "Add", "And", "Cast", "Clip", "Div", "Equal", "Erf", "Exp", "Greater", "GreaterOrEqual", "Identity",
    "Less", "LessOrEqual", "Log", "Max", "Mean", "Min", "Mul", "Neg", "Not", "Or", "Pow", "Reciprocal", "Relu",
    "Sigmoid", "Sign", "Sqrt", "Sub", "Sum", "Tanh", "Where", "Xor",
}  # fmt: skip
"""Operators of ONNX that may write over an input of the same shape."""
_UPDATES = frozenset({"AdamOptimizer", "AdamWOptimizer", "LambOptimizer", "SGDOptimizer", "SGDOptimizerV2"})
"""ONNX Runtime's kernels of whole updates."""
_ALIASES = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
"""Operators of ONNX whose output may be the memory of their first input."""


def late_reader(graph: onnx.GraphProto) -> tuple[onnx.NodeProto, str] | None:
    """A node that may read a buffer while or after it is written, and the buffer; None if there is none."""
    inputs = {value.name for value in graph.input}
    outputs = {value.name: value.name.removesuffix(OUT) for value in graph.output}
    buffers = {out: name for out, name in outputs.items() if out != name and name in inputs}
    producers = {name: place for place, node in enumerate(graph.node) for name in node.output if name}
    readers: dict[str, list[int]] = {}
    for place, node in enumerate(graph.node):
        for name in _read_by(node):
            readers.setdefault(name, []).append(place)
    for out, buffer in buffers.items():
        writer = producers.get(out)
        if writer is None:
            continue
        late = set(_readers_of_memory(buffer, graph.node, readers))
        if _writes_over(graph.node[writer]):
            late.discard(writer)
        if late:
            late -= _ancestors(writer, graph.node, producers, late)
        if late:
            return graph.node[min(late)], buffer
    return None


def _writes_over(node: onnx.NodeProto) -> bool:
    """Whether a node may have an output in the memory of an input."""
    if node.domain == MICROSOFT:
        return node.op_type in _UPDATES
    return node.domain in (CPU_DOMAIN, CUDA_DOMAIN) or node.op_type in ELEMENTWISE


def _read_by(node: onnx.NodeProto) -> set[str]:
    return {name for inner in walk.nodes([node]) for name in inner.input if name}


def _readers_of_memory(buffer: str, nodes: Sequence[onnx.NodeProto], readers: Mapping[str, list[int]]) -> Iterator[int]:
    """Places of the nodes that read the buffer, also through other views of its memory."""
    names = [buffer]
    while names:
        name = names.pop()
        for place in readers.get(name, ()):
            yield place
            node = nodes[place]
            if node.op_type in _ALIASES and not node.domain and node.input[0] == name:
                names.append(node.output[0])


def _ancestors(
    start: int, nodes: Sequence[onnx.NodeProto], producers: Mapping[str, int], candidates: set[int]
) -> set[int]:
    """Those of `candidates` on which the node `start` depends."""
    reached, places, missing = {start}, [start], set(candidates)
    while places and missing:
        for name in _read_by(nodes[places.pop()]):
            place = producers.get(name)
            if place is not None and place not in reached:
                reached.add(place)
                missing.discard(place)
                places.append(place)
    return candidates - missing
