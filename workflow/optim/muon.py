"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), with AdamW for all but matrices.

m = mu m + (1 - mu) g; u = (1 - mu) g + mu m with Nesterov momentum, else m; O is u orthogonalized by five steps of a
Newton-Schulz iteration; w = w - lr decay w - lr sqrt(max(1, rows / columns)) O. As torch.optim.Muon, whose iteration is
in bf16 and here in fp32. A tensor of more than two axes is a matrix with a row for each element of the first axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ortflow.workflow.optim import adam
from ortflow.workflow.optim.builder import Builder
from ortflow.workflow.optim.matrices import padded, shaped
from ortflow.workflow.optim.parts import average, decayed
from ortflow.workflow.optim.segments import Segment
from ortflow.workflow.spec.optimizers import Muon

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of a step X = a X + (b X X' + c (X X')^2) X, chosen for the largest slope at 0."""
STEPS = 5
_SMALLEST = 1e-7
"""Norm by which an update is divided at least."""


def update(build: Builder, optimizer: Muon, segments: Sequence[Segment]) -> None:
    """Append the update of `segments`, each of which is one parameter; those with a shape are matrices."""
    vectors = [i for i, segment in enumerate(segments) if segment.shape is None]
    if vectors:
        adam.own_steps(build, len(segments))
    for i, segment in enumerate(segments):
        if segment.shape is not None:
            _matrix(build, optimizer, i, segment, segment.shape)
            continue
        adam.kernel(
            build,
            optimizer,
            i,
            rate=build.rate(segment.lr_scale),
            gradients=f"gradients.{i}",
            weight_decay=segment.weight_decay,
            parameters_out=f"parameters.{i}.out",
        )


def _matrix(build: Builder, optimizer: Muon, i: int, segment: Segment, shape: tuple[int, ...]) -> None:
    parameters, gradients, momentum = f"parameters.{i}", f"gradients.{i}", optimizer.momentum
    rows, columns = shape[0], math.prod(shape[1:])
    change = average(build, f"moment_1.{i}", gradients, momentum)
    if optimizer.nesterov:
        new = build("Mul", gradients, build.constant([1 - momentum], "float32"))
        change = build("Add", new, build("Mul", change, build.constant([momentum], "float32")))
    norm = build.root(build.square_sum(change))
    scaled = build("Div", change, build("Max", norm, build.constant([_SMALLEST], "float32")))
    matrix = shaped(build, scaled, (rows, columns))
    if rows > columns:
        matrix = build("Transpose", matrix, perm=[1, 0])
    for _ in range(STEPS):
        matrix = _step(build, matrix)
    if rows > columns:
        matrix = build("Transpose", matrix, perm=[1, 0])
    rate = build.rate(segment.lr_scale * math.sqrt(max(1.0, rows / columns)))
    change = build("Mul", padded(build, matrix, rows * columns, segment), rate)
    weights = decayed(build, parameters, segment.weight_decay, build.rate(segment.lr_scale))
    build("Sub", weights, change, output=f"{parameters}.out")


def _step(build: Builder, matrix: str) -> str:
    a, b, c = (build.constant([coefficient], "float32") for coefficient in COEFFICIENTS)
    gram = build("MatMul", matrix, build("Transpose", matrix, perm=[1, 0]))
    inner = build("Add", build("Mul", gram, b), build("Mul", build("MatMul", gram, gram), c))
    return build("Add", build("Mul", matrix, a), build("MatMul", inner, matrix))
