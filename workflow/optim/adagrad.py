"""Adagrad (Duchi et al. 2011) as torch.optim.Adagrad defines it.

g = g + decay w; s = s + g^2; w = w - lr g / (sqrt(s0 + s) + epsilon) with the initial sum s0.
"""

from __future__ import annotations

from collections.abc import Sequence

from ortflow.workflow.optim.builder import Builder
from ortflow.workflow.optim.parts import regularized
from ortflow.workflow.optim.segments import Segment
from ortflow.workflow.spec.optimizers import Adagrad


def update(build: Builder, optimizer: Adagrad, segments: Sequence[Segment]) -> None:
    """Append the update of `segments`."""
    for i, segment in enumerate(segments):
        rate = build.rate(segment.lr_scale)
        parameters = f"parameters.{i}"
        gradients = regularized(build, parameters, f"gradients.{i}", segment.weight_decay)
        squares = build("Add", f"square_sum.{i}", build("Mul", gradients, gradients), output=f"square_sum.{i}.out")
        if optimizer.initial_sum:
            # Buffers start at 0, and their padding stays 0: the initial sum is added where it is read.
            squares = build("Add", squares, build.constant([optimizer.initial_sum], "float32"))
        root = build("Add", build("Sqrt", squares), build.constant([optimizer.epsilon], "float32"))
        change = build("Div", build("Mul", gradients, rate), root)
        build("Sub", parameters, change, output=f"{parameters}.out")
