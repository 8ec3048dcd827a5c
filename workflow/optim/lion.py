"""Lion (Chen et al. 2023, "Symbolic discovery of optimization algorithms", algorithm 2).

w = w - lr (sign(b1 m + (1 - b1) g) + decay w); m = b2 m + (1 - b2) g.
"""

from __future__ import annotations

from collections.abc import Sequence

from ortflow.workflow.optim.builder import Builder
from ortflow.workflow.optim.parts import decayed
from ortflow.workflow.optim.segments import Segment
from ortflow.workflow.spec.optimizers import Lion


def update(build: Builder, optimizer: Lion, segments: Sequence[Segment]) -> None:
    """Append the update of `segments`."""
    first, second = optimizer.betas

    def constant(value: float) -> str:
        return build.constant([value], "float32")

    for i, segment in enumerate(segments):
        rate = build.rate(segment.lr_scale)
        parameters, gradients, moment = f"parameters.{i}", f"gradients.{i}", f"moment.{i}"
        # b2 m is the only reader of m: b1 m comes from it, so that m can be written in place.
        average = build("Mul", moment, constant(second))
        new = build("Mul", gradients, constant(1 - first))
        mixed = build("Add", build("Mul", average, constant(first / second)), new)
        build("Add", average, build("Mul", gradients, constant(1 - second)), output=f"{moment}.out")
        sign = build("Where", build("Less", mixed, constant(0.0)), constant(-1.0), constant(0.0))
        sign = build("Where", build("Greater", mixed, constant(0.0)), constant(1.0), sign)
        weights = decayed(build, parameters, segment.weight_decay, rate)
        build("Sub", weights, build("Mul", sign, rate), output=f"{parameters}.out")
