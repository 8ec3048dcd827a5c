"""RAdam (Liu et al. 2020, "On the variance of the adaptive learning rate and beyond") as torch.optim.RAdam defines it.

m and v as in Adam; r = 2 / (1 - b2) - 1, r_t = r - 2 t b2^t / (1 - b2^t). Where r_t > 5, w = w - lr m^ l /
(sqrt(v) + epsilon) with l = sqrt(1 - b2^t) sqrt((r_t - 4) (r_t - 2) r / ((r - 4) (r - 2) r_t)); in the first steps,
where it is not, w = w - lr m^.
"""

from __future__ import annotations

from collections.abc import Sequence

from ortflow.workflow.optim.builder import Builder
from ortflow.workflow.optim.parts import average, correction, decayed, double, regularized, single, steps
from ortflow.workflow.optim.segments import Segment
from ortflow.workflow.spec.optimizers import RAdam


def update(build: Builder, optimizer: RAdam, segments: Sequence[Segment]) -> None:
    """Append the update of `segments`."""
    first, second = optimizer.betas
    adaptive, plain = _factors(build, optimizer)
    epsilon = build.constant([optimizer.epsilon], "float32")
    for i, segment in enumerate(segments):
        rate = build.rate(segment.lr_scale)
        parameters, gradients, decay = f"parameters.{i}", f"gradients.{i}", segment.weight_decay
        if not optimizer.decoupled_weight_decay:
            gradients = regularized(build, parameters, gradients, decay)
        moment = average(build, f"moment_1.{i}", gradients, first)
        square = average(build, f"moment_2.{i}", build("Mul", gradients, gradients), second)
        factor = build("Add", build("Div", adaptive, build("Add", build("Sqrt", square), epsilon)), plain)
        change = build("Mul", build("Mul", moment, rate), factor)
        weights = decayed(build, parameters, decay, rate) if optimizer.decoupled_weight_decay else parameters
        build("Sub", weights, change, output=f"{parameters}.out")


def _factors(build: Builder, optimizer: RAdam) -> tuple[str, str]:
    """a and b of the update m (a / (sqrt(v) + epsilon) + b), fp32 [1], one of which is 0."""
    count, zero, unit = steps(build), double(build, 0.0), double(build, 1.0)
    first, second = (correction(build, beta, count) for beta in optimizer.betas)
    power = build("Mul", build("Sub", unit, second), build("Mul", count, double(build, 2.0)))
    longest = 2 / (1 - optimizer.betas[1]) - 1
    length = build("Sub", double(build, longest), build("Div", power, second))
    inverse = build("Div", unit, first)
    if longest <= 5:
        return single(build, build("Mul", inverse, zero)), single(build, inverse)
    scale = double(build, longest / ((longest - 4) * (longest - 2)))
    shorter = (build("Sub", length, double(build, less)) for less in (4.0, 2.0))
    ratio = build("Mul", build("Div", build("Mul", *shorter), length), scale)
    rectified = build("Greater", length, double(build, 5.0))
    # The root of what may be negative is not used then.
    root = build("Sqrt", build("Mul", build("Where", rectified, ratio, zero), second))
    return (
        single(build, build("Mul", inverse, root)),
        single(build, build("Where", rectified, zero, inverse)),
    )
