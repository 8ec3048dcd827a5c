"""Layers that `model.recompute` finds or names, and what of them is not repeated."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from divided import CHANNEL
from graph_build_models import built, run_file, run_graph, save_model, tensors_of, value
from onnx import helper

from ortflow.workflow.assembly.build import build_graphs
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir.collective import Kind, is_collective, kind_of
from ortflow.workflow.graph.ir.origin import LAYER
from ortflow.workflow.graph.optimize.recompute import recompute
from ortflow.workflow.graph.optimize.repeats import repeated
from ortflow.workflow.graph.types import GraphSet

Layers = str | list[list[str]]


@pytest.mark.parametrize(
    ("kinds", "sizes", "expected"),
    [
        # A transformer: attention and MLP in turn, and its ends.
        ("E" + "AM" * 4 + "FL", {"A": 9, "M": 5}, ["AM"] * 4),
        # With a norm behind each of both.
        ("EN" + "ANMN" * 3 + "H", {"A": 9, "M": 5}, ["NANM"] * 3),
        # An encoder, a norm and a table, and a decoder: what lies between is a layer if it is large enough.
        ("E" + "AM" * 3 + "NT" + "ACM" * 3 + "L", {"A": 9, "M": 5, "C": 9}, ["AM"] * 3 + ["ACM"] * 3),
        ("E" + "AM" * 3 + "T" + "ACM" * 3 + "L", {"A": 9, "M": 5, "C": 9, "T": 4}, ["AM"] * 3 + ["T"] + ["ACM"] * 3),
        # The stages of a ResNet: each begins with a block that differs.
        ("SDRBRBRDRBRBRBRGF", {"D": 11, "B": 9}, ["D", "RB", "RB", "D", "RB", "RB", "RB"]),
        # Nothing repeats, or only what is too small to save anything.
        ("EABCDF", {"A": 9}, []),
        ("ERRRRRF", {}, []),
        ("", {}, []),
    ],
)
def test_what_repeats(kinds: str, sizes: dict[str, int], expected: list[str]) -> None:
    spans = repeated([ord(kind) for kind in kinds], [sizes.get(kind, 1) for kind in kinds])
    assert [kinds[slice(*span)] for span in spans] == expected


def network(path: Path, blocks: int, *, alike: bool = True) -> Path:
    """Residual blocks of two products and a Tanh; they differ in their operators if they are not alike."""
    random = np.random.default_rng(0)
    tensors, at = {"stem": random.normal(size=(6, 6)).astype(np.float32)}, "start"
    nodes = [helper.make_node("MatMul", ["x", "stem"], [at], "stem")]
    for number, function in enumerate(["Tanh"] * blocks if alike else ["Tanh", "Sigmoid", "Exp", "Abs"][:blocks]):
        name = f"block.{number}"
        for part in ("in", "out"):
            tensors[f"{name}.{part}"] = (0.3 * random.normal(size=(6, 6))).astype(np.float32)
        nodes += [
            helper.make_node("MatMul", [at, f"{name}.in"], [f"{name}.a"], f"n{number}.a"),
            helper.make_node(function, [f"{name}.a"], [f"{name}.b"], f"n{number}.b"),
            helper.make_node("MatMul", [f"{name}.b", f"{name}.out"], [f"{name}.c"], f"n{number}.c"),
            helper.make_node("Add", [at, f"{name}.c"], [f"{name}.sum"], f"n{number}.d"),
        ]
        at = f"{name}.sum"
    nodes.append(helper.make_node("Identity", [at], ["logits"], "last"))
    return save_model(path, nodes, [value("x", ["batch", 6])], [value("logits", ["batch", 6])], tensors)


def graphs_of(model: Path, name: str, layers: Layers) -> GraphSet:
    spec = run_file(model)
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"recompute": layers})})
    return build_graphs(spec, model.parent / name)


@pytest.mark.parametrize(
    "layers", ["layers", [["block.0.sum"], ["block.1.sum"], ["block.2.sum"]]], ids=["found", "named"]
)
def test_layers_keep_the_bits_and_run_again(layers: Layers, tmp_path: Path) -> None:
    model = network(tmp_path / "m.onnx", 3)
    kept, again = built(model), graphs_of(model, "again", layers)
    random = np.random.default_rng(1)
    feeds = {**tensors_of(kept), "x": random.normal(size=(4, 6)).astype("float32"), "labels": np.array([0, 5, 2, 2])}
    expected, found = run_graph(kept.train, feeds), run_graph(again.train, feeds)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    count = Counter(node.op_type for node in onnx.load(again.train).graph.node)["Tanh"]
    assert count == 6, "each layer computes its Tanh once more"
    assert any("3 layers" in note and "recomputed" in note for note in again.notes)


@pytest.mark.parametrize(
    ("layers", "where", "message"),
    [
        ("layers", "model.recompute", "no layers repeat in the graph"),
        ([["block.0.sum"], ["block.1.son"]], "model.recompute[1][0]", "computes 'block.1.son'; did you mean"),
        ([["block.1.sum"], ["block.0.sum"]], "model.recompute[1]", "'block.0.sum' has no node of its own"),
        ([["block.0.sum"], []], "model.recompute[1]", "names no tensor"),
        ([["x"]], "model.recompute[0][0]", "no node of the model computes 'x'"),
    ],
)
def test_wrong_layers(layers: Layers, where: str, message: str, tmp_path: Path) -> None:
    model = network(tmp_path / "m.onnx", 3, alike=False)
    with pytest.raises(UserError) as caught:
        graphs_of(model, "none", layers)
    assert caught.value.where == where
    assert message in str(caught.value)
    assert not (tmp_path / "none").exists()


def marked(operator: str, inputs: list[str], outputs: list[str], **attributes: object) -> onnx.NodeProto:
    node = helper.make_node(operator, inputs, outputs, **attributes)
    node.metadata_props.add(key=LAYER, value="0")
    return node


def test_sums_over_ranks_are_kept() -> None:
    """A layer of one part: its products run again, the sum over the parts does not."""
    flags = {"domain": "ortflow", "kind": int(Kind.ALL_REDUCE), "channel": CHANNEL, "parts": 2}
    nodes = [
        marked("Tanh", ["x"], ["a"]),
        marked("MatMul", ["a", "w"], ["b"]),
        marked("Collective", ["b"], ["c"], **flags),
        marked("Sigmoid", ["c"], ["d"]),
        marked("Abs", ["d"], ["e"]),
        helper.make_node("ReduceSum", ["e"], ["loss"], keepdims=0),
        # Stand-ins for a backward pass: gradients meet values of the layer.
        helper.make_node("Constant", [], ["seed"], value_float=1.0),
        helper.make_node("Mul", ["seed", "d"], ["g"]),
        helper.make_node("Mul", ["g", "a"], ["w_grad"]),
    ]
    shapes = [value(name, [2, 2]) for name in "abcde"]
    inputs, outputs = [value("x", [2, 2]), value("w", [2, 2])], [value("loss", []), value("w_grad", [2, 2])]
    graph = helper.make_graph(nodes, "part", inputs, outputs, value_info=shapes)
    recompute(graph, (), ["seed"])
    operators = Counter(node.op_type for node in graph.node)
    assert operators["Sigmoid"] == operators["Tanh"] == 2
    assert operators["Abs"] == 1
    sums = [node for node in graph.node if is_collective(node)]
    assert [kind_of(node) for node in sums] == [Kind.ALL_REDUCE]
