"""Predicted memory of the branches of an If: which one counts, and what is then measured on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_build_models import run_file, save_model, value
from onnx import TensorProto, helper

from ortflow.workflow.assembly.build import build_graphs
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.memory.branches import conditions_of
from ortflow.workflow.graph.memory.concrete import followed
from ortflow.workflow.graph.memory.peak_memory import Peak, peak_of, sizes_of
from ortflow.workflow.planning.forecast import activations

SUPPORT = Path(__file__).parents[1] / "support"
ROW = 4 * 256 * 4
"""Bytes of a value of 4 x 256."""
node = helper.make_node


def branch(nodes: Sequence[onnx.NodeProto], *outputs: str, shape: Sequence[int] | None = None) -> onnx.GraphProto:
    described = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in outputs]
    return helper.make_graph(nodes, "branch", [], described)


def choice(condition: str, then: onnx.GraphProto, other: onnx.GraphProto, *outputs: str) -> onnx.NodeProto:
    return node("If", [condition], outputs, "If", then_branch=then, else_branch=other)


SMALL = [node("Softmax", ["x"], ["a"]), node("Softmax", ["a"], ["t"])]
LARGE = [
    node("Softmax", ["x"], ["a"]), node("Concat", ["a", "a", "a"], ["b"], "widest", axis=1),
    node("Softmax", ["b"], ["d"]), node("ReduceSum", ["d"], ["e"], keepdims=1),
]  # fmt: skip
BY_SIZE = [node("Shape", ["x"], ["s"], end=1), node("Equal", ["s", "four"], ["c"])]
BY_NUMBER = [node("ReduceMax", ["x"], ["m"], keepdims=0), node("Less", ["m", "zero"], ["c"])]


def planned(nodes: Sequence[onnx.NodeProto], rows: int = 4) -> Peak:
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 256])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    constants = [
        helper.make_tensor("four", TensorProto.INT64, [1], [4]),
        helper.make_tensor("zero", TensorProto.FLOAT, [], [0]),
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "g", [given], [result], constants), opset_imports=[helper.make_opsetid("", 18)]
    )
    types, values = followed(model, {"x": (rows, 256)})
    return peak_of(model.graph, sizes_of(types), {"x", "y"}, conditions_of(values))


@pytest.mark.parametrize("swapped", [False, True])
def test_of_an_unknown_condition_the_larger_branch_counts(swapped: bool) -> None:
    """Both branches have a value a, as ONNX allows."""
    small, large = branch(SMALL, "t"), branch(LARGE, "e")
    chosen = choice("c", *((large, small) if swapped else (small, large)), "z")
    peak = planned([*BY_NUMBER, chosen, node("ReduceSum", ["z"], ["y"])])
    name = "then_branch" if swapped else "else_branch"
    assert dict(peak.values)[f"z/{name}/b"] == 3 * ROW
    assert (peak.unknown, peak.node) == ((), "Softmax")
    assert 6 * ROW <= peak.size < 6 * ROW + 100, "b and d; a is dead, and the condition is a byte"


def test_of_a_known_condition_only_the_branch_that_is_taken_counts() -> None:
    unknowable = branch([*LARGE, node("Unheard", ["e"], ["f"], domain="other")], "f")
    nodes = [*BY_SIZE, choice("c", branch(SMALL, "t"), unknowable, "z"), node("ReduceSum", ["z"], ["y"])]
    small, large = planned(nodes, 4), planned(nodes, 8)
    assert (small.unknown, 2 * ROW <= small.size < 2 * ROW + 100) == ((), True)
    assert "z/else_branch/f" in large.unknown
    assert dict(large.values)["z/else_branch/b"] == 2 * 3 * ROW


def test_results_take_memory_once_and_views_of_values_outside_none() -> None:
    then = branch([node("Identity", ["h"], ["v"]), node("Softmax", ["v"], ["t"])], "t")
    inner = choice("c", then, branch([node("Softmax", ["h"], ["e"])], "e"), "i")
    outer = choice("c", branch([inner], "i"), branch([node("Softmax", ["h"], ["o"])], "o"), "z")
    chosen = [node("Softmax", ["x"], ["h"]), *BY_NUMBER, outer, node("ReduceSum", ["z"], ["y"])]
    peak = planned(chosen)
    assert [pair for pair in peak.values if pair[1] >= ROW] == [("h", ROW), ("z", ROW)]


def test_a_result_has_the_larger_of_its_sizes_unless_one_is_unknown() -> None:
    narrow, wide = branch(SMALL, "t"), branch([node("Concat", ["x", "x"], ["w"], axis=1)], "w")
    for pair in ((narrow, wide), (wide, narrow)):
        assert (
            dict(planned([*BY_NUMBER, choice("c", *pair, "z"), node("Softmax", ["z"], ["y"])]).values)["z"] == 2 * ROW
        )
    unknown = branch([node("Unheard", ["x"], ["u"], domain="other")], "u")
    assert "z" in planned([*BY_NUMBER, choice("c", narrow, unknown, "z"), node("Softmax", ["z"], ["y"])]).unknown


def network(width: int, first: str, last: str, output: str) -> onnx.GraphProto:
    nodes = [
        node("MatMul", ["h", first], [f"{output}.1"], f"{output}.first"),
        node("Tanh", [f"{output}.1"], [f"{output}.2"]),
        node("Sigmoid", [f"{output}.2"], [f"{output}.3"]),
        node("Mul", [f"{output}.2", f"{output}.3"], [f"{output}.4"]),
        node("MatMul", [f"{output}.4", last], [output], f"{output}.last"),
    ]
    return branch(nodes, output)


ROWS = 8192


def two_networks(path: Path, condition: Sequence[onnx.NodeProto]) -> Path:
    """A classifier with a wide network in the branch `then` and a narrow one in the other."""
    random = np.random.default_rng(0)
    shapes = {"w": (64, 256), "a": (256, 2048), "b": (2048, 256), "p": (256, 1024), "q": (1024, 256), "out": (256, 10)}
    tensors = {name: random.standard_normal(shape).astype(np.float32) / 16 for name, shape in shapes.items()}
    return save_model(
        path,
        [
            node("MatMul", ["x", "w"], ["h.1"], "stem"), node("Tanh", ["h.1"], ["h"]), *condition,
            choice("c", network(2048, "a", "b", "t"), network(1024, "p", "q", "e"), "z"),
            node("Add", ["z", "h"], ["r"]), node("MatMul", ["r", "out"], ["y"], "head"),
        ],
        [value("x", ["batch", 64])], [value("y", ["batch", 10])],
        {**tensors, "four": np.array([4]), "zero": np.array(0, np.float32)},
    )  # fmt: skip


@pytest.mark.rotates
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports resident memory")
@pytest.mark.parametrize("kind", ["then, unknown", "else, known"])
def test_what_is_then_measured(tmp_path: Path, kind: str) -> None:
    """Within 10%. The numbers of the batch are positive, and so the wide network is taken if these decide."""
    condition = [node("ReduceMax", ["x"], ["m"], keepdims=0), node("Greater", ["m", "zero"], ["c"])]
    spec = run_file(two_networks(tmp_path / "m.onnx", condition if "unknown" in kind else BY_SIZE))
    graphs = build_graphs(spec, tmp_path / "graphs", 256)
    assert sum(walk.is_if(each) for each in onnx.load(graphs.train).graph.node) == 2
    shapes = {"x": (ROWS, 64), "labels": (ROWS,)}
    peak = activations(graphs, spec, shapes)
    program = [sys.executable, SUPPORT / "measured_run.py", tmp_path / "graphs", "auto", json.dumps(shapes)]
    measured = int(subprocess.run(program, check=True, capture_output=True, text=True).stdout)
    print(f"{kind}: predicted {peak.held:,}, measured {measured:,}: {peak.held / measured:.3f}")
    assert peak.unknown == ()
    assert measured > 100e6, "large enough to be seen"
    assert 0.9 <= peak.held / measured <= 1.1
