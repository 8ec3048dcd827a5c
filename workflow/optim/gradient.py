"""Converts the gradient of the summed loss to the optimizer's input: averaged, with known norm, clipped.

Built by `configure`, run by the trainer once per step on the whole flat gradient buffer, after the ranks' sums were
added. There are two forms: one for a host that then decides on the update, and one for a step that is queued on a GPU
as a whole.
"""

from __future__ import annotations

import math

import onnx

from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.optim.builder import Builder

EPSILON = 1e-6
"""Keeps the quotient finite if the norm is 0, as in torch.nn.utils.clip_grad_norm_."""
FACTOR = "gradient_factor"
"""Name of the factor by which an update multiplies its gradients, if `queued_gradient_graph` has not done so."""


def gradient_graph(*, shared: bool = False) -> onnx.ModelProto:
    """Graph that scales gradients to the mean loss and clips them to a norm.

    Inputs are `gradients` fp32 [n] (n a multiple of 64), `inverse_weight` fp32 [1] (1 / sum of loss weights) and
    `max_norm` fp32 [1] (inf: no clipping). Outputs are `norm` fp32 [1] = ||gradients|| * inverse_weight, and
    `gradients.out` = gradients * inverse_weight * min(1, max_norm / (norm + 1e-6)), to be bound to the memory of
    `gradients`. If the gradients contain NaN or infinity, or their norm is beyond 1.8e19, `norm` is not finite and
    `gradients.out` is meaningless.

    Parameters
    ----------
    shared
        The gradients are a rank's shard. The sum of squares over all ranks is a further input, `squares` fp64 [1].
    """
    build = Builder("gradient")
    gradients = build.input("gradients", "n")
    inverse_weight = build.input("inverse_weight", 1)
    max_norm = build.input("max_norm", 1)
    squares = build.input("squares", 1, onnx.TensorProto.DOUBLE) if shared else build.square_sum(gradients)
    norm = build("Mul", build.root(squares), inverse_weight, output="norm")
    allowed = build("Div", max_norm, build("Add", norm, build.constant([EPSILON], "float32")))
    clip = build("Min", allowed, build.constant([1.0], "float32"))
    build("Mul", gradients, build("Mul", inverse_weight, clip), output="gradients.out")
    build.output("gradients.out", "n")
    build.output("norm", 1)
    return build.model()


def square_sums_graph(pieces: int, *, fused: bool = False) -> onnx.ModelProto:
    """The same for several pieces of a shard.

    Inputs are `piece.0`, `piece.1` and so on, fp32 [n]. Output is `squares` fp64 [1], the sum of all squares.

    Parameters
    ----------
    pieces
        Their number.
    fused
        A kernel of ours sums the squares of each.
    """
    build = Builder("squares", domains=[CUDA_DOMAIN] if fused else [])
    gradients = [build.input(f"piece.{number}", f"n{number}") for number in range(pieces)]
    total = ""
    for gradient in gradients:
        squares = build.own("SquareSum", gradient, onnx.TensorProto.DOUBLE) if fused else build.square_sum(gradient)
        total = build("Add", total, squares) if total else squares
    build("Identity", total, output="squares")
    build.output("squares", 1, onnx.TensorProto.DOUBLE)
    return build.model()


def square_sum_graph(*, fused: bool = False) -> onnx.ModelProto:
    """Graph that runs before `gradient_graph(shared=True)` and `queued_gradient_graph(shared=True)`.

    Input is `gradients` fp32 [n] (n a multiple of 64), a rank's shard. Output is `squares` fp64 [1], the sum of their
    squares, which is then summed over the ranks. With `fused`, a kernel of ours for GPUs computes it.
    """
    build = Builder("squares", domains=[CUDA_DOMAIN] if fused else [])
    gradients = build.input("gradients", "n")
    if fused:
        build.write("SquareSum", [gradients], ["squares"], domain=CUDA_DOMAIN)
    else:
        build.square_sum(gradients, output="squares")
    build.output("squares", 1, onnx.TensorProto.DOUBLE)
    return build.model()


def queued_gradient_graph(*, fused: bool = False, shared: bool = False) -> onnx.ModelProto:
    """Same as `gradient_graph`, for a host that does not read the sums.

    Unusable gradients become NaN throughout, so that `guarded` updates are skipped.

    Inputs are `gradients` fp32 [n] (n a multiple of 64), `loss` and `weight` fp32 [1] (sums of the loss and of its
    weights), `loss_scale` fp32 [1] (factor of the gradients) and `max_norm` fp32 [1]. Outputs are `norm` fp32 [1] =
    ||gradients|| / (weight loss_scale), `gradients.out`, to be bound to the memory of `gradients`, and `useful` fp32
    [1]: 1 if
    loss and norm are finite and the weight is not 0, else 0. With a loss scale of 1 the results equal those of
    `gradient_graph`.

    Parameters
    ----------
    fused
        A kernel of ours sums the squares. Instead of `gradients.out` there is the output FACTOR, fp32 [1], by which the
        update multiplies the gradients while it reads them (`guarded`), which saves a pass over them.
    shared
        The gradients are a rank's shard. The sum of squares over all ranks is the input `squares` fp64 [1] in place of
        `gradients`. The output is FACTOR, as with `fused`.
    """
    build = Builder("gradient", domains=[CUDA_DOMAIN] if fused else [])
    gradients = "" if shared else build.input("gradients", "n")
    loss, weight = build.input("loss", 1), build.input("weight", 1)
    loss_scale = build.input("loss_scale", 1)
    max_norm = build.input("max_norm", 1)
    unit, zero = build.constant([1.0], "float32"), build.constant([0.0], "float32")
    inverse = build("Div", unit, build("Mul", weight, loss_scale))
    if shared:
        squares = build.input("squares", 1, onnx.TensorProto.DOUBLE)
    else:
        squares = build.own("SquareSum", gradients, onnx.TensorProto.DOUBLE) if fused else build.square_sum(gradients)
    norm = build("Mul", build.root(squares), inverse, output="norm")
    allowed = build("Div", max_norm, build("Add", norm, build.constant([EPSILON], "float32")))
    clip = build("Min", allowed, unit)
    # The difference is NaN for infinity and NaN, and NaN equals nothing.
    finite = [build("Equal", build("Sub", value, value), zero) for value in (loss, norm)]
    useful = build("And", build("And", *finite), build("Greater", weight, zero))
    nothing = build.constant([math.nan], "float32")
    factor = build("Where", useful, build("Mul", inverse, clip), nothing, output=FACTOR)
    build("Cast", useful, output="useful", to=onnx.TensorProto.FLOAT)
    if fused or shared:
        build.output(FACTOR, 1)
    else:
        build("Mul", gradients, factor, output="gradients.out")
        build.output("gradients.out", "n")
    build.output("norm", 1)
    build.output("useful", 1)
    return build.model()
