"""Stochastic gradient descent as torch.optim.SGD defines it (dampening 0).

g = g + decay w; b = momentum b + g, where b starts at 0, so that the first b is g; w = w - lr b, or with
Nesterov's momentum w = w - lr (g + momentum b).
"""

from __future__ import annotations

from collections.abc import Sequence

from ortflow.workflow.graph.domains import CPU_DOMAIN
from ortflow.workflow.optim.builder import Builder
from ortflow.workflow.optim.segments import Segment
from ortflow.workflow.spec.optimizers import Sgd

MOMENT = "momentum"


def update(build: Builder, optimizer: Sgd, segments: Sequence[Segment]) -> None:
    """Append the update of `segments`."""
    for i, segment in enumerate(segments):
        parameters, change = f"parameters.{i}", f"gradients.{i}"
        if build.kernels:
            _kernel(build, optimizer, i, segment.weight_decay)
            continue
        if segment.weight_decay:
            decay = build.constant([segment.weight_decay], "float32")
            change = build.op("Add", change, build.op("Mul", parameters, decay))
        if optimizer.momentum:
            momentum = build.constant([optimizer.momentum], "float32")
            kept = build.op("Mul", f"{MOMENT}.{i}", momentum)
            summed = build.op("Add", kept, change, out=f"{MOMENT}.{i}.out")
            change = build.op("Add", change, build.op("Mul", summed, momentum)) if optimizer.nesterov else summed
        build.op("Sub", parameters, build.op("Mul", change, "learning_rate"), out=f"{parameters}.out")


def _kernel(build: Builder, optimizer: Sgd, i: int, decay: float) -> None:
    """The update of segment `i` in one pass over its memory."""
    inputs = ["learning_rate", f"parameters.{i}", f"gradients.{i}"]
    if optimizer.momentum:
        outputs = [f"parameters.{i}.out", f"{MOMENT}.{i}.out"]
        further = {"momentum": optimizer.momentum, "nesterov": int(optimizer.nesterov)}
        build.node("SgdMomentum", [*inputs, f"{MOMENT}.{i}"], outputs, domain=CPU_DOMAIN, decay=decay, **further)
    else:
        build.node("Sgd", inputs, [f"parameters.{i}.out"], domain=CPU_DOMAIN, decay=decay)
