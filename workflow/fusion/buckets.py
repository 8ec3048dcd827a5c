"""Gradient buckets of a training graph: where in the backward pass a part of the flat gradient is complete. Pure.

A node BucketReady reads every gradient of a bucket, and so runs behind them, in whatever order the runtime takes the
others. On a GPU it starts the all-reduce of the bucket (`ortflow.workflow.cuda.bucket`) while the backward pass
continues. The sum replaces the gradients, so no other node may read them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import import_domain, replace
from ortflow.workflow.graph.ir.order import sort_nodes
from ortflow.workflow.layout import Entry, FlatIndex

OPERATOR = "BucketReady"
TOKEN = "ortflow.buckets"
"""Output that the last bucket's node makes: without a reader ONNX Runtime would drop the nodes."""
ROWS = "TableRows"
"""The operator of `table_rows`, whose nodes are brought into the order of all ranks with the others."""
LEAST = 6_000_000
"""Elements of a bucket: 24 MB of fp32, from which an all-reduce over NVLink comes near its full rate."""
# With one size for all, GPUs waited 0.27 to 0.42 ms a step for the last bucket and the rows (two H100s,
# docs/benchmarks.md).
LEAST_LAST = LEAST // 4
"""The same of the last bucket, beside whose sum nothing is left to compute."""
MOST_INPUTS = 60
"""operators.c passes 64 at most."""


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of the flat gradient, and the tensors that lie there."""

    start: int
    stop: int
    names: tuple[str, ...]


def buckets_of(index: FlatIndex, least: int = LEAST, single_tensors: Collection[str] = ()) -> list[Bucket]:
    """The trained tensors in pieces of at least `least` elements, in the order of the flat buffer.

    A piece ends with its group: the vectors behind the matrices are complete only at the end of the backward pass. Each
    tensor of `single_tensors` is a piece. They cover [0, index.trained) without gaps.
    """
    return _cut([entry for entry in index if entry.offset < index.trained], index.trained, least, single_tensors)


def with_small_end(buckets: Sequence[Bucket], last: Bucket, index: FlatIndex, least: int = LEAST_LAST) -> list[Bucket]:
    """The buckets with `last`, which the backward pass completes at its end, in pieces of at least `least` elements."""
    pieces = _cut([index[name] for name in last.names], last.stop, least)
    return [piece for bucket in buckets for piece in (pieces if bucket == last else [bucket])]


def _cut(entries: Sequence[Entry], end: int, least: int, single_tensors: Collection[str] = ()) -> list[Bucket]:
    """Neighbouring tensors up to element `end` in pieces: see `buckets_of`."""
    pieces: list[list[Entry]] = []
    for entry in entries:
        last = pieces[-1] if pieces else []
        size = entry.offset - last[0].offset if last else 0
        apart = entry.name in single_tensors or (last and last[0].name in single_tensors)
        if not last or apart or size >= least or last[0].tensor.group != entry.tensor.group:
            pieces.append([entry])
        else:
            last.append(entry)
    stops = [*(piece[0].offset for piece in pieces[1:]), end]
    return [
        Bucket(piece[0].offset, stop, tuple(entry.name for entry in piece))
        for piece, stop in zip(pieces, stops, strict=True)
    ]


def with_buckets(model: onnx.ModelProto, buckets: Sequence[Bucket]) -> tuple[onnx.ModelProto, list[Bucket]]:
    """A copy of a training graph with a BucketReady behind each bucket's gradients, and the buckets in their order.

    Node i has the attribute `bucket` i. Each also reads what the one before it makes, so that every rank runs them in
    the same order. The last makes the output TOKEN. Buckets of which the graph computes no gradient are left out.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    _set_apart(graph, {gradient_of(name) for bucket in buckets for name in bucket.names})
    sort_nodes(graph)
    places = {name: place for place, node in enumerate(graph.node) for name in node.output}

    def complete(bucket: Bucket) -> int:
        return max((places.get(gradient_of(name), -1) for name in bucket.names), default=-1)

    order = sorted((bucket for bucket in buckets if complete(bucket) >= 0), key=complete)
    ends: list[tuple[int, int]] = [(complete(bucket), number) for number, bucket in enumerate(order)]
    ends += [
        (place, -1) for place, node in enumerate(graph.node) if node.op_type == ROWS and node.domain == CUDA_DOMAIN
    ]
    behind: dict[int, list[onnx.NodeProto]] = {}
    token: list[str] = []
    # NCCL matches the calls of the ranks by their order: in another one, the exchange of a table's rows on one rank
    # would meet the sum of a bucket on another.
    for place, number in sorted(ends):
        if number < 0:
            graph.node[place].input.extend(token)
            token = [graph.node[place].output[0]]
            continue
        gradients = [name for name in map(gradient_of, order[number].names) if name in places]
        parts = [gradients[at : at + MOST_INPUTS] for at in range(0, len(gradients), MOST_INPUTS)]
        for part_number, part in enumerate(parts):
            out = f"{TOKEN}.{number}.{part_number}"
            node = helper.make_node(
                OPERATOR, [*part, *token], [out], out, domain=CUDA_DOMAIN, gradients=len(part),
                bucket=number if part_number == len(parts) - 1 else -1,
            )  # fmt: skip
            behind.setdefault(place, []).append(node)
            graph.value_info.append(helper.make_tensor_value_info(out, TensorProto.FLOAT, [1]))
            token = [out]
    nodes: list[onnx.NodeProto] = []
    for place, node in enumerate(graph.node):
        nodes += [node, *behind.get(place, ())]
    for node in nodes if token else ():
        node.output[:] = [TOKEN if name == token[0] else name for name in node.output]
    replace(graph.node, nodes)
    if token:
        replace(graph.value_info, [value for value in graph.value_info if value.name != token[0]])
        graph.output.append(helper.make_tensor_value_info(TOKEN, TensorProto.FLOAT, [1]))
    import_domain(copy, CUDA_DOMAIN)
    return copy, order


def _set_apart(graph: onnx.GraphProto, gradients: Collection[str]) -> None:
    """Make copies, in place, of the gradients that other nodes read; these nodes read what is copied.

    That of w is read in the backward pass of w + a b, for example: a's gradient is a product of it.
    """
    read = {name for node in graph.node for name in walk.inputs(node)}
    values = {value.name: value for value in graph.output if value.name in read and value.name in gradients}
    if not values:
        return
    originals = {name: f"{name}/own" for name in values}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        nodes += [
            node,
            *(helper.make_node("Identity", [originals[name]], [name]) for name in node.output if name in originals),
        ]
    for node in walk.nodes(graph.node):
        node.input[:] = [originals.get(name, name) for name in node.input]
        node.output[:] = [originals.get(name, name) for name in node.output]
    for name, value in values.items():
        graph.value_info.add().CopyFrom(value)
        graph.value_info[-1].name = originals[name]
    replace(graph.node, nodes)


def gradient_of(name: str) -> str:
    """The training graph's output with the gradient of a parameter."""
    return f"{name}_grad"
