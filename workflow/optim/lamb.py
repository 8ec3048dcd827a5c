"""LAMB (You et al. 2020, "Large batch optimization for deep learning", algorithm 2).

u = m^ / (sqrt(v^) + epsilon) + decay w with Adam's bias-corrected moments m^, v^; w = w - lr r u with the
trust ratio r = ||w|| / ||u|| of the whole tensor, and r = 1 where either norm is 0. The paper's phi is the
identity: the ratio is not clipped, and parameters without decay are scaled like all others.
"""

from __future__ import annotations

from collections.abc import Sequence

from ortflow.workflow.graph.domains import CPU_DOMAIN
from ortflow.workflow.optim import adam
from ortflow.workflow.optim.builder import Builder
from ortflow.workflow.optim.segments import Segment
from ortflow.workflow.spec.optimizers import Lamb, moments


def update(build: Builder, optimizer: Lamb, segments: Sequence[Segment]) -> None:
    """Append the update of `segments`, each of which is one parameter."""
    places = range(len(segments))
    if build.kernels:
        for i in places:
            kept = [f"{moment}.{i}" for moment in moments(optimizer)]
            build.write(
                "Lamb",
                ["step", "learning_rate", f"parameters.{i}", f"gradients.{i}", *kept],
                [*(f"{moment}.out" for moment in kept), f"parameters.{i}.out"],
                domain=CPU_DOMAIN,
                beta_1=optimizer.betas[0],
                beta_2=optimizer.betas[1],
                epsilon=optimizer.epsilon,
                decay=segments[i].weight_decay,
            )
        return
    adam.own_steps(build, len(segments))
    # The fused kernel at rate 1 gives -u. It lies in the memory of the gradients, which the kernel takes over.
    for i in places:
        adam.kernel(
            build,
            optimizer,
            i,
            rate=build.constant([1.0], "float32"),
            gradients=f"gradients.{i}",
            weight_decay=segments[i].weight_decay,
            change_out=f"change.{i}",
        )
    # One vector of ratios: a handful of scalar nodes for each parameter would double the time to build a session.
    weights = build("Concat", *(build.square_sum(f"parameters.{i}") for i in places), axis=0)
    changes = build("Concat", *(build.square_sum(f"change.{i}") for i in places), axis=0)
    both = build("Greater", build("Min", weights, changes), build.constant([0.0], "float64"))
    squared = build("Where", both, build("Div", weights, changes), build.constant([1.0], "float64"))
    rates = build("Mul", build.root(squared), "learning_rate")
    build.write("Split", [rates], [f"rate.{i}" for i in places], axis=0, num_outputs=len(segments))
    for i in places:
        scaled = build("Mul", f"change.{i}", f"rate.{i}")
        build("Add", f"parameters.{i}", scaled, output=f"parameters.{i}.out")
