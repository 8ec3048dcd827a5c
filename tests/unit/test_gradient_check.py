"""The check of a run's gradient finds a wrong training graph or kernel, names it, and leaves no trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_build_models import Array, built, residual, run_file, save_model, value
from messages import says
from onnx import helper, numpy_helper
from trainers import trainer_on

from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.ir.order import sort_nodes
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.kernels.library import find_library
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.trainer import MicroBatch, Report
from ortflow.workflow.trainer.check import first_gradient
from ortflow.workflow.trainer.check.first_gradient import Checked
from ortflow.workflow.trainer.step import GraphTrainer

needs_kernels = pytest.mark.skipif(find_library().path is None, reason="no kernels of our own here")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Six numbers to three classes through attention-like products, BatchNormalization and dropout."""
    random = np.random.default_rng(0)
    tensors: dict[str, Array] = {
        "w": (0.4 * random.normal(size=(6, 8))).astype("float32"),
        "b": np.zeros(8, "float32"),
        "scale": np.ones(8, "float32"),
        "shift": np.zeros(8, "float32"),
        "mean": np.zeros(8, "float32"),
        "var": np.ones(8, "float32"),
        "u": (0.4 * random.normal(size=(8, 3))).astype("float32"),
        "rate": np.array(0.25, "float32"),
        "training": np.array(True),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="/in"),
        helper.make_node("Add", ["h", "b"], ["hb"], name="/bias"),
        helper.make_node("BatchNormalization", ["hb", "scale", "shift", "mean", "var"], ["n"], name="/norm"),
        helper.make_node("Tanh", ["n"], ["t"], name="/tanh"),
        helper.make_node("Dropout", ["t", "rate", "training"], ["d"], name="/drop"),
        helper.make_node("MatMul", ["d", "u"], ["y"], name="/out"),
    ]
    return save_model(tmp_path / "model.onnx", nodes, [value("x", ["batch", 6])], [value("y", ["batch", 3])], tensors)


def batch() -> MicroBatch:
    random = np.random.default_rng(1)
    return MicroBatch({"x": random.normal(size=(16, 6)).astype("float32"), "labels": random.integers(0, 3, 16)}, 16)


def spoil(path: Path, output: str, factor: float, operator: str = "Mul") -> None:
    """Multiply a value of a graph, or add to it; other readers of a parameter's gradient are unchanged."""
    graph, before, number = onnx.load(path), f"{output}.before", f"{output}.factor"
    for node in graph.graph.node:
        if output.endswith("_grad"):
            node.input[:] = [before if name == output else name for name in node.input]
        for place, name in enumerate(node.output):
            if name == output:
                node.output[place] = before
    graph.graph.initializer.append(numpy_helper.from_array(np.float32(factor), number))
    graph.graph.node.append(helper.make_node(operator, [before, number], [output], name=f"/spoil/{output}"))
    sort_nodes(graph.graph)
    onnx.save(graph, path)


def trainer_of(model: Path, graphs: GraphSet) -> GraphTrainer:
    return trainer_on(graphs, run_file(model))


def test_a_right_gradient_passes_and_nothing_has_changed(model: Path) -> None:
    trainer = trainer_of(model, built(model))
    before = {name: buffer.read() for name, buffer in trainer.state().items()}
    checked = trainer.training.checker.gradient.run(batch(), 5)
    assert checked is not None
    assert checked.decided
    assert checked.compared.startswith("5 tensors")
    # That of a bias before a batch's mean is taken off is zero.
    assert checked.compared.endswith("differences of the loss, 1 of 5 undecided")
    assert all(np.array_equal(buffer.read(), before[name]) for name, buffer in trainer.state().items())
    untouched = trainer_of(model, built(model))
    steps = [t.step([batch()], learning_rate=0.1, update=1, seeds=[3], control_values=[]) for t in (trainer, untouched)]
    assert steps[0].loss == steps[1].loss
    assert np.array_equal(trainer.state()["parameters"].read(), untouched.state()["parameters"].read())


