"""Dropout, BatchNormalization and recurrent layers in training and evaluation, against numpy and finite differences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_build_models import Array, built, run_graph, save_model, tensors_of, value
from messages import mentions
from onnx import helper, numpy_helper

from ortflow.exporter.file_gradients import training_graph
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.onnx_runtime import onnxruntime as ort

RNG = np.random.default_rng(3)
MSE = {"kind": "mse", "label": "target"}


def with_dropout(path: Path, ratios: list[float | None], *, training: bool = False) -> Path:
    """x w, then one Dropout after the other."""
    tensors: dict[str, Array] = {"w": np.eye(64, dtype="float32"), "on": np.array(training)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["d0"])]
    for i, ratio in enumerate(ratios):
        inputs = [f"d{i}"] if ratio is None else [f"d{i}", f"r{i}", "on"]
        if ratio is not None:
            tensors[f"r{i}"] = np.float32(ratio)
        nodes.append(helper.make_node("Dropout", inputs, [f"d{i + 1}"], name=f"/drop{i}", seed=5))
    outputs = [value(f"d{len(ratios)}", ["batch", 64])]
    return save_model(path, nodes, [value("x", ["batch", 64])], outputs, tensors)


def test_dropout_is_switched_on(tmp_path: Path) -> None:
    graphs = built(with_dropout(tmp_path / "m.onnx", [0.3, 0.0, None]), MSE)
    assert any(mentions(note, "2 Dropout nodes", "0.3, 0.5") for note in graphs.notes)
    x, tensors = np.ones((500, 64), "float32"), tensors_of(graphs)
    feeds = {"x": x, "target": np.zeros_like(x), **tensors}

    def loss(seed: int) -> float:
        ort.set_seed(seed)
        return float(run_graph(graphs.train, feeds)["ortflow.loss_sum"])

    # The kernel's generator needs large seeds: it draws from the seeds n, n + 1, … of its nodes, and the sequences of
    # small ones are multiples of each other.
    # Each element stays with probability 0.7 * 0.5 and is scaled by its inverse: E[y^2] = 1 / 0.35.
    assert loss(1_000_003) / x.size == pytest.approx(1 / 0.35, rel=0.03)
    assert loss(1_000_003) == loss(1_000_003) != loss(1_000_033)
    assert run_graph(graphs.eval, feeds)["ortflow.loss_sum"] == x.size
    nodes = onnx.load(graphs.infer).graph.node
    assert [node.op_type for node in nodes] == ["MatMul", "Identity"]


def test_dropout_in_training_mode_is_not_reported(tmp_path: Path) -> None:
    graphs = built(with_dropout(tmp_path / "m.onnx", [0.3], training=True), MSE)
    assert not any("switched on" in note for note in graphs.notes)
    x = np.ones((10, 64), "float32")
    assert run_graph(graphs.eval, {"x": x, "target": 0 * x, **tensors_of(graphs)})["ortflow.loss_sum"] == x.size


def normalized(path: Path, shape: list[int], *, momentum: float = 0.9, training: int = 0, twice: bool = False) -> Path:
    tensors = {
        "scale": RNG.normal(size=shape[0]).astype("float32"),
        "shift": RNG.normal(size=shape[0]).astype("float32"),
        "mean": RNG.normal(size=shape[0]).astype("float32"),
        "var": RNG.random(size=shape[0]).astype("float32") + 0.5,
    }
    attributes = {"momentum": momentum, "epsilon": 1e-3}
    if training:
        attributes["training_mode"] = training
    names = list(tensors)
    outputs = ["h", "m1", "v1"] if training else ["h"]
    nodes = [helper.make_node("BatchNormalization", ["x", *names], outputs, name="/bn", **attributes)]
    if twice:
        attributes.pop("training_mode", None)
        nodes.append(helper.make_node("BatchNormalization", ["h", *names], ["y"], name="/again", **attributes))
    dims: list[int | str] = ["batch", *shape]
    return save_model(path, nodes, [value("x", dims)], [value("y" if twice else "h", dims)], tensors)


def batch_statistics(x: Array) -> tuple[Array, Array]:
    axes = tuple(i for i in range(x.ndim) if i != 1)
    x = x.astype("float64")
    return x.mean(axes), x.var(axes, ddof=1)


@pytest.mark.parametrize(("shape", "training"), [([3], 0), ([3, 4], 1), ([3, 4, 5], 0)])
def test_batch_normalization(tmp_path: Path, shape: list[int], training: int) -> None:
    graphs = built(normalized(tmp_path / "m.onnx", shape, momentum=0.75, training=training), MSE)
    switched = "1 BatchNormalization node … batch statistics"
    assert any(mentions(note, switched) for note in graphs.notes) != training
    tensors = tensors_of(graphs)
    x = RNG.normal(2, 3, size=(6, *shape)).astype("float32")
    feeds = {"x": x, "target": np.zeros_like(x), **tensors}
    train, evaluation = run_graph(graphs.train, feeds), run_graph(graphs.eval, feeds)
    mean, variance = batch_statistics(x)
    # torch moves the running variance by the unbiased one, and normalises by the biased one.
    np.testing.assert_allclose(train["mean_new"], 0.75 * tensors["mean"] + 0.25 * mean, rtol=1e-6)
    np.testing.assert_allclose(train["var_new"], 0.75 * tensors["var"] + 0.25 * variance, rtol=1e-6)
    count = x.size // shape[0]
    bias_less = variance * (count - 1) / count

    def loss(mean: Array, variance: Array) -> float:
        def column(values: Array) -> Array:
            return values.reshape(-1, *[1] * (len(shape) - 1))

        normal = (x - column(mean)) / np.sqrt(column(variance) + 1e-3)
        return float(((normal * column(tensors["scale"]) + column(tensors["shift"])) ** 2).sum())

    assert train["ortflow.loss_sum"] == pytest.approx(loss(mean, bias_less), rel=1e-5)
    assert evaluation["ortflow.loss_sum"] == pytest.approx(loss(tensors["mean"], tensors["var"]), rel=1e-5)
    assert [entry.tensor.group for entry in graphs.index] == ["no_decay", "no_decay", "state", "state"]


@pytest.mark.parametrize("training", [0, 1])
def test_frozen_batch_normalization_uses_its_statistics(tmp_path: Path, training: int) -> None:
    graphs = built(
        normalized(tmp_path / "m.onnx", [3, 4], training=training), MSE, model__parameters__freeze=["mean", "var"]
    )
    assert [entry.tensor.group for entry in graphs.index] == ["no_decay", "no_decay", "frozen", "frozen"]
    tensors = tensors_of(graphs)
    x = RNG.normal(2, 3, size=(6, 3, 4)).astype("float32")
    train = run_graph(graphs.train, {"x": x, "target": np.zeros_like(x), **tensors})
    assert not any(name.endswith("_new") for name in train)
    mean, variance = (tensors[name].astype("float64")[:, None] for name in ("mean", "var"))
    normal = (x - mean) / np.sqrt(variance + 1e-3)
    y = normal * tensors["scale"][:, None] + tensors["shift"][:, None]
    assert train["ortflow.loss_sum"] == pytest.approx((y**2).sum(), rel=1e-6)
    np.testing.assert_allclose(train["scale_grad"], (2 * y * normal).sum((0, 2)), rtol=1e-5)
    np.testing.assert_allclose(train["shift_grad"], (2 * y).sum((0, 2)), rtol=1e-5)


def test_frozen_batch_normalization_before_all_parameters(tmp_path: Path) -> None:
    """As where all but the head of a model is frozen: no gradient passes through it."""
    path = normalized(tmp_path / "m.onnx", [3])
    model = onnx.load(path)
    model.graph.node.append(helper.make_node("MatMul", ["h", "head"], ["y"], "head"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(3, dtype="float32") * 2, "head"))
    del model.graph.output[:]
    model.graph.output.append(value("y", ["batch", 3]))
    onnx.save(model, path)
    graphs = built(path, MSE, model__parameters__freeze=["s*", "mean", "var"])
    tensors = tensors_of(graphs)
    x = RNG.normal(2, 3, size=(6, 3)).astype("float32")
    train = run_graph(graphs.train, {"x": x, "target": np.zeros_like(x), **tensors})
    normal = (x - tensors["mean"].astype("float64")) / np.sqrt(tensors["var"] + 1e-3)
    y = 2 * (normal * tensors["scale"] + tensors["shift"])
    assert train["ortflow.loss_sum"] == pytest.approx((y**2).sum(), rel=1e-6)
    np.testing.assert_allclose(train["head_grad"], (y / 2).T @ (2 * y), rtol=1e-5)


def test_statistics_are_read_and_not_written(tmp_path: Path) -> None:
    """ONNX Runtime's BatchNormInternal overwrites its inputs: the flat buffer must not be among them."""
    graphs = built(normalized(tmp_path / "m.onnx", [3, 4]), MSE)
    tensors = tensors_of(graphs)
    x = RNG.normal(size=(6, 3, 4)).astype("float32")
    session = ort.InferenceSession(str(graphs.train), providers=["CPUExecutionProvider"])
    kept = {**tensors, "x": x, "target": 0 * x}
    bound = {name: array.copy() for name, array in kept.items()}
    binding = session.io_binding()
    for name, array in bound.items():
        # An OrtValue of an array is the array's own memory.
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
    for output in session.get_outputs():
        binding.bind_output(output.name)
    for _ in range(2):
        session.run_with_iobinding(binding)
    for name, array in kept.items():
        np.testing.assert_array_equal(bound[name], array)


