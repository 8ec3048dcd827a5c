"""Files that configure writes: the set's contract, the same bytes each time, groups, notes, refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_build_models import built, linear, run_file, run_graph, save_model, tensors_of, value
from messages import says
from onnx import helper

from ortflow.workflow.assembly.build import build_graphs
from ortflow.workflow.data.inputs import BatchInput
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.types import GraphSet

RNG = np.random.default_rng(2)
MSE = {"kind": "mse", "label": "target"}


def language_model(path: Path) -> Path:
    """A table, a norm, a dropout, a head, and a position table that a constant looks up."""
    tensors = {
        "embed.weight": RNG.normal(size=(11, 6)).astype("float32"),
        "position.weight": RNG.normal(size=(4, 6)).astype("float32"),
        "norm.weight": RNG.normal(size=6).astype("float32"),
        "norm.bias": RNG.normal(size=6).astype("float32"),
        "head.weight": RNG.normal(size=(6, 11)).astype("float32"),
        "places": np.arange(4),
        "ratio": np.float32(0.1),
    }
    nodes = [
        helper.make_node("Gather", ["embed.weight", "tokens"], ["e"], name="/embed"),
        helper.make_node("Gather", ["position.weight", "places"], ["p"], name="/position"),
        helper.make_node("Add", ["e", "p"], ["ep"], name="/add"),
        helper.make_node("Dropout", ["ep", "ratio"], ["d"], name="/drop"),
        helper.make_node("LayerNormalization", ["d", "norm.weight", "norm.bias"], ["n"], name="/norm"),
        helper.make_node("MatMul", ["n", "head.weight"], ["logits"], name="/head"),
    ]
    return save_model(
        path, nodes, [value("tokens", ["batch", 4], "int64")], [value("logits", ["batch", 4, 11])], tensors
    )


def feeds_of(graphs: GraphSet) -> dict[str, np.ndarray]:
    return {"tokens": RNG.integers(0, 11, (3, 4)), "labels": RNG.integers(0, 11, (3, 4)), **tensors_of(graphs)}


def test_biases_of_recurrent_layers_do_not_decay(tmp_path: Path) -> None:
    """They have two axes here, but torch.nn.LSTM has them as vectors."""
    tensors = {
        name: RNG.normal(size=shape).astype("float32")
        for name, shape in {"w": (1, 9, 4), "r": (1, 9, 3), "b": (1, 18)}.items()
    }
    nodes = [
        helper.make_node("GRU", ["x", "w", "r", "b"], ["h"], hidden_size=3),
        helper.make_node("Squeeze", ["h", "axis"], ["y"]),
    ]
    ends = [value("x", ["batch", 5, 4])], [value("y", ["batch", 5, 3])]
    path = save_model(tmp_path / "m.onnx", nodes, *ends, {**tensors, "axis": np.array([1])})
    graphs = built(path, {"kind": "mse"})
    assert {e.name: e.tensor.group for e in graphs.index} == {"w": "decay", "r": "decay", "b": "no_decay"}


def test_the_set(tmp_path: Path) -> None:
    graphs = built(language_model(tmp_path / "m.onnx"))
    names = ["embed.weight", "position.weight", "norm.weight", "norm.bias", "head.weight"]
    assert graphs.inputs == (
        BatchInput("tokens", "int64", (None, 4), "data"),
        BatchInput("labels", "int64", (None, 4), "label"),
    )
    assert graphs.vocabulary == {"tokens": 11, "labels": 11}
    assert {e.name: e.tensor.group for e in graphs.index} == dict(
        zip(names, ("decay", "decay", "no_decay", "no_decay", "decay"), strict=True)
    )
    train, evaluation = onnx.load(graphs.train).graph, onnx.load(graphs.eval).graph
    for graph in (train, evaluation):
        assert [i.name for i in graph.input] == ["tokens", "labels", *names]
        assert not {t.name for t in graph.initializer} & set(names)
    outputs = [o.name for o in train.output]
    assert outputs == ["ortflow.loss_sum", "ortflow.loss_weight", *(f"{name}_grad" for name in names)]
    assert [o.name for o in evaluation.output] == ["ortflow.loss_sum", "ortflow.loss_weight", "logits"]
    infer = onnx.load(graphs.infer).graph
    assert [i.name for i in infer.input] == ["tokens"]
    assert [o.name for o in infer.output] == ["logits"]
    assert GraphSet.load(graphs.root).to_json() == graphs.to_json()


def test_same_bytes_and_same_numbers(tmp_path: Path) -> None:
    """Built twice, in processes of other hash seeds: the same files. Run ten times with two threads: the same bits."""
    graphs = build_graphs(run_file(language_model(tmp_path / "m.onnx")), tmp_path / "graphs")
    first = {path.name: path.read_bytes() for path in graphs.root.iterdir()}
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from graph_build_models import built\n"
        "built(Path(sys.argv[2]))"
    )
    here = str(Path(__file__).parents[1] / "support")
    arguments = [sys.executable, "-c", script, here, str(tmp_path / "m.onnx")]
    subprocess.run(arguments, check=True, env={"PYTHONHASHSEED": "4321", "PATH": ""})
    assert {path.name: path.read_bytes() for path in graphs.root.iterdir()} == first
    feeds = feeds_of(graphs)
    from ortflow.workflow.onnx_runtime import onnxruntime as ort

    results = set()
    for _ in range(10):
        ort.set_seed(1_000_003)
        results.add(b"".join(array.tobytes() for array in run_graph(graphs.train, feeds, threads=2).values()))
    assert len(results) == 1


def test_set_is_read_without_onnx(tmp_path: Path) -> None:
    graphs = built(language_model(tmp_path / "m.onnx"))
    script = (
        "import sys; from pathlib import Path; from ortflow.workflow.graph.types import GraphSet\n"
        "graphs = GraphSet.load(Path(sys.argv[1])); assert len(graphs.index) == 5\n"
        "assert not {'onnx', 'onnxruntime', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, str(graphs.root)], check=True)


def test_groups_by_pattern(tmp_path: Path) -> None:
    path = language_model(tmp_path / "m.onnx")
    graphs = built(
        path, train__optimizer__no_decay=["embed.*", "norm.weight"], model__parameters__freeze=["position.*"]
    )
    assert {e.name: e.tensor.group for e in graphs.index} == {
        "embed.weight": "no_decay",
        "position.weight": "frozen",
        "norm.weight": "no_decay",
        "norm.bias": "decay",
        "head.weight": "decay",
    }
    assert "position.weight_grad" not in [o.name for o in onnx.load(graphs.train).graph.output]
    with pytest.raises(UserError, match=r"train.optimizer.no_decay\[1\]: the pattern 'nrm.weight' .*'norm.weight'"):
        built(path, train__optimizer__no_decay=["embed.*", "nrm.weight"])


def two_heads(path: Path) -> Path:
    """Two outputs of two inputs; only the first input reaches the first output."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], name="/first"),
        helper.make_node("MatMul", ["z", "v"], ["vz"], name="/second"),
        helper.make_node("Add", ["y", "vz"], ["other"], name="/sum"),
    ]
    tensors = {name: RNG.normal(size=(3, 2)).astype("float32") for name in ("v", "w")}
    inputs = [value("z", ["batch", 3]), value("x", ["batch", 3])]
    return save_model(path, nodes, inputs, [value("y", ["batch", 2]), value("other", ["batch", 2])], tensors)


