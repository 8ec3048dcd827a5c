"""Single numbers computed in one kernel: which nodes become one, and that it has the bits of ONNX Runtime's."""

from __future__ import annotations

import ctypes
import math
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from operators_on_cpu import CXX, needs_compilers

from ortflow.workflow.cuda.scalars import Scalars
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.fusion.groups import fuse
from ortflow.workflow.fusion.scalars import scalars_in_one
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.layout import ALIGNMENT
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.optim.gradient import queued_gradient_graph
from ortflow.workflow.optim.graph import optimizer_graph
from ortflow.workflow.optim.guard import guarded
from ortflow.workflow.optim.segments import Segment
from ortflow.workflow.spec.optimizers import Adam

HOST = """
#include <cmath>
#include <cstring>
#define __global__
static float __int_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
static double __longlong_as_double(long long bits) { double value; memcpy(&value, &bits, 8); return value; }
"""
FLOAT, DOUBLE, INT64, BOOL = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64, TensorProto.BOOL
TYPES: dict[int, Any] = {FLOAT: np.float32, DOUBLE: np.float64, INT64: np.int64, BOOL: np.bool_}


def scalars(model: onnx.ModelProto) -> onnx.NodeProto:
    (found,) = (node for node in model.graph.node if node.op_type == "Scalars")
    return found


def compute(model: onnx.ModelProto, feeds: dict[str, np.ndarray], folder: Path) -> dict[str, np.ndarray]:
    """What the kernel makes of these inputs."""
    node = scalars(model)
    (folder / "k.cpp").write_text(HOST + attributes_of(node)["source"].decode())
    command = [
        str(CXX),
        "-shared",
        "-fPIC",
        "-O2",
        "-ffp-contract=off",
        "-w",
        "-o",
        f"{folder}/k.so",
        f"{folder}/k.cpp",
    ]
    subprocess.run(command, check=True)
    run = ctypes.CDLL(f"{folder}/k.so").scalars
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.value_info, *model.graph.output)}
    made = {name: np.zeros(1, TYPES[kinds[name]]) for name in node.output}
    run(*(ctypes.c_void_p(each.ctypes.data) for each in (*(feeds[name] for name in node.input), *made.values())))
    return made


