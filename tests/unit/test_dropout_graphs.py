"""Dropouts in the graphs of a run: which are ortflow's, that their gradients are those of the masks, and seeds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cuda_composed import composed
from graph_build_models import Array, built, numeric_gradient, run_graph, save_model, tensors_of, value
from kernels import LIBRARY, needs_kernels, off
from messages import says
from onnx import TensorProto, helper
from philox import kept

from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.domains import CPU_DOMAIN, CUDA_DOMAIN
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.intake.inspect import findings
from ortflow.workflow.graph.ir.origin import DROPOUT
from ortflow.workflow.graph.types import LOSS_SUM, SEED, GraphSet
from ortflow.workflow.kernels.dropout import attributes

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))
from model import Config, build

RATIO, CLASSES = 0.25, 13
FLAGS = attributes(RATIO)
GPU = {"resources__gpus_per_rank": 1}


def dropouts(graph: Path, domain: str) -> list[onnx.NodeProto]:
    return [node for node in onnx.load(graph).graph.node if node.op_type == "Dropout" and node.domain == domain]


def seeded(graph: Path) -> bool:
    return any(given.name == SEED for given in onnx.load(graph).graph.input)


def gpt(folder: Path, **changes: Any) -> GraphSet:
    path = folder / "model.onnx"
    onnx.save(build(Config(layers=2, width=16, heads=2, context=8, vocabulary=CLASSES, dropout=RATIO)), path)
    return built(path, **changes)


def feeds_of(graphs: GraphSet, seed: int) -> dict[str, Array]:
    random = np.random.default_rng(0)
    batch = {name: random.integers(0, CLASSES, (4, 8)) for name in ("tokens", "labels")}
    return {**tensors_of(graphs), **batch, SEED: np.array([seed])}


def perceptron(path: Path, *more: onnx.NodeProto, read: str = "d", outputs: tuple[str, ...] = ("d",)) -> Path:
    """Softmax of relu(x w) with a dropout before u."""
    random = np.random.default_rng(0)
    tensors: dict[str, Array] = {
        "w": random.normal(size=(6, 9)).astype("float32"),
        "u": random.normal(size=(9, CLASSES)).astype("float32"),
        "ratio": np.float32(RATIO),
        "three": np.float32(3),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="/in"),
        helper.make_node("Relu", ["h"], ["r"], name="/relu"),
        helper.make_node("Dropout", ["r", "ratio"], list(outputs), name="/drop"),
        *more,
        helper.make_node("MatMul", [read, "u"], ["y"], name="/out"),
    ]
    return save_model(path, nodes, [value("x", ["batch", 6])], [value("y", ["batch", CLASSES])], tensors)


def batch() -> dict[str, Array]:
    random = np.random.default_rng(1)
    return {"x": random.normal(size=(5, 6)).astype("float32"), "labels": random.integers(0, CLASSES, 5)}


def loss_of(w: Array, u: Array, given: dict[str, Array], mask: Array, more: Array | float = 0.0) -> float:
    """In double precision, with a mask that is given."""
    hidden = np.maximum(given["x"].astype("d") @ w, 0) * (mask / (1 - RATIO) + more)
    scores = hidden @ u
    scores -= scores.max(-1, keepdims=True)
    logarithms = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    return -float(logarithms[np.arange(5), given["labels"]].sum())


@needs_kernels
@pytest.mark.parametrize("seed", [0, 5, 2**31 - 1])
def test_the_gradient_is_that_of_the_mask(tmp_path: Path, seed: int) -> None:
    """Differences of a loss that numpy computes with its own mask."""
    graphs, given = built(perceptron(tmp_path / "m.onnx")), batch()
    tensors = tensors_of(graphs)
    found = run_graph(Form.KERNELS.of(graphs.train), {**tensors, **given, SEED: np.array([seed])}, kernels=LIBRARY.path)
    mask = kept(seed, 0, int(FLAGS["dropped"]), (5, 9))
    w, u = tensors["w"].astype("d"), tensors["u"].astype("d")
    assert off(found[LOSS_SUM], np.asarray(loss_of(w, u, given, mask))) < 1e-6
    assert off(found["w_grad"], numeric_gradient(lambda at: loss_of(at, u, given, mask), w)) < 1e-5
    assert off(found["u_grad"], numeric_gradient(lambda at: loss_of(w, at, given, mask), u)) < 1e-5
    assert not dropouts(Form.KERNELS.of(graphs.train), "")


@needs_kernels
def test_a_mask_that_a_model_reads_is_drawn_for_it(tmp_path: Path) -> None:
    """It adds three times what is kept."""
    more = [
        helper.make_node("Cast", ["mask"], ["number"], name="/cast", to=TensorProto.FLOAT),
        helper.make_node("Mul", ["r", "three"], ["thrice"], name="/thrice"),
        helper.make_node("Mul", ["thrice", "number"], ["added"], name="/added"),
        helper.make_node("Add", ["d", "added"], ["sum"], name="/sum"),
    ]
    graphs = built(perceptron(tmp_path / "m.onnx", *more, read="sum", outputs=("d", "mask")))
    given, tensors = batch(), tensors_of(graphs)
    found = run_graph(Form.KERNELS.of(graphs.train), {**tensors, **given, SEED: np.array([8])}, kernels=LIBRARY.path)
    mask = kept(8, 0, int(FLAGS["dropped"]), (5, 9))
    w, u = tensors["w"].astype("d"), tensors["u"].astype("d")
    assert off(found[LOSS_SUM], np.asarray(loss_of(w, u, given, mask, 3 * mask))) < 1e-6
    assert off(found["w_grad"], numeric_gradient(lambda at: loss_of(at, u, given, mask, 3 * mask), w)) < 1e-5
    assert len(dropouts(Form.KERNELS.of(graphs.train), CPU_DOMAIN)) == 3


@needs_kernels
def test_graphs_for_gpus_drop_what_those_for_cpus_drop(tmp_path: Path) -> None:
    graphs = gpt(tmp_path, **GPU)
    assert len(dropouts(graphs.train, "")) == 7
    assert not dropouts(Form.PLACED.of(graphs.train), "")
    assert len(dropouts(Form.PLACED.of(graphs.train), CUDA_DOMAIN)) == 2 * 7
    found = {}
    for seed in (1, 2):
        feeds = feeds_of(graphs, seed)
        expected = run_graph(Form.KERNELS.of(graphs.train), feeds, kernels=LIBRARY.path)
        placed = compose(composed(onnx.load(Form.PLACED.of(graphs.train))))
        found[seed] = run_graph(placed, feeds, kernels=LIBRARY.path)
        for name, array in expected.items():
            assert off(found[seed][name], array) < 2e-5, name
    assert off(found[1][LOSS_SUM], found[2][LOSS_SUM]) > 1e-3


def test_what_a_run_without_dropout_reads_has_no_seed(tmp_path: Path) -> None:
    graphs = gpt(tmp_path, **GPU, train__precision="bf16")
    for path in (graphs.eval, graphs.infer, graphs.train):
        assert not seeded(path)
    for path in (Form.KERNELS.of(graphs.train), Form.PLACED.of(graphs.train), Form.HALF.of(graphs.train)):
        assert seeded(path)
    for path in (graphs.eval, graphs.infer):
        assert not [node for node in onnx.load(path).graph.node if node.op_type == "Dropout"]


@needs_kernels
def test_a_ratio_that_varies_is_left_to_onnx_runtime(tmp_path: Path) -> None:
    model = onnx.load(perceptron(tmp_path / "m.onnx"))
    (drop,) = [node for node in model.graph.node if node.op_type == "Dropout"]
    model.graph.node.insert(0, helper.make_node("ReduceMax", ["x"], ["most"], name="/most", keepdims=0))
    model.graph.node.insert(1, helper.make_node("Min", ["most", "ratio"], ["varying"], name="/varying"))
    drop.input[1] = "varying"
    onnx.save(model, tmp_path / "m.onnx")
    graphs = built(tmp_path / "m.onnx")
    assert len(dropouts(Form.KERNELS.of(graphs.train), "")) == 1
    assert not dropouts(Form.KERNELS.of(graphs.train), CPU_DOMAIN)
    assert not seeded(Form.KERNELS.of(graphs.train))


@needs_kernels
def test_numbers_that_a_file_brings_are_not_used(tmp_path: Path) -> None:
    model = onnx.load(perceptron(tmp_path / "m.onnx"))
    (drop,) = [node for node in model.graph.node if node.op_type == "Dropout"]
    drop.metadata_props.add(key=DROPOUT, value="eleven")
    onnx.save(model, tmp_path / "m.onnx")
    found = dropouts(Form.KERNELS.of(built(tmp_path / "m.onnx").train), CPU_DOMAIN)
    assert {node.input[1] for node in found} == {"ortflow.dropout.0"}


@needs_kernels
def test_dropouts_without_effect_have_no_number_that_others_would_shift_by(tmp_path: Path) -> None:
    """A ratio of 0 makes an Identity; the numbers of the others do not depend on it."""
    more = [helper.make_node("Dropout", ["d", "half"], ["e"], name="/second")]
    path, numbers = perceptron(tmp_path / "m.onnx", *more, read="e"), []
    model = onnx.load(path)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.5), "half"))
    for ratio in (RATIO, 0.0):
        (tensor,) = [tensor for tensor in model.graph.initializer if tensor.name == "ratio"]
        tensor.CopyFrom(onnx.numpy_helper.from_array(np.float32(ratio), "ratio"))
        onnx.save(model, path)
        graphs = built(path)
        numbers.append(sorted({node.input[1] for node in dropouts(Form.KERNELS.of(graphs.train), CPU_DOMAIN)}))
    assert numbers[1] == numbers[0][1:]


def test_inspect_says_who_draws_the_masks(tmp_path: Path) -> None:
    path = perceptron(tmp_path / "m.onnx")
    (line,) = [line for line in findings(path).notes if "Dropout" in line]
    assert says(line, "1 Dropout node: … from seed, node and element")
    assert line in built(path).notes
    assert line not in built(path, resources__kernels="onnxruntime").notes
    model = onnx.load(path)
    (drop,) = [node for node in model.graph.node if node.op_type == "Dropout"]
    model.graph.node.insert(0, helper.make_node("ReduceMax", ["x"], ["most"], name="/most", keepdims=0))
    drop.input[1] = "most"
    onnx.save(model, path)
    (line,) = [line for line in findings(path).notes if "/drop" in line]
    assert says(line, "the masks of node '/drop' … ONNX Runtime … varies … not captured")
