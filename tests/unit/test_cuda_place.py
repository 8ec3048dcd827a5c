"""Training graphs with our operators for GPUs compute the same as without; here ours run as ONNX functions."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cuda_composed import composed
from differentiated_models import differentiated
from graph_build_models import Array, run_graph, save_model, tensors_of, value
from kernels import off
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.cuda.place import place
from ortflow.workflow.cuda.table import HALF
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.domains import CUDA_DOMAIN, MICROSOFT
from ortflow.workflow.graph.ir.edit import described

CLASSES = 13


def ours(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node if node.domain == CUDA_DOMAIN)


def check(model: onnx.ModelProto, feeds: Mapping[str, Array], tolerance: float = 2e-5) -> Counter[str]:
    """Check that the graph computes the same with our operators, whose outputs all have types; their counts."""
    before = model.SerializeToString()
    placed = place(model)
    assert model.SerializeToString() == before
    kinds = {name: given.type.tensor_type.elem_type for name, given in described(placed.graph).items()}
    for node in placed.graph.node:
        if node.domain == CUDA_DOMAIN:
            assert node.op_type in HALF
            assert [kinds.get(name) for name in node.output] == [TensorProto.FLOAT] * len(node.output), node.op_type
    expected, found = run_graph(compose(model), feeds), run_graph(composed(compose(placed)), feeds)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert off(found[name], array) < tolerance, (name, off(found[name], array))
    return ours(placed)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    examples = Path(__file__).parents[2] / "examples" / "gpt"
    sys.path.insert(0, str(examples))
    try:
        from model import Config, build
    finally:
        sys.path.remove(str(examples))
    path = tmp_path_factory.mktemp("gpt") / "model.onnx"
    onnx.save(build(Config(layers=2, width=16, heads=2, context=8, vocabulary=CLASSES, dropout=0.0)), path)
    return path


def test_a_transformer_computes_the_same(gpt: Path) -> None:
    graphs, model = differentiated(gpt)
    random = np.random.default_rng(0)
    tokens, labels = (random.integers(0, CLASSES, (4, 8)) for _ in range(2))
    labels[1, 3:6] = -100
    feeds = {**tensors_of(graphs), "tokens": tokens, "labels": labels, "ortflow.loss_grad": np.float32(0.25)}
    found = check(model, {name: np.asarray(array) for name, array in feeds.items()})
    assert found == {
        "LayerNormalization": 5,
        "LayerNormalizationGrad": 5,
        "CrossEntropy": 1,
        "CrossEntropyGrad": 1,
        "TableGrad": 1,
        "Softmax": 2,
        "SoftmaxGrad": 2,
        "ColumnSums": 9,  # of eight biases, and of the positions over the batch
    }


def rms_model(path: Path) -> Path:
    """Llama's norm after a table, and a head."""
    random = np.random.default_rng(0)
    tensors: dict[str, Array] = {
        "table": random.normal(size=(7, 6)).astype("float32"),
        "scale": random.normal(1, 0.1, 6).astype("float32"),
        "w": random.normal(size=(6, CLASSES)).astype("float32"),
        "two": np.float32(2),
        "axis": np.array([-1]),
        "epsilon": np.float32(1e-5),
        "one": np.float32(1),
    }
    nodes = [
        helper.make_node("Gather", ["table", "tokens"], ["x"], name="/gather"),
        helper.make_node("Pow", ["x", "two"], ["square"], name="/square"),
        helper.make_node("ReduceMean", ["square", "axis"], ["mean"], name="/mean"),
        helper.make_node("Add", ["mean", "epsilon"], ["shifted"], name="/add"),
        helper.make_node("Sqrt", ["shifted"], ["root"], name="/root"),
        helper.make_node("Div", ["one", "root"], ["inverse"], name="/inverse"),
        helper.make_node("Mul", ["x", "inverse"], ["normal"], name="/normal"),
        helper.make_node("Mul", ["scale", "normal"], ["scaled"], name="/scaled"),
        helper.make_node("MatMul", ["scaled", "w"], ["y"], name="/head"),
    ]
    return save_model(path, nodes, [value("tokens", ["batch"], "int64")], [value("y", ["batch", CLASSES])], tensors)


def test_results_that_inference_has_not_described_are(gpt: Path) -> None:
    _, model = differentiated(gpt)
    norms = {name for node in model.graph.node if node.op_type.startswith("LayerNorm") for name in node.output}
    kept = [given for given in model.graph.value_info if given.name not in norms]
    assert len(kept) < len(model.graph.value_info)
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)
    placed = place(model)
    made = [name for node in placed.graph.node if node.domain == CUDA_DOMAIN for name in node.output]
    kinds = {name: given.type.tensor_type.elem_type for name, given in described(placed.graph).items()}
    assert ours(placed)["LayerNormalization"]
    assert {kinds.get(name) for name in made} == {TensorProto.FLOAT}


