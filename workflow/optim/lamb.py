"""LAMB (You et al. 2020, "Large batch optimization for deep learning", algorithm 2).

u = m^ / (sqrt(v^) + epsilon) + decay w with Adam's bias-corrected moments m^, v^; w = w - lr r u with the trust ratio
r = ||w|| / ||u|| of the whole tensor, and r = 1 if either norm is 0. The paper's phi is the identity: the ratio is not
clipped, and parameters without decay are scaled like all others.
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
    if build.kernels:
        for i, segment in enumerate(segments):
            states = [f"{moment}.{i}" for moment in moments(optimizer)]
            build.write(
                "Lamb",
                ["step", build.rate(segment.lr_scale), f"parameters.{i}", f"gradients.{i}", *states],
                [*(f"{moment}.out" for moment in states), f"parameters.{i}.out"],
                domain=CPU_DOMAIN,
                beta_1=optimizer.betas[0],
                beta_2=optimizer.betas[1],
                epsilon=optimizer.epsilon,
                decay=segment.weight_decay,
            )
        return
    # ONNX Runtime 1.19.2 has no kernel of LambOptimizer for CPUs.
    changes(build, optimizer, segments)
    # One vector of ratios: several scalar nodes per parameter would double the time to open a session.
    squares = (square_sums(build, name, len(segments)) for name in ("parameters", "change"))
    rates = scaled_rates(build, trust_ratios(build, *squares), segments)
    apply(build, rates, len(segments))


def changes(build: Builder, optimizer: Lamb, segments: Sequence[Segment]) -> None:
    """Append new moments and `change.i`, -u of segment `i`."""
    adam.own_steps(build, len(segments))
    # The fused kernel at rate 1 gives -u, written to the memory of the gradients.
    for i, segment in enumerate(segments):
        adam.kernel(
            build,
            optimizer,
            i,
            rate=build.constant([1.0], "float32"),
            gradients=f"gradients.{i}",
            weight_decay=segment.weight_decay,
            change_out=f"change.{i}",
        )


def square_sums(build: Builder, name: str, count: int, output: str | None = None) -> str:
    """Append the sums of squares of `NAME.0`, `NAME.1`, …, double [count]."""
    return build("Concat", *(build.square_sum(f"{name}.{i}") for i in range(count)), axis=0, output=output)


def trust_ratios(build: Builder, weights: str, changes: str) -> str:
    """Append r for each tensor, fp32 [tensors], from the sums of squares of w and u, double [tensors]."""
    positive = build("Greater", build("Min", weights, changes), build.constant([0.0], "float64"))
    return build.root(build("Where", positive, build("Div", weights, changes), build.constant([1.0], "float64")))


def scaled_rates(build: Builder, ratios: str, segments: Sequence[Segment]) -> str:
    """Append the rate of each segment, fp32 [segments], from their trust ratios."""
    rates = build("Mul", ratios, "learning_rate")
    scales = [segment.lr_scale for segment in segments]
    return rates if all(scale == 1 for scale in scales) else build("Mul", rates, build.constant(scales, "float32"))


def apply(build: Builder, rates: str, count: int) -> None:
    """Append the new parameters of `count` segments, from `change.i` and the rate of each, fp32 [count]."""
    build.write("Split", [rates], [f"rate.{i}" for i in range(count)], axis=0, num_outputs=count)
    for i in range(count):
        scaled = build("Mul", f"change.{i}", f"rate.{i}")
        build("Add", f"parameters.{i}", scaled, output=f"parameters.{i}.out")
