"""RMSprop (Tieleman & Hinton 2012, lecture 6e) as torch.optim.RMSprop defines it.

g = g + decay w; v = alpha v + (1 - alpha) g^2; centered: a = alpha a + (1 - alpha) g and v - a^2 in place of v below;
u = g / (sqrt(v) + epsilon); with momentum b = momentum b + u in place of u; w = w - lr u.
"""

from __future__ import annotations

from collections.abc import Sequence

from ortflow.workflow.optim.builder import Builder
from ortflow.workflow.optim.parts import average, regularized
from ortflow.workflow.optim.segments import Segment
from ortflow.workflow.spec.optimizers import RmsProp


def update(build: Builder, optimizer: RmsProp, segments: Sequence[Segment]) -> None:
    """Append the update of `segments`."""
    for i, segment in enumerate(segments):
        rate = build.rate(segment.lr_scale)
        parameters = f"parameters.{i}"
        change = regularized(build, parameters, f"gradients.{i}", segment.weight_decay)
        square = average(build, f"square_average.{i}", build("Mul", change, change), optimizer.alpha)
        if optimizer.centered:
            mean = average(build, f"gradient_average.{i}", change, optimizer.alpha)
            # The variance may round to less than 0, which has no root.
            square = build("Relu", build("Sub", square, build("Mul", mean, mean)))
        root = build("Add", build("Sqrt", square), build.constant([optimizer.epsilon], "float32"))
        change = build("Div", change, root)
        if optimizer.momentum:
            velocity = build("Mul", f"momentum.{i}", build.constant([optimizer.momentum], "float32"))
            change = build("Add", velocity, change, output=f"momentum.{i}.out")
        build("Sub", parameters, build("Mul", change, rate), output=f"{parameters}.out")
