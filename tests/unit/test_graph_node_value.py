"""Values of single nodes: as ONNX's reference implementation computes them, and mostly without its import."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from ortflow.workflow.graph.ir import node_value

LONG, FLAT = np.arange(24).reshape(2, 3, 4), np.array([5, -7, 0, 3])
FRACTIONS = np.array([[0.5, -1.75, np.nan], [3e38, -0.0, 7.0]], np.float32)
ONE, SCALAR = np.array([1]), np.array(2)


def rows() -> Iterator[tuple[str, Sequence[np.ndarray], dict[str, Any]]]:
    """Operator, inputs and attributes: also those that fit no operator."""
    for operator in ("Add", "Sub", "Mul", "Equal"):
        for pair in itertools.product((FLAT, SCALAR, LONG, FRACTIONS, FLAT > 0, FLAT.astype(np.int32)), repeat=2):
            yield operator, pair, {}
    for array in (FLAT, SCALAR, FRACTIONS, FLAT > 0):
        for kind in (TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL, TensorProto.FLOAT16):
            yield "Cast", (array,), {"to": kind}
            yield "Cast", (array,), {"to": kind, "saturate": 0}
    for axis in (-4, -1, 0, 2, 3):
        yield "Concat", (LONG, LONG[:, :, :4], LONG), {"axis": axis}
        for places in (SCALAR - 1, ONE, np.array([[0, -1]]), np.array([9]), FRACTIONS):
            yield "Gather", (LONG, places), {"axis": axis}
    yield "Concat", (FLAT,), {"axis": 0}
    yield "Concat", (FLAT, LONG), {"axis": 0}
    yield "Concat", (SCALAR, SCALAR), {"axis": 0}
    yield "Concat", (FLAT, FRACTIONS[0]), {"axis": 0}
    yield "Concat", (FLAT, FLAT), {}
    yield "Gather", (LONG, ONE), {}
    for axes in (ONE, np.array([0, 2]), np.array([-1]), np.array([1, 1]), np.array([7]), np.array([], int), SCALAR):
        yield "Unsqueeze", (LONG, axes), {}
        yield "Squeeze", (LONG[None, :1, :, None], axes), {}
        for keep in ({}, {"keepdims": 0}, {"keepdims": 1}, {"noop_with_empty_axes": 1}):
            yield "ReduceProd", (LONG, axes), keep
            yield "ReduceProd", (FRACTIONS, axes), keep
    yield "Squeeze", (LONG[:1],), {}
    yield "ReduceProd", (FLAT,), {}
    far = np.array([2**63 - 1, -(2**63)])
    for starts, ends in ((ONE, far[:1]), (ONE - 2, far[1:]), (np.array([0, 1]), far), (SCALAR, SCALAR), (FLAT, FLAT)):
        yield "Slice", (LONG, starts, ends), {}
        for axes in (ONE, np.array([0, 2]), np.array([-1]), np.array([2, 2]), np.array([7]), SCALAR):
            yield "Slice", (LONG, starts, ends, axes), {}
            for steps in (ONE, -ONE, 0 * ONE, np.array([2, -1])):
                yield "Slice", (LONG, starts, ends, axes, steps), {}


ROWS = list(rows())


def outcome(compute: Any) -> Any:
    """Type, shape and elements of an array, or the exception's type."""
    try:
        with np.errstate(all="ignore"):
            array = np.asarray(compute())
    except Exception as error:  # noqa: BLE001 - whatever the reference raises
        return type(error)
    return array.dtype, array.shape, array.tobytes()


@pytest.mark.parametrize("operator", sorted({operator for operator, _, _ in ROWS}))
def test_values_are_those_of_the_reference(operator: str) -> None:
    plainly = 0
    for _, arrays, attributes in (row for row in ROWS if row[0] == operator):
        names = [f"x{place}" for place in range(len(arrays))]
        node = helper.make_node(operator, names, ["y"], **attributes)
        inputs = dict(zip(names, arrays, strict=True))
        expected = outcome(lambda n=node, i=inputs: ReferenceEvaluator(n).run(None, i)[0])
        assert outcome(lambda n=node, i=inputs: node_value.value_of(n, "y", i)) == expected, (node, arrays)
        reads = [onnx.ValueInfoProto(name=name) for name in names]
        for version in (9, 12, 17, 21):
            graph = helper.make_graph([node], "node", reads, [onnx.ValueInfoProto(name="y")])
            expected = outcome(lambda g=graph, v=version, i=inputs: ReferenceEvaluator(g, {"": v}).run(None, i)[0])
            versions = {"": version}
            assert outcome(lambda n=node, i=inputs, v=versions: node_value.value_of(n, "y", i, v)) == expected, (
                node,
                version,
            )
        plainly += node_value._plainly(node, inputs, 21) is not None
    assert plainly > 0


def test_the_second_output_and_left_out_inputs() -> None:
    split = helper.make_node("Split", ["x"], ["first", "second"], axis=0, num_outputs=2)
    assert node_value.value_of(split, "second", {"x": FLAT}, {"": 21}).tolist() == [0, 3]
    stepped = helper.make_node("Slice", ["x", "starts", "ends", "", "steps"], ["y"])
    inputs = {"x": FLAT, "starts": ONE - 1, "ends": ONE * 4, "steps": ONE * 2}
    assert node_value.value_of(stepped, "y", inputs, {"": 21}).tolist() == [5, 0]


def test_the_reference_is_imported_when_it_is_needed() -> None:
    say = (
        "import sys, numpy, onnx\n"
        "from ortflow.workflow.graph.ir.node_value import value_of\n"
        "import ortflow.workflow.assembly.build, ortflow.workflow.graph.file.limits\n"
        "x = numpy.arange(3)\n"
        "make = onnx.helper.make_node\n"
        "for node in (make('Concat', ['x', 'x'], ['y'], axis=0), make('Neg', ['x'], ['y'])):\n"
        "    print(len(value_of(node, 'y', {'x': x})), 'onnx.reference' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", say], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["6 False", "3 True"]
