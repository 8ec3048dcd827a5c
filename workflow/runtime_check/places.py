"""Cases of indexing, scattering, slicing and integers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx import TensorProto

from ortflow.workflow.runtime_check.case import Case, ints, node, normal


def cases() -> Iterator[Case]:
    """All cases."""
    yield from _scatters()
    yield from _gathers()
    yield from _slices()
    yield from _numbers()


def _scatters() -> Iterator[Case]:
    """Several values at one position: the gradients of tables and gathers need it."""
    x, updates = normal(70, 5, 4), normal(71, 3, 4)
    rows = np.array([[0, 1, 2, 3], [0, 1, 4, 3], [0, 2, 2, -1]], np.int64)
    for reduction, combine in (("add", np.add), ("mul", np.multiply), ("max", np.maximum), ("min", np.minimum)):
        y = x.astype(np.float64)
        combine.at(y, (rows, np.arange(4)), updates.astype(np.float64))
        scatter = node("ScatterElements", "x rows updates", "y", axis=0, reduction=reduction)
        data = {"x": x, "rows": rows, "updates": updates}
        yield Case(f"ScatterElements that combines by {reduction}", [scatter], data, {"y": y})
    table, index = np.zeros((5, 4), np.float32), np.array([[1], [4], [1]], np.int64)
    y = table.astype(np.float64)
    np.add.at(y, index[:, 0], updates.astype(np.float64))
    scatter = node("ScatterND", "table index updates", "y", reduction="add")
    yield Case("ScatterND that adds", [scatter], {"index": index, "updates": updates}, {"y": y}, {"table": table})


def _gathers() -> Iterator[Case]:
    x, wide = normal(72, 4, 5, 3), normal(72, 4, 5, 3).astype(np.float64)
    index = np.array([[0, -1], [2, 1]], np.int64)
    y = wide[:, index]
    yield Case("Gather from the end", [node("Gather", "x index", "y", axis=1)], {"x": x, "index": index}, {"y": y})
    pairs = np.array([[[0, 1], [-1, 2]], [[3, -1], [1, 0]]], np.int64)
    y = wide[pairs[..., 0], pairs[..., 1]]
    yield Case("GatherND", [node("GatherND", "x pairs", "y")], {"x": x, "pairs": pairs}, {"y": y})
    positions = np.random.default_rng(73).integers(-3, 3, (4, 5, 2))
    y = np.take_along_axis(wide, positions, 2)
    yield Case("GatherElements", [node("GatherElements", "x each", "y", axis=2)], {"x": x, "each": positions}, {"y": y})
    values = np.array([[3, 1, 3, 2], [0, 5, 4, 5]], np.float32)
    top = node("TopK", "x k", "y places", axis=-1)
    order = np.argsort(-values, axis=-1, kind="stable")[:, :3]
    expected = {"y": np.take_along_axis(values, order, 1).astype(np.float64), "places": order.astype(np.float64)}
    yield Case(
        "TopK with equal values", [top], {"x": values}, expected, {}, {"k": ints(3)},
        outputs={"places": TensorProto.INT64},
    )  # fmt: skip


def _slices() -> Iterator[Case]:
    x = normal(74, 3, 7, 5)
    wide = x.astype(np.float64)
    constants = {"starts": ints(-1, 1), "ends": ints(-100, 100), "axes": ints(1, 2), "steps": ints(-2, 3)}
    back = node("Slice", "x starts ends axes steps", "y")
    yield Case("Slice backwards", [back], {"x": x}, {"y": wide[:, ::-2, 1::3]}, {}, constants)
    nodes = [
        node("Split", "x lengths", "a b c", axis=1),
        node("Concat", "c a b", "joined", axis=1),
        node("Transpose", "joined", "turned", perm=[2, 0, 1]),
        node("Reshape", "turned shape", "y"),
    ]
    y = np.concatenate([wide[:, 5:], wide[:, :1], wide[:, 1:5]], 1).transpose(2, 0, 1).reshape(5, 21)
    constants = {"lengths": ints(1, 4, 2), "shape": ints(5, -1)}
    yield Case("Split, Concat, Transpose, Reshape", nodes, {"x": x}, {"y": y}, {}, constants)


def _numbers() -> Iterator[Case]:
    """Products that wrap, and shifts: used for random numbers. The 24 bits of the result are exact in fp32."""
    x = np.random.default_rng(75).integers(-(2**62), 2**62, (2, 8))
    factor = np.int64(-7046029254386353131)
    nodes = [
        node("Mul", "x factor", "p"),
        node("Cast", "p", "bits", to=TensorProto.UINT64),
        node("BitShift", "bits thirty", "low", direction="RIGHT"),
        node("BitwiseXor", "bits low", "mixed"),
        node("BitShift", "mixed forty", "top", direction="RIGHT"),
        node("Cast", "top", "y", to=TensorProto.FLOAT),
    ]
    with np.errstate(over="ignore"):
        bits = (x * factor).view(np.uint64)
    y = ((bits ^ (bits >> np.uint64(30))) >> np.uint64(40)).astype(np.float64)
    constants = {"factor": factor, "thirty": np.uint64(30), "forty": np.uint64(40)}
    yield Case("whole numbers of 64 bits", nodes, {"x": x}, {"y": y}, {}, constants, tolerance=0.0)
    values = np.array([[-2.7, -0.5, 0.5, 2.7]], np.float32)
    nodes = [node("Cast", "x", "i", to=TensorProto.INT64), node("Cast", "i", "y", to=TensorProto.FLOAT)]
    yield Case("Cast towards zero", nodes, {"x": values}, {"y": np.array([[-2.0, 0, 0, 2]])}, tolerance=0.0)