@pytest.mark.parametrize("factor", [0.0, 0.9, -1.0])
@pytest.mark.parametrize("tensor", ["w", "u", "scale"])
def test_a_gradient_that_is_not_the_loss_s_is_named(model: Path, tensor: str, factor: float) -> None:
    graphs = built(model)
    for path in (graphs.train, Form.KERNELS.of(graphs.train)):
        if path.exists():
            spoil(path, f"{tensor}_grad", factor)
    with pytest.raises(UserError, match=f"gradient of '{tensor}' disagrees with") as caught:
        trainer_of(model, graphs).training.checker.gradient.run(batch(), 5)
    assert {"w": "/in", "u": "/out", "scale": "/norm"}[tensor] in str(caught.value)
    assert caught.value.exit_code == 2


@needs_kernels
def test_a_wrong_kernel_is_named_by_the_first_node_that_differs(model: Path) -> None:
    graphs = built(model)
    faster = Form.KERNELS.of(graphs.train)
    spoil(faster, "t", 1.5)
    with pytest.raises(UserError, match="kernels") as caught:
        trainer_of(model, graphs).training.checker.gradient.run(batch(), 5)
    assert "/tanh" in str(caught.value)
    assert caught.value.where == "resources.kernels"


@needs_kernels
@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_kernels_may_differ_at_a_kink_but_not_everywhere(tmp_path: Path, factor: float) -> None:
    """A unit whose input is 0 for every sample: rounding decides whether ReLU passes its gradient."""
    random = np.random.default_rng(0)
    tensors: dict[str, Array] = {
        "w": (0.4 * random.normal(size=(6, 8))).astype("float32"),
        "b": np.zeros(8, "float32"),
        "u": (0.4 * random.normal(size=(8, 3))).astype("float32"),
    }
    tensors["w"][:, 3] = 0
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="/in"),
        helper.make_node("Add", ["h", "b"], ["hb"], name="/bias"),
        helper.make_node("Relu", ["hb"], ["r"], name="/relu"),
        helper.make_node("MatMul", ["r", "u"], ["y"], name="/out"),
    ]
    model = save_model(tmp_path / "m.onnx", nodes, [value("x", ["batch", 6])], [value("y", ["batch", 3])], tensors)
    graphs = built(model)
    faster = Form.KERNELS.of(graphs.train)
    spoil(faster, "hb", 1e-9, "Add")
    if factor == 1:
        assert trainer_of(model, graphs).training.checker.gradient.run(batch(), 5) is not None
        return
    spoil(faster, "w_grad", factor)
    with pytest.raises(UserError, match="differ in the gradient of 'w'"):
        trainer_of(model, graphs).training.checker.gradient.run(batch(), 5)


def test_branches_that_begin_at_zero_are_not_refused(tmp_path: Path) -> None:
    model = residual(tmp_path / "model.onnx")
    trainer = trainer_of(model, built(model))
    before = trainer.state()["parameters"].read()
    checked = trainer.training.checker.gradient.run(batch(), 5)
    assert checked is not None
    assert checked.decided
    assert np.array_equal(trainer.state()["parameters"].read(), before)


@pytest.mark.parametrize("factor", [0.0, 2.0, -1.0])
@pytest.mark.parametrize("tensor", ["scale", "shift"])
def test_wrong_gradients_of_branches_that_begin_at_zero_are_named(tmp_path: Path, tensor: str, factor: float) -> None:
    model = residual(tmp_path / "model.onnx")
    graphs = built(model)
    for path in (graphs.train, Form.KERNELS.of(graphs.train)):
        if path.exists():
            spoil(path, f"{tensor}_grad", factor)
    with pytest.raises(UserError, match=f"gradient of '{tensor}' disagrees with"):
        trainer_of(model, graphs).training.checker.gradient.run(batch(), 5)


