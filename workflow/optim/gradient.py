"""From the gradient of the summed loss to the one the optimizer takes: averaged, its norm known, clipped.

Built by `configure`, run by the trainer once a step on the whole flat gradient buffer, after the ranks'
sums were added.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.optim.builder import Builder

EPSILON = 1e-6
"""Keeps the quotient finite where the norm is 0, as in torch.nn.utils.clip_grad_norm_."""


def gradient_graph() -> onnx.ModelProto:
    """Scale gradients to the mean loss and clip them to a norm.

    Inputs `gradients` fp32 [n] (n a multiple of 64), `inverse_weight` fp32 [1] (1 / sum of loss weights),
    `max_norm` fp32 [1] (inf: no clipping). Outputs `norm` fp32 [1] = ||gradients|| * inverse_weight, and
    `gradients.out` = gradients * inverse_weight * min(1, max_norm / (norm + 1e-6)), to be bound to the
    memory of `gradients`. A NaN or infinity in the gradients makes `norm` non-finite (so does a norm of the
    sum beyond 1.8e19); `gradients.out` is then useless.
    """
    build = Builder("gradient")
    gradients = build.input("gradients", "n")
    inverse_weight = build.input("inverse_weight", 1)
    max_norm = build.input("max_norm", 1)
    norm = build.op("Mul", build.root(build.square_sum(gradients)), inverse_weight, out="norm")
    allowed = build.op("Div", max_norm, build.op("Add", norm, build.constant([EPSILON], "float32")))
    clip = build.op("Min", allowed, build.constant([1.0], "float32"))
    build.op("Mul", gradients, build.op("Mul", inverse_weight, clip), out="gradients.out")
    build.output("gradients.out", "n")
    build.output("norm", 1)
    return build.model()