def test_layer_that_is_called_twice_moves_twice(tmp_path: Path) -> None:
    graphs = built(normalized(tmp_path / "m.onnx", [3, 4], twice=True), MSE)
    tensors = tensors_of(graphs)
    x = RNG.normal(2, 3, size=(6, 3, 4)).astype("float32")
    train = run_graph(graphs.train, {"x": x, "target": 0 * x, **tensors})
    mean, variance = batch_statistics(x)
    scaled = x.astype("float64") - mean[:, None]
    scaled = scaled / np.sqrt((scaled**2).mean((0, 2)) + 1e-3)[:, None]
    again = batch_statistics(scaled * tensors["scale"][:, None] + tensors["shift"][:, None])
    for name, first, second in (("mean", mean, again[0]), ("var", variance, again[1])):
        expected = 0.9 * (0.9 * tensors[name] + 0.1 * first) + 0.1 * second
        np.testing.assert_allclose(train[f"{name}_new"], expected, rtol=1e-5, atol=1e-6)


def recurrent(path: Path, kind: str, direction: str, used: list[str], **more: list[str]) -> Path:
    """An LSTM or GRU over [time, batch, 3]; the loss takes the sum of the outputs named."""
    gates, directions, hidden = {"LSTM": 4, "GRU": 3}[kind], 2 if direction == "bidirectional" else 1, 5
    tensors: dict[str, Array] = {
        "W": RNG.normal(size=(directions, gates * hidden, 3)).astype("float32"),
        "R": RNG.normal(size=(directions, gates * hidden, hidden)).astype("float32"),
        "B": RNG.normal(size=(directions, 2 * gates * hidden)).astype("float32"),
        "s": RNG.normal(1, 0.1, size=3).astype("float32"),
    }
    inputs = more.get("inputs", ["xt", "W", "R", "B"])
    outputs = [name if name in used else "" for name in ("Y", "H", "C")[: 3 if kind == "LSTM" else 2]]
    attributes = {"hidden_size": hidden, "direction": direction} | ({"linear_before_reset": 1} if kind == "GRU" else {})
    nodes = [
        helper.make_node("Mul", ["x", "s"], ["xs"]),
        helper.make_node("Transpose", ["xs"], ["xt"], perm=[1, 0, 2]),
        *(helper.make_node("Transpose", [f"{n}_by_row"], [n], perm=[1, 0, 2]) for n in inputs[5:]),
        helper.make_node(kind, inputs, outputs, name="/rnn", **attributes),
    ]
    for name in used:
        nodes.append(helper.make_node("Mul", [name, name], [f"{name}2"]))
        nodes.append(helper.make_node("ReduceSum", [f"{name}2"], [f"{name}s"], keepdims=0))
    total = f"{used[0]}s"
    for name in used[1:]:
        nodes.append(helper.make_node("Add", [total, f"{name}s"], [f"{total}{name}"]))
        total += name
    given = [value("x", ["batch", 4, 3]), *(value(f"{n}_by_row", ["batch", directions, hidden]) for n in inputs[5:])]
    return save_model(path, nodes, given, [value(total, [])], tensors)


