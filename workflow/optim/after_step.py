"""Graphs that end a step on a GPU by what its sums show, so that no step waits for the host's decision.

They run behind `queued_gradient_graph`, whose results they read, and change nothing where these are unusable.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.optim.builder import Builder


def statistics_graph(ranks: int) -> onnx.ModelProto:
    """Graph of the running statistics behind a step.

    Inputs are `statistics` fp32 [n], the sums over `ranks` of what the micro-batches gave, `state` fp32 [n], those
    before the step, and `useful` fp32 [1], 1 or 0. Output is `state.out` fp32 [n], which may have the memory of
    `state`: the mean over the ranks where `useful` is 1, else `state`.
    """
    build = Builder("statistics")
    statistics, state = build.input("statistics", "n"), build.input("state", "n")
    useful = build("Greater", build.input("useful", 1), build.constant([0.0], "float32"))
    mean = statistics if ranks == 1 else build("Mul", statistics, build.constant([1 / ranks], "float32"))
    build("Where", useful, mean, state, output="state.out")
    build.output("state.out", "n")
    return build.model()


def loss_scale_graph(smallest: float, largest: float, period: int) -> onnx.ModelProto:
    """Graph of the dynamic loss scale behind a step, with the rule and the bits of `LossScale.after`.

    Inputs are fp32 [1]: `scale`, `good`, the number of steps without overflow since it last changed, `loss` and
    `weight`, the sums of the step, and `useful`, 1 or 0. Outputs are `scale.out` and `good.out`, which may have the
    memory of `scale` and `good`. A step whose loss is not finite, or whose labels do not count, changes neither.

    Parameters
    ----------
    smallest, largest
        Bounds of the scale, powers of two times the scale's unit.
    period
        Steps without overflow after which the scale is doubled.
    """
    build = Builder("loss_scale")
    scale, good, loss, weight, useful = (build.input(name, 1) for name in ("scale", "good", "loss", "weight", "useful"))

    def constant(value: float) -> str:
        return build.constant([value], "float32")

    zero = constant(0.0)
    works = build("Greater", useful, zero)
    # The difference is NaN for infinity and NaN, and NaN equals nothing.
    finite = build("Equal", build("Sub", loss, loss), zero)
    counts = build("And", finite, build("Greater", weight, zero))
    falls = build("And", counts, build("Not", works))
    next_good = build("Add", good, constant(1.0))
    rises = build("And", works, build("Not", build("Less", next_good, constant(period))))
    half, double = build("Mul", scale, constant(0.5)), build("Mul", scale, constant(2.0))
    least, most = constant(smallest), constant(largest)
    lower = build("Where", build("Less", half, least), least, half)
    higher = build("Where", build("Greater", double, most), most, double)
    build("Where", falls, lower, build("Where", rises, higher, scale), output="scale.out")
    good_steps = build("Where", works, next_good, good)
    build("Where", build("Or", falls, rises), zero, good_steps, output="good.out")
    for name in ("scale.out", "good.out"):
        build.output(name, 1)
    return build.model()
