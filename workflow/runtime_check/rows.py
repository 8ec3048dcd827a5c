"""Cases of reductions, normalisation along rows, and elementwise functions."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ortflow.workflow.runtime_check.case import Array, Case, ints, node, normal


def cases() -> Iterator[Case]:
    """All cases."""
    yield from _reductions()
    yield from _normalised()
    yield from _losses()
    yield from _elements()


def _reductions() -> Iterator[Case]:
    x = normal(60, 3, 4, 5, 6)
    for operator, function in (("ReduceSum", np.sum), ("ReduceMean", np.mean), ("ReduceMax", np.max)):
        reduce = node(operator, "x axes", "y", keepdims=0)
        y = np.asarray(function(x.astype(np.float64), axis=(0, 2)))
        yield Case(f"{operator} over axes apart", [reduce], {"x": x}, {"y": y}, {}, {"axes": ints(-2, 0)})
    nothing = node("ReduceSum", "x axes", "y", noop_with_empty_axes=1)
    yield Case("ReduceSum over no axis", [nothing], {"x": x}, {"y": x.astype(np.float64)}, {}, {"axes": ints()})
    total = node("CumSum", "x axis", "y", exclusive=1, reverse=1)
    y = x.astype(np.float64)[:, ::-1].cumsum(1)[:, ::-1] - x
    yield Case("CumSum, reverse and exclusive", [total], {"x": x}, {"y": y}, {}, {"axis": np.int64(1)})


def _normalised() -> Iterator[Case]:
    scale, bias = normal(61, 16), normal(62, 16)
    zeros = np.zeros((1, 16), np.float32)
    for name, x, tolerance in (
        ("rows, one of them zeros", np.concatenate([normal(63, 3, 16), zeros]), 1e-5),
        ("rows far from zero", normal(64, 3, 16) + 100, 1e-3),
    ):
        nodes = [
            node("ReduceMean", "x last", "m"),
            node("Sub", "x m", "d"),
            node("Pow", "d two", "square"),
            node("ReduceMean", "square last", "v"),
            node("Add", "v epsilon", "e"),
            node("Sqrt", "e", "s"),
            node("Div", "d s", "n"),
            node("Mul", "n scale", "scaled"),
            node("Add", "scaled bias", "y"),
        ]
        wide = x.astype(np.float64)
        deviation = wide - wide.mean(-1, keepdims=True)
        y = deviation / np.sqrt((deviation**2).mean(-1, keepdims=True) + 1e-12) * scale + bias
        constants = {"last": ints(-1), "two": np.float32(2), "epsilon": np.float32(1e-12)}
        yield Case(
            f"a layer norm of {name}", nodes, {"x": x}, {"y": y}, {"scale": scale, "bias": bias}, constants,
            optimizers=("LayerNormFusionL1", "LayerNormFusionL2"), tolerance=tolerance,
        )  # fmt: skip


def _losses() -> Iterator[Case]:
    x = normal(65, 4, 7) * np.float32(1000)
    wide = x.astype(np.float64)
    shifted = wide - wide.max(-1, keepdims=True)
    log = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    yield Case("LogSoftmax of large values", [node("LogSoftmax", "x", "y", axis=-1)], {"x": x}, {"y": log})
    x = normal(66, 3, 5, 4)
    powers = np.exp(x.astype(np.float64))
    middle = node("Softmax", "x", "y", axis=1)
    yield Case("Softmax along a middle axis", [middle], {"x": x}, {"y": powers / powers.sum(1, keepdims=True)})
    small = [node("Add", "x tiny", "a"), node("Log", "a", "y")]
    zeros, tiny = np.zeros((2, 3), np.float32), np.float32(1e-12)
    yield Case(
        "Add of a small constant", small, {"x": zeros}, {"y": np.full((2, 3), math.log(1e-12))}, {}, {"tiny": tiny},
        optimizers=("NoopElimination",),
    )  # fmt: skip


def _elements() -> Iterator[Case]:
    x = np.linspace(-6, 6, 48, dtype=np.float32).reshape(3, 16)
    wide = x.astype(np.float64)
    half, root = {"half": np.float32(0.5), "one": np.float32(1), "root": np.float32(math.sqrt(2))}, math.sqrt(2)
    gelu = [
        node("Div", "x root", "d"),
        node("Erf", "d", "e"),
        node("Add", "e one", "a"),
        node("Mul", "x a", "m"),
        node("Mul", "m half", "y"),
    ]
    y = wide * (1 + np.vectorize(math.erf)(wide / root)) / 2
    yield Case("Gelu by Erf", gelu, {"x": x}, {"y": y}, {}, half, optimizers=("GeluFusionL1", "GeluFusionL2"))
    far = np.array([[-200, -90, -1, 0, 1, 90, 200]], np.float32)
    limits: dict[str, Array] = {
        "Sigmoid": 1 / (1 + np.exp(-far.astype(np.float64))),
        "Tanh": np.tanh(far.astype(np.float64)),
        "Softplus": np.logaddexp(0, far.astype(np.float64)),
    }
    for operator, expected in limits.items():
        yield Case(f"{operator} of large values", [node(operator, "x", "y")], {"x": far}, {"y": expected})
    nodes = [node("Log", "x", "l"), node("Greater", "x zero", "above"), node("Where", "above l zero", "y")]
    values = np.array([[-1, 0, 1, 2]], np.float32)
    logarithms = np.log(np.maximum(values.astype(np.float64), 1))
    yield Case("Where on NaN and infinity", nodes, {"x": values}, {"y": logarithms}, {}, {"zero": np.float32(0)})
