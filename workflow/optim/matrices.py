"""Nodes for rules that read a parameter as a matrix: out of its padded segment, and back into one.

Muon and Adafactor take whole tensors by other nodes than norms, which ranks with pieces of a tensor cannot share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ortflow.workflow.optim.builder import Builder
from ortflow.workflow.optim.segments import Segment


def shaped(build: Builder, flat: str, shape: Sequence[int], start: int = 0) -> str:
    """Elements of a segment from `start` on, in a shape."""
    ends = (build.constant([edge], "int64") for edge in (start, start + math.prod(shape)))
    return build("Reshape", build("Slice", flat, *ends), build.constant(list(shape), "int64"))


def padded(build: Builder, values: str, count: int, segment: Segment, start: int = 0) -> str:
    """`count` values from element `start` of a segment on, and zeros elsewhere.

    By Pad: ONNX Runtime's Concat of different sizes copies a table from the host, which no CUDA graph may contain.
    """
    flat = build("Reshape", values, build.constant([-1], "int64"))
    zeros = [start, segment.count - start - count]
    return build("Pad", flat, build.constant(zeros, "int64")) if any(zeros) else flat


def root_mean_square(build: Builder, flat: str, count: int) -> str:
    """Root of the mean square of a padded vector with `count` elements, fp32 [1]."""
    return build.root(build("Div", build.square_sum(flat), build.constant(np.array([count]), "float64")))
