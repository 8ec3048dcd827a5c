"""NAdam (Dozat 2016, "Incorporating Nesterov momentum into Adam") as torch.optim.NAdam defines it.

mu_t = b1 (1 - 0.96^(t psi) / 2) with the momentum decay psi; m and v as in Adam; v^ = v / (1 - b2^t);
w = w - lr (g (1 - mu_t) / (1 - M_t) + m mu_(t+1) / (1 - M_t mu_(t+1))) / (sqrt(v^) + epsilon), M_t = mu_1 ... mu_t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ortflow.workflow.optim.builder import Builder
from ortflow.workflow.optim.parts import average, correction, decayed, double, regularized, single, steps
from ortflow.workflow.optim.segments import Segment
from ortflow.workflow.spec.optimizers import NAdam

_TERMS = 48
"""Of the series of a logarithm at 1/2: what is left out is below 2^-53."""


def update(build: Builder, optimizer: NAdam, segments: Sequence[Segment]) -> None:
    """Append the update of `segments`."""
    first, second = optimizer.betas
    count = steps(build)
    unit = double(build, 1.0)
    now, ahead = _mu(build, optimizer, count), _mu(build, optimizer, build("Add", count, unit))
    product = _product(build, optimizer, count)
    of_gradient = build("Div", build("Sub", unit, now), build("Sub", unit, product))
    of_moment = build("Div", ahead, build("Sub", unit, build("Mul", product, ahead)))
    # (g a + m b) / (sqrt(v / c) + epsilon), and the root's factor is a number.
    of_gradient, of_moment = single(build, of_gradient), single(build, of_moment)
    of_root = single(build, build("Div", unit, build("Sqrt", correction(build, second, count))))
    epsilon = build.constant([optimizer.epsilon], "float32")
    for i, segment in enumerate(segments):
        rate = build.rate(segment.lr_scale)
        parameters, gradients, decay = f"parameters.{i}", f"gradients.{i}", segment.weight_decay
        if not optimizer.decoupled_weight_decay:
            gradients = regularized(build, parameters, gradients, decay)
        moment = average(build, f"moment_1.{i}", gradients, first)
        square = average(build, f"moment_2.{i}", build("Mul", gradients, gradients), second)
        root = build("Add", build("Mul", build("Sqrt", square), of_root), epsilon)
        change = build("Add", build("Mul", gradients, of_gradient), build("Mul", moment, of_moment))
        change = build("Div", build("Mul", change, rate), root)
        weights = decayed(build, parameters, decay, rate) if optimizer.decoupled_weight_decay else parameters
        build("Sub", weights, change, output=f"{parameters}.out")


def _mu(build: Builder, optimizer: NAdam, count: str) -> str:
    first, decay = optimizer.betas[0], math.log(0.96) * optimizer.momentum_decay
    lost = build("Mul", build("Exp", build("Mul", count, double(build, decay))), double(build, first / 2))
    return build("Sub", double(build, first), lost)


def _product(build: Builder, optimizer: NAdam, count: str) -> str:
    """M_t, double [1], without a number that a checkpoint would have to store.

    log M_t = t log b1 + sum over i of log(1 - q^i / 2) with q = 0.96^psi. With log(1 - x) = - sum over k of x^k / k,
    the sum over i is one over k of the geometric series q^k (1 - q^(k t)) / (1 - q^k), or of t for q = 1.
    """
    first, decay = optimizer.betas[0], math.log(0.96) * optimizer.momentum_decay
    if not first:
        return double(build, 0.0)
    orders = np.arange(1, _TERMS + 1)
    factors = -(0.5**orders) / orders
    log_start = build("Mul", count, double(build, math.log(first)))
    if not decay:
        log_rest = build("Mul", count, double(build, float(factors.sum())))
    else:
        # 1 - q^k for q near 1 by expm1, as exact as its arguments.
        scaled = factors * np.exp(decay * orders) / -np.expm1(decay * orders)
        powers = build("Exp", build("Mul", count, build.constant(decay * orders, "float64")))
        series = build("Mul", build("Sub", double(build, 1.0), powers), build.constant(scaled, "float64"))
        log_rest = build("ReduceSum", series, build.constant([0], "int64"), keepdims=1)
    return build("Exp", build("Add", log_start, log_rest))
