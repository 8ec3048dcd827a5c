"""Differentiating, and testing the result in a child process: failures are named, and nothing crashes."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_build_models import Array, built, kept_child, run_graph, save_model, tensors_of, value
from messages import mentions
from onnx import helper
from struck_child import Struck

from ortflow.workflow.assembly.child import Child, RuntimeFault
from ortflow.workflow.assembly.loading import check_loads
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.reverse import differentiate

RNG = np.random.default_rng(11)
MSE = {"kind": "mse", "label": "target"}


def forward(nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], loss: str = "loss") -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "forward", inputs, [value(loss, [])])
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


def summed(name: str) -> onnx.NodeProto:
    return helper.make_node("ReduceSum", [name], ["loss"], name="/sum", keepdims=0)


def test_gradient_and_outputs_in_order() -> None:
    model = forward(
        [helper.make_node("Mul", ["a", "b"], ["ab"]), helper.make_node("Mul", ["ab", "c"], ["abc"]), summed("abc")],
        [value(name, [3]) for name in "abcd"],
    )
    made, trained = differentiate(model, ["d", "c", "b", "a"], "loss")
    assert trained == ["c", "b", "a"]
    assert [output.name for output in made.graph.output] == ["loss", "c_grad", "b_grad", "a_grad"]


def test_parameter_that_only_shapes_read() -> None:
    """A gradient stops at a Shape: the parameter is left out."""
    nodes = [
        helper.make_node("Shape", ["b"], ["shape"]),
        helper.make_node("Expand", ["a", "shape"], ["wide"]),
        summed("wide"),
    ]
    model = forward(nodes, [value("a", [1]), value("b", [3])])
    _, trained = differentiate(model, ["a", "b"], "loss")
    assert trained == ["a"]


def test_operator_without_gradient_is_named() -> None:
    model = forward([helper.make_node("Det", ["a"], ["d"], name="/layer/Det"), summed("d")], [value("a", [3, 3])])
    with pytest.raises(UserError, match=r"node '/layer/Det' \(Det\) has no gradient"):
        differentiate(model, ["a"], "loss")


def session_of_whole_numbers(name: str) -> onnx.ModelProto:
    """Its ReduceSum is of uint32, which ONNX allows but ONNX Runtime has no kernel for."""
    nodes = [
        helper.make_node("Cast", ["a"], ["i"], to=onnx.TensorProto.UINT32),
        helper.make_node("ReduceSum", ["i"], ["e"], name=name),
        helper.make_node("Cast", ["e"], ["f"], to=onnx.TensorProto.FLOAT),
    ]
    return forward([*nodes, summed("f")], [value("a", [3])])


@pytest.mark.parametrize("optimized", [True, False])
@pytest.mark.parametrize(
    ("name", "expected_text"),
    [
        ("/up", r"kernel on cpu .*'/up' \(ReduceSum\)"),
        (
            "/up_Grad/ReduceSum_0",
            r"'/up' \(ReduceSum\) .*gradient, ReduceSum",
        ),
    ],
)
def test_kernel_that_is_missing_is_named(name: str, expected_text: str, optimized: bool) -> None:
    made, content = session_of_whole_numbers("/up"), session_of_whole_numbers(name).SerializeToString()
    with pytest.raises(UserError, match=expected_text) as caught:
        check_loads(kept_child(), content, "training", made, optimized=optimized)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("rejected", "expected_loads"), [(False, ["quick", "own"]), (True, ["quick", "own", "full"])])
def test_only_the_graph_that_ranks_open_is_optimized_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rejected: bool, expected_loads: list[str]
) -> None:
    """Optimizers take nine tenths of the loading of a large graph."""
    loads: list[str] = []
    load = Child.load

    def noted(child: Child, model: bytes, kernels: Path | None = None, *, optimized: bool = True) -> None:
        if b"loss_sum" in model and b"_grad" in model:
            loads.append("own" if kernels else "full" if optimized else "quick")
            if kernels and rejected:
                raise RuntimeFault("no such operator")
        load(child, model, kernels, optimized=optimized)

    monkeypatch.setattr(Child, "load", noted)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Softmax", ["h"], ["y"])]
    weights = {"w": RNG.normal(size=(4, 4)).astype("float32")}
    path = save_model(
        tmp_path / "model.onnx", nodes, [value("x", ["batch", 4])], [value("y", ["batch", 4])], weights
    )  # fmt: skip
    graphs = built(path, MSE)
    assert loads == expected_loads
    assert any("rejects ortflow's" in note for note in graphs.notes) == rejected


def test_crash_becomes_a_sentence() -> None:
    model = forward([helper.make_node("Exp", ["a"], ["e"]), summed("e")], [value("a", [3])])
    with Struck(signal.SIGSEGV, signal.SIGSEGV) as child, pytest.raises(UserError) as caught:
        check_loads(child, model.SerializeToString(), "training", model)
    assert mentions(str(caught.value), "training graph", "signal 11")


def test_child_does_not_see_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: object) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')\n")
    monkeypatch.chdir(tmp_path)
    model = forward([helper.make_node("Exp", ["a"], ["e"]), summed("e")], [value("a", [3])])
    with Child() as child:
        child.load(model.SerializeToString())
        with pytest.raises(RuntimeFault):
            child.load(b"no model")
        # And it survives.
        child.load(model.SerializeToString())
    assert capfd.readouterr() == ("", "")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("table", "axis", "indices"),
    [((7, 3), 0, (5, 4)), ((7, 3, 2), 1, (40,)), ((4, 5, 6), 1, ()), ((4, 5, 6), -1, (3, 9)), ((6,), 0, (50,))],
)
def test_scatter_adds_what_gather_took(
    tmp_path: Path, table: tuple[int, ...], axis: int, indices: tuple[int, ...]
) -> None:
    """sum(gather(table) * g): the gradient is g added up by index, the same each time with two threads."""
    taken = (*table[: axis % len(table)], *indices, *table[axis % len(table) + 1 :])
    nodes = [
        helper.make_node("Gather", ["t", "i"], ["rows"], axis=axis),
        helper.make_node("Mul", ["rows", "g"], ["weighted"]),
        summed("weighted"),
    ]
    model = forward(nodes, [value("t", table), value("i", indices, "int64"), value("g", taken)])
    made, _ = differentiate(model, ["t"], "loss")
    assert any(node.op_type == "GatherGrad" for node in made.graph.node)
    made = compose(made)
    assert not any(node.op_type == "GatherGrad" for node in made.graph.node)
    onnx.save(made, tmp_path / "m.onnx")
    place = RNG.integers(0, table[axis], indices)
    g = RNG.normal(size=taken).astype("float32")
    feeds: dict[str, Array] = {"t": np.zeros(table, "float32"), "i": np.asarray(place), "g": g}
    results = {run_graph(tmp_path / "m.onnx", feeds, threads=2)["t_grad"].tobytes() for _ in range(5)}
    assert len(results) == 1
    moved = np.zeros((table[axis], *(d for j, d in enumerate(table) if j != axis % len(table))))
    start = axis % len(table)
    rows = np.moveaxis(g.reshape(*table[:start], -1, *table[start + 1 :]), start, 0)
    np.add.at(moved, np.asarray(place).reshape(-1), rows)
    expected = np.moveaxis(moved, 0, start)
    np.testing.assert_allclose(np.frombuffer(results.pop(), "float32").reshape(table), expected, rtol=1e-5, atol=1e-6)


def test_gradient_without_kernel_from_the_model(tmp_path: Path) -> None:
    """End to end: whichever part refuses it, the message names the node."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="/in"),
        helper.make_node("Unique", ["h"], ["y"], name="/layer/Unique"),
    ]
    path = save_model(
        tmp_path / "m.onnx",
        nodes,
        [value("x", ["batch", 3, 3])],
        [value("y", ["batch"])],
        {"w": RNG.normal(size=(3, 3)).astype("float32")},
    )
    with pytest.raises(UserError, match="/layer/Unique"):
        built(path, MSE)
    assert not (tmp_path / "graphs").exists()


def test_tied_weights_add_up(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gather", ["w", "ids"], ["e"]),
        helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0]),
        helper.make_node("MatMul", ["e", "wt"], ["logits"]),
    ]
    w = RNG.normal(size=(7, 4)).astype("float32")
    path = save_model(
        tmp_path / "m.onnx", nodes, [value("ids", ["batch"], "int64")], [value("logits", ["batch", 7])], {"w": w}
    )
    graphs = built(path)
    ids, labels = np.array([1, 2, 1, 6]), np.array([0, 2, 5, 1])
    train = run_graph(graphs.train, {"ids": ids, "labels": labels, **tensors_of(graphs)})
    wide = w.astype("float64")
    logits = wide[ids] @ wide.T
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    p[np.arange(4), labels] -= 1
    expected = p.T @ wide[ids]
    np.add.at(expected, ids, p @ wide)
    np.testing.assert_allclose(train["w_grad"], expected, rtol=1e-5, atol=1e-6)
    assert graphs.vocabulary == {"ids": 7, "labels": 7}