def without_squares(model: onnx.ModelProto) -> onnx.ModelProto:
    """The scaling of a gradient, given its sum of squares."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    (squares,) = (node for node in copy.graph.node if node.op_type == "SquareSum")
    copy.graph.input.append(helper.make_tensor_value_info(squares.output[0], DOUBLE, [1]))
    copy.graph.node.remove(squares)
    copy.graph.input.remove(next(value for value in copy.graph.input if value.name == "gradients"))
    return copy


@needs_compilers
@pytest.mark.parametrize(
    "numbers",
    [(3.7, 8192.0, 1.0, 1.0, 5.5e9), (3.7, 8192.0, 65536.0, math.inf, 1e-9), (3.7, 0.0, 1.0, 1.0, 4.0),
     (math.nan, 8.0, 1.0, 1.0, 4.0), (3.7, 8.0, 1.0, 1.0, math.nan), (3.7, 8.0, 1.0, 1.0, math.inf), (1, 1, 1, 1, 0.0)],
    ids=str,
)  # fmt: skip
def test_the_scaling_of_a_gradient_is_one_kernel(tmp_path: Path, numbers: Sequence[float]) -> None:
    plain = queued_gradient_graph(fused=True)
    found, taken = scalars_in_one(plain)
    assert [node.op_type for node in found.graph.node] == ["SquareSum", "Scalars"]
    assert taken == len(plain.graph.node) - 1
    names = ["loss", "weight", "loss_scale", "max_norm"]
    feeds = {name: np.array([number], np.float32) for name, number in zip(names, numbers, strict=False)}
    (squares,) = (node.output[0] for node in plain.graph.node if node.op_type == "SquareSum")
    feeds[squares] = np.array([numbers[-1]])
    alone = without_squares(plain)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(alone.SerializeToString(), options, providers=["CPUExecutionProvider"])
    outputs = [value.name for value in alone.graph.output]
    wanted = {value.name for value in session.get_inputs()}
    expected = session.run(outputs, {name: array for name, array in feeds.items() if name in wanted})
    mine = compute(found, feeds, tmp_path)
    for name, value in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(mine[name], value.reshape(1), err_msg=name)


@needs_compilers
@pytest.mark.parametrize("step", [1, 2, 1000, 10**9])
def test_the_corrections_of_an_update_are_one_kernel(tmp_path: Path, step: int) -> None:
    rule = Adam.model_validate({"name": "adamw", "lr": 1e-3, "weight_decay": 0.1})
    cuts = [Segment(0, ALIGNMENT, 0.1), Segment(ALIGNMENT, 3 * ALIGNMENT, 0.0)]
    plain = guarded(compose(optimizer_graph(rule, cuts)), multiplied=True)
    fused, _ = fuse(plain)
    found, taken = scalars_in_one(fused)
    assert [node.op_type for node in found.graph.node] == ["Scalars", "Fused", "Fused"]
    assert taken > 15
    node, feeds = scalars(found), {"step": np.array([step]), "learning_rate": np.array([1e-3], np.float32)}
    assert sorted(node.input) == sorted(feeds), "the copies of the step are left out"
    mine = compute(found, feeds, tmp_path)
    asked = onnx.ModelProto()
    asked.CopyFrom(plain)
    del asked.graph.output[:]
    asked.graph.output.extend(helper.make_tensor_value_info(name, FLOAT, [1]) for name in node.output)
    evaluate = onnxruntime.SessionOptions()
    evaluate.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(asked.SerializeToString(), evaluate, providers=["CPUExecutionProvider"])
    sizes = {value.name: value.shape for value in session.get_inputs()}
    given = {name: feeds.get(name, np.ones(shape, np.float32)) for name, shape in sizes.items()}
    for name, value in zip(node.output, session.run(list(node.output), given), strict=True):
        np.testing.assert_array_equal(mine[name], value, err_msg=name)


def model_of(
    nodes: Sequence[onnx.NodeProto], outputs: dict[str, int], **inputs: tuple[int, list[Any]]
) -> onnx.ModelProto:
    info: Callable[..., Any] = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "graph",
        [info(name, kind, dims) for name, (kind, dims) in inputs.items()],
        [info(name, kind, None) for name, kind in outputs.items()],
        [numpy_helper.from_array(np.array(2.0, np.float32), "two")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def node(operator: str, given: Sequence[str], made: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, given, [made], made, **attributes)


def test_a_way_through_another_node_keeps_numbers_apart() -> None:
    nodes = [
        node("Mul", ["a", "two"], "b"),
        node("Sqrt", ["b"], "c"),
        node("Add", ["c", "two"], "d"),
        node("Mul", ["x", "d"], "y"),
        node("ReduceSum", ["y"], "s", keepdims=0),
        node("Add", ["s", "a"], "e"),
        node("Mul", ["e", "two"], "f"),
    ]
    model = model_of(nodes, {"f": FLOAT}, a=(FLOAT, [1]), x=(FLOAT, ["n"]))
    found, taken = scalars_in_one(model)
    assert [each.op_type for each in found.graph.node] == ["Scalars", "Mul", "ReduceSum", "Add", "Mul"]
    assert taken == 3
    assert list(scalars(found).output) == ["d"]


def test_what_is_too_little_or_no_number_stays() -> None:
    few = [node("Mul", ["a", "two"], "b"), node("Sqrt", ["b"], "c")]
    assert scalars_in_one(model_of(few, {"c": FLOAT}, a=(FLOAT, [1])))[1] == 0
    chain = [node("Mul", ["a", "two"], "b"), node("Sqrt", ["b"], "c"), node("Add", ["c", "two"], "d")]
    assert scalars_in_one(model_of(chain, {"d": FLOAT}, a=(FLOAT, [1])))[1] == 3
    for dims in (["n"], [2], [1, "n"]):
        assert scalars_in_one(model_of(chain, {"d": FLOAT}, a=(FLOAT, dims)))[1] == 0
    divided = [node("Div", ["a", "b"], "c"), node("Div", ["c", "b"], "d"), node("Div", ["d", "b"], "e")]
    assert scalars_in_one(model_of(divided, {"e": INT64}, a=(INT64, [1]), b=(INT64, [1])))[1] == 0


def test_the_rank_of_a_result_is_that_of_its_largest_input() -> None:
    nodes = [node("Mul", ["a", "two"], "b"), node("Sqrt", ["b"], "c"), node("Add", ["c", "wide"], "d")]
    model = model_of(nodes, {"c": FLOAT, "d": FLOAT}, a=(FLOAT, []), wide=(FLOAT, [1, 1, 1]))
    found, _ = scalars_in_one(model)
    assert dict(zip(scalars(found).output, attributes_of(scalars(found))["ranks"], strict=True)) == {"c": 0, "d": 3}


def test_a_step_that_a_kernel_changes_in_place_keeps_its_copies() -> None:
    """ONNX Runtime's AdamOptimizer does."""
    rule = Adam.model_validate({"name": "adamw", "lr": 1e-3})
    found, _ = scalars_in_one(guarded(optimizer_graph(rule, [Segment(0, ALIGNMENT, 0.1), Segment(64, 128, 0.0)])))
    kept = [each.op_type for each in found.graph.node]
    assert kept.count("Tile") == kept.count("Split") == 1
    assert kept.count("AdamOptimizer") == 2


def test_several_numbers_for_one_are_refused() -> None:
    from emulated_cuda import EmulatedCall

    call = EmulatedCall([(np.zeros(2, np.float32), FLOAT)], [FLOAT], run=False)
    with pytest.raises(OrtflowError, match=r"single numbers, and the inputs are \[\[2\]\]"):
        Scalars({"source": "", "ranks": [1]}).run(call)  # type: ignore[arg-type]