@pytest.mark.parametrize(
    ("kind", "direction", "used", "inputs"),
    [
        ("LSTM", "forward", ["Y"], ["xt", "W", "R", "B"]),
        ("LSTM", "reverse", ["Y", "H"], ["xt", "W", "R"]),
        ("LSTM", "bidirectional", ["Y", "H", "C"], ["xt", "W", "R", "B", "", "h0", "c0"]),
        ("GRU", "bidirectional", ["Y"], ["xt", "W", "R", "B"]),
        ("GRU", "reverse", ["H"], ["xt", "W", "R", "B", "", "h0"]),
    ],
)
def test_recurrent_layers(tmp_path: Path, kind: str, direction: str, used: list[str], inputs: list[str]) -> None:
    path = recurrent(tmp_path / "m.onnx", kind, direction, used, inputs=inputs)
    model = onnx.load(path)
    graphs = built(path, {"kind": "output", "output": model.graph.output[0].name})
    feeds = {"x": RNG.normal(size=(3, 4, 3)).astype("float32")}
    for name in inputs[5:]:
        directions = 2 if direction == "bidirectional" else 1
        feeds[f"{name}_by_row"] = RNG.normal(size=(3, directions, 5)).astype("float32")
    tensors = tensors_of(graphs)
    train = run_graph(graphs.train, {**feeds, **tensors})
    assert train["ortflow.loss_sum"] == pytest.approx(loss_of(graphs, {**feeds, **tensors}), rel=1e-6)
    for name in tensors:
        # Up the slope, where the change is largest against rounding.
        gradient = train[f"{name}_grad"]
        change = gradient * np.float32(2e-2 / np.linalg.norm(gradient))
        ahead, behind = (loss_of(graphs, {**feeds, **tensors, name: tensors[name] + sign * change}) for sign in (1, -1))
        assert (ahead - behind) / 2 == pytest.approx(float((gradient * change).sum()), rel=2e-3)


