"""Adam and AdamW on flat buffers, multi-threaded; ONNX Runtime's kernel uses one thread. See adam.c."""

from __future__ import annotations

from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.ir.rewriter import Rewriter


def put(rewriter: Rewriter) -> None:
    """Replace the nodes that write new parameters; nodes that output only a change (LAMB) stay."""
    for node in rewriter.nodes("AdamOptimizer", MICROSOFT):
        flags = attributes_of(node)
        next_step, moment_1, moment_2, parameters, *outputs = node.output
        if (
            (flags["do_bias_correction"], flags["weight_decay_mode"]) != (1, 0)
            or not parameters
            or any(outputs)
            or rewriter.is_read(next_step)
        ):
            continue
        rate, step, *buffers = node.input
        rewriter.drop(node)
        rewriter.add(
            "Adam",
            [step, rate, *buffers],
            [moment_1, moment_2, parameters],
            beta_1=flags["alpha"],
            beta_2=flags["beta"],
            epsilon=flags["epsilon"],
            decay=flags["lambda"],
        )
