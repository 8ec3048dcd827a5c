"""Stochastic gradient descent as defined by torch.optim.SGD (dampening 0).

g = g + decay w; b = momentum b + g, where b starts at 0, so that the first b is g; w = w - lr b, or with Nesterov
momentum w = w - lr (g + momentum b).
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
            _kernel(build, optimizer, i, segment)
            continue
        if segment.weight_decay:
            decay = build.constant([segment.weight_decay], "float32")
            change = build("Add", change, build("Mul", parameters, decay))
        if optimizer.momentum:
            momentum = build.constant([optimizer.momentum], "float32")
            velocity = build("Mul", f"{MOMENT}.{i}", momentum)
            summed = build("Add", velocity, change, output=f"{MOMENT}.{i}.out")
            change = build("Add", change, build("Mul", summed, momentum)) if optimizer.nesterov else summed
        build("Sub", parameters, build("Mul", change, build.rate(segment.lr_scale)), output=f"{parameters}.out")


def _kernel(build: Builder, optimizer: Sgd, i: int, segment: Segment) -> None:
    """The update of segment `i` in one pass over memory."""
    decay = segment.weight_decay
    inputs = [build.rate(segment.lr_scale), f"parameters.{i}", f"gradients.{i}"]
    if optimizer.momentum:
        outputs = [f"parameters.{i}.out", f"{MOMENT}.{i}.out"]
        attributes = {"momentum": optimizer.momentum, "nesterov": int(optimizer.nesterov)}
        build.write("SgdMomentum", [*inputs, f"{MOMENT}.{i}"], outputs, domain=CPU_DOMAIN, decay=decay, **attributes)
    else:
        build.write("Sgd", inputs, [f"parameters.{i}.out"], domain=CPU_DOMAIN, decay=decay)
