"""Ranges of blocks along a divided axis, which Split and Slice take."""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.rules.cut import Cut, Reblock
from ortflow.workflow.graph.rules.spread import Spread


def blocks_of(s: Spread, node: onnx.NodeProto, cut: Cut, start: int, stop: int, sizes: tuple[int, ...]) -> Cut:
    """The whole blocks within a range along a divided axis. Proposes to cut at its ends if there is none."""
    edges = [sum(cut.blocks[:i]) for i in range(len(cut.blocks) + 1)]
    if start in edges and stop in edges and not cut.varies:
        blocks = cut.blocks[edges.index(start) : edges.index(stop)]
        if blocks:
            return Cut(cut.axis, blocks)
    if cut.seed is not None and len(cut.blocks) == 1 and cut.seed not in s.refused and not cut.varies:
        raise Reblock(cut.seed, sizes)
    raise s.unsupported(node)