def test_a_batch_without_a_finite_loss_checks_nothing(model: Path) -> None:
    damaged = batch()
    damaged.arrays["x"][3, 2] = np.nan
    assert trainer_of(model, built(model)).training.checker.gradient.run(damaged, 5) is None


@pytest.mark.parametrize("runs", [1, 2, 3, 5, 8])
def test_behind_an_error_nothing_is_written(model: Path, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write may wait for other ranks, which end when they hear of the error."""
    trainer = trainer_on(built(model), run_file(model))
    run, write, done, late = Binding.run, HostBuffer.write, list[None](), list[str]()

    def failing(binding: Binding, **options: bool) -> None:
        done.append(None)
        if len(done) == runs:
            raise OrtflowError("the GPU is lost")
        run(binding, **options)

    def noted(buffer: HostBuffer, values: Array) -> None:
        late.extend(["written"] * (len(done) >= runs))
        write(buffer, values)

    monkeypatch.setattr(Binding, "run", failing)
    monkeypatch.setattr(HostBuffer, "write", noted)
    with pytest.raises(OrtflowError, match="the GPU is lost"):
        trainer.training.checker.gradient.run(batch(), 3)
    assert not late


def test_the_key_follows_graphs_and_kernels(model: Path) -> None:
    graphs = built(model)
    key = trainer_of(model, graphs).training.checker.gradient.key()
    assert trainer_of(model, graphs).training.checker.gradient.key() == key
    spoil(graphs.train, "w_grad", 2.0)
    assert trainer_of(model, graphs).training.checker.gradient.key() != key


@needs_kernels
def test_a_model_that_magnifies_rounding_is_not_refused(tmp_path: Path) -> None:
    """Statistics over nearly equal rows: in single precision few digits of their differences remain."""
    random = np.random.default_rng(0)
    tensors: dict[str, Array] = {
        "w": (0.4 * random.normal(size=(6, 8))).astype("float32"),
        **{name: np.full(8, start, "float32") for name, start in (("scale", 1), ("shift", 0), ("mean", 0), ("var", 1))},
        "u": (0.4 * random.normal(size=(8, 3))).astype("float32"),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="/in"),
        helper.make_node(
            "BatchNormalization", ["h", "scale", "shift", "mean", "var"], ["n"], name="/norm", epsilon=1e-12
        ),
        helper.make_node("MatMul", ["n", "u"], ["y"], name="/out"),
    ]
    model = save_model(tmp_path / "m.onnx", nodes, [value("x", ["batch", 6])], [value("y", ["batch", 3])], tensors)
    x = (1 + 1e-5 * random.normal(size=(16, 6))).astype("float32")
    close = MicroBatch({"x": x, "labels": random.integers(0, 3, 16)}, 16)
    assert trainer_of(model, built(model)).training.checker.gradient.run(close, 5) is not None


def test_a_slope_below_the_rounding_of_the_loss_is_not_decided(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log says so, and the check is repeated."""
    small = onnx.load(model)
    (last,) = (node for node in small.graph.node if node.name == "/out")
    last.output[0] = "large"
    small.graph.initializer.append(numpy_helper.from_array(np.float32(1e-6), "small"))
    small.graph.node.append(helper.make_node("Mul", ["large", "small"], ["y"], name="/small"))
    onnx.save(small, model)
    trainer = trainer_of(model, built(model))
    checked = trainer.training.checker.gradient.run(batch(), 5)
    assert checked is not None
    assert not checked.decided
    assert "differences" not in checked.compared
    warned, noted, kept = list[str](), list[str](), list[str]()
    monkeypatch.setattr(first_gradient, "remember", kept.append)
    report = Report(note=noted.append, warn=warned.append)
    for known in (checked, Checked("5 tensors against differences of the loss")):
        first_gradient.check_now("key", [batch()], 2, lambda _, known=known: known, report)  # type: ignore[misc]
    assert [says(line, "… not checked against differences of the loss …") for line in warned] == [True]
    assert kept == ["key"], "of the check that decided"
    assert len(noted) == 1 + bool(checked.compared)