def loss_of(graphs: GraphSet, feeds: dict[str, Array]) -> float:
    """Computed by the evaluation graph, whose layers are ONNX's own."""
    return float(run_graph(graphs.eval, feeds)["ortflow.loss_sum"])


def test_what_recurrent_layers_cannot_do(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Transpose", ["x"], ["xt"], perm=[1, 0, 2]),
        helper.make_node("LSTM", ["xt", "W", "R", "", "lengths"], ["", "H"], name="/rnn", hidden_size=2),
        helper.make_node("Transpose", ["H"], ["y"], perm=[1, 0, 2]),
    ]
    tensors = {"W": np.ones((1, 8, 3), "float32"), "R": np.eye(8, 2, dtype="float32")[None]}
    given = [value("x", ["batch", 4, 3]), value("lengths", ["batch"], "int32")]
    path = save_model(tmp_path / "m.onnx", nodes, given, [value("y", ["batch", 1, 2])], tensors)
    with pytest.raises(UserError, match=r"'/rnn' \(LSTM\).*sequence lengths"):
        built(path, MSE)


@pytest.mark.parametrize("channels", [1, 3, 8])
def test_layers_with_equal_constant_statistics(channels: int) -> None:
    """As in the check of an export: ONNX Runtime merges equal constants, and its kernel writes into them."""
    names = ["scale0", "bias0", "scale1", "bias1"]
    nodes = [
        helper.make_node("BatchNormalization", ["x", "scale0", "bias0", "zeros0", "ones0"], ["first"], name="/0"),
        helper.make_node("Tanh", ["first"], ["bent"], name="/bent"),
        helper.make_node("BatchNormalization", ["bent", "scale1", "bias1", "zeros1", "ones1"], ["second"], name="/1"),
        helper.make_node("Mul", ["second", "bent"], ["y"], name="/y"),
    ]
    constants = [
        numpy_helper.from_array(np.full(channels, float(value), "float32"), f"{name}{i}")
        for i in range(2)
        for value, name in enumerate(("zeros", "ones"))
    ]
    inputs = [value("x", ["batch", channels, 5]), *(value(name, [channels]) for name in names)]
    graph = helper.make_graph(nodes, "two", inputs, [value("y", ["batch", channels, 5])], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    made, _ = training_graph(model, names, [], {"y": "weights"})
    feeds = {name: RNG.normal(1, 2, channels).astype("float32") for name in names}
    feeds |= {name: RNG.normal(size=(4, channels, 5)).astype("float32") for name in ("x", "weights")}
    options = ort.SessionOptions()
    found = []
    for level in (ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL):
        options.graph_optimization_level = level
        session = ort.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
        found.append(session.run([f"{name}_grad" for name in names], feeds))
    for name, plain, optimized in zip(names, *found, strict=True):
        np.testing.assert_allclose(optimized, plain, rtol=1e-4, atol=1e-4, err_msg=name)