def test_root_mean_square_norm_computes_the_same(tmp_path: Path) -> None:
    graphs, model = differentiated(rms_model(tmp_path / "m.onnx"))
    random = np.random.default_rng(1)
    feeds = {
        **tensors_of(graphs), "tokens": random.integers(0, 7, 20), "labels": random.integers(0, CLASSES, 20),
        "ortflow.loss_grad": np.array(1, np.float32),
    }  # fmt: skip
    found = check(model, feeds)
    assert found == dict.fromkeys(
        ("RMSNormalization", "RMSNormalizationGrad", "CrossEntropy", "CrossEntropyGrad", "TableGrad"), 1
    )


def test_a_loss_with_label_smoothing_computes_the_same(tmp_path: Path) -> None:
    """Label smoothing has its own softmax; the loss itself is still ours."""
    graphs, model = differentiated(
        rms_model(tmp_path / "m.onnx"), loss={"kind": "cross_entropy", "label_smoothing": 0.1}
    )
    random = np.random.default_rng(1)
    feeds = {
        **tensors_of(graphs), "tokens": random.integers(0, 7, 20), "labels": random.integers(0, CLASSES, 20),
        "ortflow.loss_grad": np.array(1, np.float32),
    }  # fmt: skip
    assert check(model, feeds)["CrossEntropyGrad"] == 1


def loss_graph(*, gradients: int = 1, ignore: int | None = -1, other: int | None = -1, read: bool = False) -> Any:
    """A loss with gradients that ignore `other`, with or without the logarithms as an output."""
    flags = {} if ignore is None else {"ignore_index": ignore}
    flags_other = {} if other is None else {"ignore_index": other}
    nodes = [
        helper.make_node("SoftmaxCrossEntropyLoss", ["x", "labels"], ["loss", "logs"], reduction="sum", **flags),
        *(
            helper.make_node(
                "SoftmaxCrossEntropyLossGrad", ["g", "logs", "labels"], [f"dx{i}"], domain=MICROSOFT, reduction="sum",
                **flags_other,
            )
            for i in range(gradients)
        ),
    ]  # fmt: skip
    made = [("loss", []), *((f"dx{i}", [5, CLASSES]) for i in range(gradients)), *([("logs", [5, CLASSES])] * read)]
    graph = helper.make_graph(
        nodes,
        "graph",
        [value("x", [5, CLASSES]), value("labels", [5], "int64"), value("g", [])],
        [value(name, dims) for name, dims in made],
        value_info=[value("logs", [5, CLASSES])] * (not read),
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


FEEDS = {
    "x": np.random.default_rng(0).normal(0, 20, (5, CLASSES)).astype("float32"),
    "labels": np.array([0, -1, 12, 3, -1]),
    "g": np.array(0.5, np.float32),
}


def test_losses_are_taken_over_with_all_of_their_gradients_or_not() -> None:
    pair = {"CrossEntropy": 1, "CrossEntropyGrad": 1}
    assert check(loss_graph(), FEEDS) == pair
    assert check(loss_graph(gradients=2), FEEDS) == {"CrossEntropy": 1, "CrossEntropyGrad": 2}
    assert check(loss_graph(gradients=0), FEEDS) == {"CrossEntropy": 1}
    none_ignored = {**FEEDS, "labels": np.array([0, 1, 12, 3, 4])}
    assert check(loss_graph(ignore=None, other=None), none_ignored) == pair
    assert check(loss_graph(other=None), none_ignored) == {}
    assert check(loss_graph(read=True), FEEDS) == {}


def sums(axes: list[int], *, keep: int = 0, dims: tuple[int, ...] = (2, 3, 4), dtype: str = "float32") -> Any:
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=keep)],
        "graph",
        [helper.make_tensor_value_info("x", element, dims)],
        [helper.make_tensor_value_info("y", element, None)],
        [numpy_helper.from_array(np.array(axes, np.int64), "axes")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_sums_over_leading_axes() -> None:
    x = {"x": np.random.default_rng(0).normal(size=(2, 3, 4)).astype("float32")}
    for axes in ([0], [0, 1], [1, 0], [-2, 0], [-3]):
        assert check(sums(axes), x) == {"ColumnSums": 1}, axes
    for axes in ([1], [2], [0, 2], [0, 1, 2], [1, 2]):
        assert check(sums(axes), x) == {}, axes
    assert check(sums([0], keep=1), x) == {}
    assert check(sums([0], dtype="float64"), {"x": x["x"].astype("float64")}) == {}