def test_what_the_loss_does_not_depend_on(tmp_path: Path) -> None:
    graphs = built(two_heads(tmp_path / "m.onnx"), {**MSE, "output": "y"})
    assert [i.name for i in graphs.inputs] == ["x", "target"]
    assert {e.name: e.tensor.group for e in graphs.index} == {"w": "decay", "v": "frozen"}
    (warning,) = graphs.warnings
    assert says(warning, "not trained … no gradient … v,")
    assert any(says(note, "omitted … input z") for note in graphs.notes)
    # The exported model has both all the same.
    infer = onnx.load(graphs.infer).graph
    assert [i.name for i in infer.input] == ["z", "x"]
    assert [o.name for o in infer.output] == ["y", "other"]
    x = RNG.normal(size=(2, 3)).astype("float32")
    train = run_graph(graphs.train, {"x": x, "target": np.zeros((2, 2), "float32"), **tensors_of(graphs)})
    assert set(train) == {"ortflow.loss_sum", "ortflow.loss_weight", "w_grad"}


def test_fixed_batch(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    tensors = {"w": RNG.normal(size=(3, 2)).astype("float32")}
    path = save_model(tmp_path / "m.onnx", nodes, [value("x", [4, 3])], [value("y", [4, 2])], tensors)
    assert built(path, MSE, data__micro_batch=4).inputs[0].shape == (4, 3)
    evaluation = {"data__eval": {"path": "e"}, "data__eval_micro_batch": 2}
    for changes, words in [
        ({}, "data.micro_batch: the model's input 'x' has a fixed batch of 4, which is not 8"),
        ({"data__micro_batch": 4, "data__last_batch": "keep"}, "data.last_batch: "),
        ({"data__micro_batch": 4, **evaluation}, "data.eval_micro_batch: "),
    ]:
        with pytest.raises(UserError) as caught:
            built(path, MSE, **changes)
        assert str(caught.value).startswith(words)


def test_scalar_input(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Mul", ["y", "scale"], ["z"])]
    tensors = {"w": RNG.normal(size=(3, 2)).astype("float32")}
    inputs = [value("x", ["batch", 3]), value("scale", [])]
    path = save_model(tmp_path / "m.onnx", nodes, inputs, [value("z", ["batch", 2])], tensors)
    with pytest.raises(UserError, match="input 'scale' is a scalar"):
        built(path, MSE)


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "graphs").write_text("a file in the way")
    with pytest.raises(UserError, match="cannot write"):
        built(linear(tmp_path / "m.onnx"))


def user_train_graph_graph(path: Path, *, weight: str = "w", state: bool = True) -> Path:
    """loss = sum over elements of (x w)^2, written by hand with its gradient; b has none."""
    nodes = [
        helper.make_node("MatMul", ["x", weight], ["y"]),
        helper.make_node("Mul", ["y", "y"], ["yy"]),
        helper.make_node("ReduceSum", ["yy"], ["ortflow.loss_sum"], keepdims=0),
        helper.make_node("Size", ["yy"], ["size"]),
        helper.make_node("Cast", ["size"], ["ortflow.loss_weight"], to=1),
        helper.make_node("Transpose", ["x"], ["xt"], perm=[1, 0]),
        helper.make_node("MatMul", ["xt", "y"], ["half"]),
        helper.make_node("Add", ["half", "half"], [f"{weight}_grad"]),
    ]
    inputs = [value("x", ["batch", 4]), value(weight, [4, 5])]
    outputs = [value("ortflow.loss_sum", []), value("ortflow.loss_weight", []), value(f"{weight}_grad", [4, 5])]
    return save_model(path, nodes, inputs, outputs if state else outputs[1:], {})


def test_own_graphs(tmp_path: Path) -> None:
    model = linear(tmp_path / "m.onnx")
    own = user_train_graph_graph(tmp_path / "train.onnx")
    graphs = built(model, MSE, model__graphs__train=str(own))
    assert {e.name: e.tensor.group for e in graphs.index} == {"w": "decay", "b": "frozen"}
    assert [i.name for i in graphs.inputs] == ["x", "target"]
    x = RNG.normal(size=(3, 4)).astype("float32")
    tensors = tensors_of(graphs)
    train = run_graph(graphs.train, {"x": x, "target": np.zeros((3, 5), "float32"), **tensors})
    np.testing.assert_allclose(train["w_grad"], 2 * x.T @ (x @ tensors["w"]), rtol=1e-5, atol=1e-5)

    optimizer = save_model(
        tmp_path / "optimizer.onnx",
        [
            helper.make_node("Mul", ["gradients.0", "learning_rate"], ["scaled"]),
            helper.make_node("Sub", ["parameters.0", "scaled"], ["parameters.0.out"]),
        ],
        [
            value("learning_rate", [1]),
            value("step", [1], "int64"),
            value("parameters.0", ["n"]),
            value("gradients.0", ["n"]),
        ],
        [value("parameters.0.out", ["n"])],
        {},
    )
    evaluation = graphs.eval.rename(tmp_path / "eval.onnx")
    graphs = built(model, MSE, model__graphs__optimizer=str(optimizer), model__graphs__eval=str(evaluation))
    assert graphs.user_optimizer_graph
    assert graphs.optimizer.exists()


def reads_a_moment_late(path: Path) -> Path:
    """Bound in place, ONNX Runtime 1.19.2 computes `old` from the new moment, although it is first in the file."""
    names = ("parameters.0", "gradients.0", "moment.0")
    return save_model(
        path,
        [
            helper.make_node("Mul", ["moment.0", "learning_rate"], ["old"]),
            helper.make_node("Add", ["moment.0", "gradients.0"], ["moment.0.out"]),
            helper.make_node("Sub", ["parameters.0", "moment.0.out"], ["changed"]),
            helper.make_node("Sub", ["changed", "old"], ["parameters.0.out"]),
        ],
        [value("learning_rate", [1]), value("step", [1], "int64"), *(value(name, ["n"]) for name in names)],
        [value("parameters.0.out", ["n"]), value("moment.0.out", ["n"])],
        {},
    )


def test_own_graphs_that_do_not_fit(tmp_path: Path) -> None:
    model = linear(tmp_path / "m.onnx")
    for key, path, words in [
        ("train", user_train_graph_graph(tmp_path / "1.onnx", state=False), "no output 'ortflow.loss_sum'"),
        ("train", user_train_graph_graph(tmp_path / "2.onnx", weight="q"), "no output `<parameter>_grad`"),
        ("train", linear(tmp_path / "3.onnx"), "no output 'ortflow.loss_sum'"),
        ("eval", linear(tmp_path / "4.onnx"), "no output 'ortflow.loss_sum'"),
        ("optimizer", linear(tmp_path / "5.onnx"), "no input 'learning_rate'"),
        ("optimizer", reads_a_moment_late(tmp_path / "6.onnx"), r"'old'.* may read 'moment.0' after 'moment.0.out'"),
        ("eval", tmp_path / "missing.onnx", "missing.onnx"),
    ]:
        with pytest.raises(UserError, match=words):
            built(model, **{f"model__graphs__{key}": str(path)})
    assert not (tmp_path / "graphs").exists()
