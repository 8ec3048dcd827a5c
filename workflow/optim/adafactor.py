"""Adafactor (Shazeer & Stern 2018, algorithm 4 and section 8) as torch.optim.Adafactor defines it.

t is the step, w_t = t^beta2_decay. Of a tensor with two axes or more, r and c are moving averages of the mean squares
of the rows and columns of g, r = (1 - w_t) r + w_t mean(g^2), and v = r c / max(mean(r), e1); of others
v = (1 - w_t) v + w_t g^2. u = g / sqrt(max(v, e1^2)), divided by max(1, rms(u) / d);
w = w - lr decay w - max(e2, rms(w)) min(lr, 1 / sqrt(t)) u.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ortflow.workflow.optim.builder import Builder
from ortflow.workflow.optim.matrices import padded, root_mean_square, shaped
from ortflow.workflow.optim.parts import decayed, double, single, steps
from ortflow.workflow.optim.segments import Segment
from ortflow.workflow.spec.optimizers import Adafactor

_MOMENT = "square_average"


def update(build: Builder, optimizer: Adafactor, segments: Sequence[Segment]) -> None:
    """Append the update of `segments`, each of which is one parameter."""
    count = steps(build)
    new = single(build, build("Pow", count, double(build, optimizer.beta2_decay)))
    rate_of_moment = build("Sub", build.constant([1.0], "float32"), new)
    longest = single(build, build("Div", double(build, 1.0), build("Sqrt", count)))
    first, second = (build.constant([epsilon], "float32") for epsilon in optimizer.epsilon)
    for i, segment in enumerate(segments):
        parameters, gradients, shape = f"parameters.{i}", f"gradients.{i}", segment.shape or ()
        size, rate = math.prod(shape), build.rate(segment.lr_scale)
        if len(shape) >= 2 and min(shape[-2:]) > 1:
            square = _factored(build, i, segment, shape, rate_of_moment, new, first)
        else:
            squares = build("Mul", build("Mul", gradients, gradients), new)
            square = build("Add", build("Mul", f"{_MOMENT}.{i}", rate_of_moment), squares, output=f"{_MOMENT}.{i}.out")
            if len(shape) >= 2:
                square = _of_vector(build, square, segment, shape, first)
        smallest = build.constant([optimizer.epsilon[0] ** 2], "float32")
        change = build("Div", gradients, build("Sqrt", build("Max", square, smallest)))
        threshold = build.constant([optimizer.clip_threshold], "float32")
        clip = build("Div", root_mean_square(build, change, size), threshold)
        relative = build("Max", root_mean_square(build, parameters, size), second)
        largest = build("Mul", relative, build("Min", rate, longest))
        step = build("Div", largest, build("Max", clip, build.constant([1.0], "float32")))
        weights = decayed(build, parameters, segment.weight_decay, rate)
        build("Sub", weights, build("Mul", change, step), output=f"{parameters}.out")


def _of_vector(build: Builder, square: str, segment: Segment, shape: tuple[int, ...], smallest: str) -> str:
    """r c / mean(r) where one axis has length 1: then mean(r) is c or r, and the other of them is the moment."""
    squares = shaped(build, square, shape)
    mean = build("ReduceMean", squares, build.constant([-2, -1], "int64"), keepdims=1)
    scaled = build("Mul", squares, build("Div", mean, build("Max", mean, smallest)))
    return padded(build, scaled, math.prod(shape), segment)


def _factored(
    build: Builder, i: int, segment: Segment, shape: tuple[int, ...], rate_of_moment: str, new: str, smallest: str
) -> str:
    """v of a tensor, padded. Its segment of the moment has r, then c, then zeros."""
    row_shape, column_shape = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
    rows, columns = math.prod(row_shape), math.prod(column_shape)
    gradients = shaped(build, f"gradients.{i}", shape)
    squares = build("Mul", gradients, gradients)

    def averaged(of: tuple[int, ...], start: int, axis: int) -> str:
        mean = build("ReduceMean", squares, build.constant([axis], "int64"), keepdims=1)
        old = build("Mul", shaped(build, f"{_MOMENT}.{i}", of, start), rate_of_moment)
        return build("Add", old, build("Mul", mean, new))

    row, column = averaged(row_shape, 0, -1), averaged(column_shape, rows, -2)
    parts = padded(build, row, rows, segment), padded(build, column, columns, segment, rows)
    build("Add", *parts, output=f"{_MOMENT}.{i}.out")
    mean = build("Max", build("ReduceMean", row, build.constant([-2], "int64"), keepdims=1), smallest)
    # No MatMul, whose factors TF32 would round.
    square = build("Div", build("Mul", row, column), mean)
    return padded(build, square, math.prod(shape), segment)
