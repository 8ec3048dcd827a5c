"""`model.recompute`: the same bits with fewer values kept."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_build_models import Array, run_file, run_graph, save_model, tensors_of, value
from kernels import LIBRARY, needs_kernels
from onnx import helper

from ortflow.workflow.assembly.build import build_graphs
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.ir.edit import constants_of
from ortflow.workflow.graph.ir.origin import SCOPES, scopes_of
from ortflow.workflow.graph.types import SEED, GraphSet
from ortflow.workflow.onnx_runtime import onnxruntime

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))
from model import Config, build

LAYERS, TOKENS = 6, 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.onnx"
    onnx.save(build(Config(layers=LAYERS, width=64, heads=4, context=TOKENS, vocabulary=11)), path)
    return path


@pytest.fixture(scope="module")
def graphs_of(model: Path) -> Callable[..., GraphSet]:
    """The graphs of `model` with these patterns, built once."""
    return cache(lambda *patterns: built(model, f"graphs-{len(list(model.parent.iterdir()))}", *patterns))


def built(model: Path, name: str, *patterns: str) -> GraphSet:
    spec = run_file(model)
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"recompute": list(patterns)})})
    return build_graphs(spec, model.parent / name)


def feeds(graphs: GraphSet, batch: int = 4) -> dict[str, Array]:
    window = np.random.default_rng(0).integers(0, 11, (batch, TOKENS + 1))
    return {**tensors_of(graphs), "tokens": window[:, :-1], "labels": window[:, 1:]}


@pytest.mark.rotates
@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=needs_kernels)])
@pytest.mark.parametrize("patterns", [("h.*",), ("h.0", "h.3.attn*"), ("*",)])
def test_every_output_keeps_its_bits(
    graphs_of: Callable[..., GraphSet], patterns: tuple[str, ...], kernels: bool
) -> None:
    found = []
    for graphs in (graphs_of(), graphs_of(*patterns)):
        path, library = (Form.KERNELS.of(graphs.train), LIBRARY.path) if kernels else (graphs.train, None)
        found.append(run_graph(path, feeds(graphs), threads=2, kernels=library))
    kept, again = found
    assert kept.keys() == again.keys()
    for name, array in kept.items():
        np.testing.assert_array_equal(again[name], array, err_msg=name)


@pytest.mark.rotates
@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=needs_kernels)])
@pytest.mark.parametrize("wanted", ["layers", ["h.*"]], ids=["layers", "scopes"])
def test_dropped_values_come_from_their_masks(wanted: Any, kernels: bool, tmp_path: Path) -> None:
    """Dropout of attention weights and of branches: products read the dropped values in the backward pass."""
    config = Config(layers=2, width=64, heads=4, context=TOKENS, vocabulary=11, dropout=0.3)
    path = tmp_path / "m.onnx"
    onnx.save(build(config), path)
    found = []
    for name, recompute in (("kept", []), ("again", wanted)):
        spec = run_file(path)
        section = spec.model.model_copy(update={"recompute": recompute})
        graphs = build_graphs(spec.model_copy(update={"model": section}), tmp_path / name)
        train, library = (Form.KERNELS.of(graphs.train), LIBRARY.path) if kernels else (graphs.train, None)
        onnxruntime.set_seed(3)
        found.append(run_graph(train, {**feeds(graphs), SEED: np.array([3])}, kernels=library))
    kept, again = found
    assert kept.keys() == again.keys()
    for name, array in kept.items():
        np.testing.assert_array_equal(again[name], array, err_msg=name)
    nodes = onnx.load(tmp_path / "again" / "train.onnx").graph.node
    dropouts = [node for node in nodes if node.op_type == "Dropout"]
    assert len(dropouts) == 1 + 3 * 2, "of the input, and three of each layer"
    masks = {node.output[1] for node in dropouts}
    assert sum(node.op_type == "And" and node.input[0] in masks for node in nodes) == 2 * 2, (
        "what products and norms read"
    )
    graph = onnx.load(tmp_path / "again" / "train.kernels.onnx").graph
    ours, constants = graph.node, constants_of(graph)
    drawn = [constants[node.input[1]] for node in ours if node.op_type == "Dropout" and node.domain == "ortflow"]
    assert Counter(int(number[0]) for number in drawn) == {
        number: 2 + (number > 0 and number % 3 != 0) for number in range(7)
    }, "twice, and once more what the backward pass reads"
    assert not [node for node in ours if node.op_type == "Dropout" and not node.domain]


MEASURE = """
import re, sys
from pathlib import Path
import numpy as np
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.sessions.session import Sessions
library = Path(sys.argv[3]) if sys.argv[3] else None
session = Sessions(CpuDevice(), 1, "error", library).open(Path(sys.argv[1]))
feeds = dict(np.load(sys.argv[2]))
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
def peak(): return int(re.search("VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})
print(peak() - before)
"""


@pytest.mark.rotates
@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=needs_kernels)])
def test_layers_take_less_memory(graphs_of: Callable[..., GraphSet], kernels: bool, tmp_path: Path) -> None:
    """Measures the resident memory of a process that runs one step."""
    sizes = {}
    for name, patterns in (("kept", ()), ("again", ("h.*",))):
        graphs = graphs_of(*patterns)
        np.savez(tmp_path / "feeds.npz", **feeds(graphs, 64))
        path, library = (Form.KERNELS.of(graphs.train), LIBRARY.path) if kernels else (graphs.train, "")
        words = [sys.executable, "-c", MEASURE, str(path), str(tmp_path / "feeds.npz"), str(library)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        sizes[name] = int(done.stdout)
    assert sizes["again"] < 0.6 * sizes["kept"], sizes


def test_pattern_that_matches_nothing(model: Path) -> None:
    with pytest.raises(UserError, match=r"'blocks\.\*'") as caught:
        built(model, "none", "h.0", "blocks.*")
    assert caught.value.where == "model.recompute[1]"
    assert not (model.parent / "none").exists()


@pytest.mark.parametrize(
    ("name", "noted", "expected"),
    [
        ("/model/layers.0/MatMul", "", ["model", "model.layers", "model.layers.0", "model.layers.0.MatMul"]),
        ("node_linear", "['', 'layers.0', 'layers.0.act']", ["layers.0", "layers.0.act", "node_linear"]),
        ("n", "[[[", ["n"]),
        ("n", "[1, 'a']", ["a", "n"]),
        ("", "", []),
    ],
)
def test_scopes(name: str, noted: str, expected: list[str]) -> None:
    node = helper.make_node("Relu", ["x"], ["y"], name=name)
    node.metadata_props.add(key=SCOPES, value=noted)
    assert scopes_of(node) == expected


def test_statistics_and_dropped_values_keep_their_bits(tmp_path: Path) -> None:
    """BatchNormalization's kernel writes into its inputs, and Dropout would draw other numbers a second time."""
    random = np.random.default_rng(1)
    nodes, value_name = [], "x"
    tensors: dict[str, Array] = {"ratio": np.float32(0.4), "training": np.array(True)}
    for layer in range(3):
        name = f"block.{layer}"
        tensors |= {
            f"{name}.weight": (0.3 * random.normal(size=(6, 6, 3, 3))).astype("float32"),
            f"{name}.scale": random.normal(1, 0.1, 6).astype("float32"),
            f"{name}.bias": np.full(6, 0.1, "float32"),
            f"{name}.mean": np.full(6, 0.5, "float32"),
            f"{name}.var": np.full(6, 2, "float32"),
        }
        norm = [f"{name}.{part}" for part in ("conv", "scale", "bias", "mean", "var")]
        nodes += [
            helper.make_node("Conv", [value_name, f"{name}.weight"], [f"{name}.conv"], f"/{name}/conv", pads=[1] * 4),
            helper.make_node("BatchNormalization", norm, [f"{name}.norm"], f"/{name}/norm"),
            helper.make_node("Relu", [f"{name}.norm"], [f"{name}.relu"], f"/{name}/relu"),
            helper.make_node("Dropout", [f"{name}.relu", "ratio", "training"], [f"{name}.drop"], f"/{name}/drop"),
            helper.make_node("Tanh", [f"{name}.drop"], [f"{name}.out"], f"/{name}/tanh"),
        ]
        value_name = f"{name}.out"
    nodes.append(helper.make_node("GlobalAveragePool", [value_name], ["pooled"], "/pool"))
    nodes.append(helper.make_node("Flatten", ["pooled"], ["logits"], "/flatten"))
    path = save_model(
        tmp_path / "m.onnx", nodes, [value("x", ["batch", 6, 9, 9])], [value("logits", ["batch", 6])], tensors
    )
    found = []
    for graphs in (built(path, "kept"), built(path, "again", "block.*")):
        given = {**tensors_of(graphs), "x": np.random.default_rng(2).normal(size=(4, 6, 9, 9)).astype("float32")}
        onnxruntime.set_seed(3)
        found.append(run_graph(graphs.train, {**given, "labels": np.array([0, 5, 2, 2])}))
    kept, again = found
    operators = [node.op_type for node in onnx.load(tmp_path / "again" / "train.onnx").graph.node]
    assert operators.count("Dropout") == 3
    assert operators.count("BatchNormalization") > 3
    assert kept.keys() == again.keys()
    for name, array in kept.items():
        np.testing.assert_array_equal(again[name], array, err_msg=name)


def test_what_is_computed_from_weights_alone_does_not_wait_for_a_gradient(tmp_path: Path) -> None:
    """A copy of each weight would be made otherwise: PyTorch's exporter transposes them in the graph."""
    random = np.random.default_rng(0)
    tensors = {f"h.{layer}.w": (random.normal(size=(8, 8)) / 3).astype("float32") for layer in range(3)}
    nodes, last = [], "x"
    for layer in range(3):
        nodes.append(helper.make_node("Transpose", [f"h.{layer}.w"], [f"t{layer}"], name=f"/turn{layer}", perm=[1, 0]))
        nodes.append(helper.make_node("MatMul", [last, f"t{layer}"], [f"m{layer}"], name=f"/h.{layer}/MatMul"))
        last = f"a{layer}"
        nodes.append(helper.make_node("Tanh", [f"m{layer}"], [last], name=f"/h.{layer}/Tanh"))
        nodes.append(helper.make_node("Sigmoid", [last], [f"s{layer}"], name=f"/h.{layer}/Sigmoid"))
        last = f"s{layer}"
    path = save_model(tmp_path / "m.onnx", nodes, [value("x", ["batch", 8])], [value(last, ["batch", 8])], tensors)
    graph = onnx.load(built(path, "again", "h.*").train).graph
    weights = set(tensors) | {f"t{layer}" for layer in range(3)}
    gates = [node for node in graph.node if node.op_type == "Where"]
    assert gates
    assert not [node.input[1] for node in gates if node.input[1] in weights]
