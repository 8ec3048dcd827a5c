"""Statistics of BatchNormalization over the micro-batches of all ranks, as in PyTorch's SyncBatchNorm.

Called by `modes`. Each rank computes count, mean and squared deviations of its samples; one gather brings them to all
ranks, which combine them as Chan, Golub and LeVeque (1983) do, so that ranks count by their samples. The node itself
then normalises by given statistics. Its mark tells the rule that these depend on the data
(`autodiff.channel_norms`).
"""

from __future__ import annotations

from typing import NamedTuple

import onnx

from ortflow.workflow.graph.ir.collective import SYNCED, Kind, collective
from ortflow.workflow.graph.ir.edit import Editor


class Replicas(NamedTuple):
    """The ranks that a statistic runs over."""

    channel: int
    """Channel of their collectives."""
    ranks: int


class Statistics(NamedTuple):
    """Values over all ranks."""

    mean: str
    """[channels]"""
    variance: str
    """[channels]: the mean squared deviation."""
    elements: str
    """Elements of a channel, fp32 scalar."""


def over_replicas(edit: Editor, data: str, replicas: Replicas) -> Statistics:
    """Add the nodes that compute the statistics of `data`, [batch, channels, ...]."""
    pixels = edit("Reshape", data, edit.ints(0, 0, -1))
    mean = edit("ReduceMean", pixels, edit.ints(0, 2), keepdims=1)
    moved = edit("Sub", pixels, mean)
    squares = edit("ReduceSum", edit("Mul", moved, moved), edit.ints(0, 2), keepdims=0)
    flat = edit("Reshape", mean, edit.ints(-1))
    count = edit.cast(edit("Div", edit("Size", data), edit("Size", flat)))
    statistics = edit("Concat", flat, squares, edit("Reshape", count, edit.ints(1)), axis=0)
    rows = collective(edit, Kind.ALL_GATHER, edit("Unsqueeze", statistics, edit.ints(0)), *replicas)
    width = edit("Reshape", edit("Size", flat), edit.ints(1))
    means, deviations, counts = (edit.fresh(name) for name in ("means", "deviations", "counts"))
    sizes = edit("Concat", width, width, edit.ints(1), axis=0)
    edit.write("Split", [rows, sizes], [means, deviations, counts], axis=1)
    elements = edit("ReduceSum", counts, keepdims=0)
    global_mean = edit("Div", edit("ReduceSum", edit("Mul", means, counts), edit.ints(0), keepdims=0), elements)
    apart = edit("Sub", means, global_mean)
    between = edit("Mul", edit("Mul", apart, apart), counts)
    total = edit("ReduceSum", edit("Add", deviations, between), edit.ints(0), keepdims=0)
    return Statistics(global_mean, edit("Div", total, elements), elements)


def mark(node: onnx.NodeProto, replicas: Replicas) -> None:
    """Record in a node that its statistics are those of the batch, over these ranks."""
    node.metadata_props.add(key=SYNCED, value=f"{replicas.channel} {replicas.ranks}")
