"""Graphs that fetch their parameters: which make up a layer, when a layer is fetched, and that results are the same."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from graph_build_models import built, save_model, value
from onnx import TensorProto, helper
from sharing_ranks import perceptron

from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.memory.concrete import concrete
from ortflow.workflow.graph.memory.peak_memory import peak_of, sizes_of
from ortflow.workflow.graph.shards import layer_groups as layers
from ortflow.workflow.graph.shards.fetch_nodes import OPERATOR, TOKEN, with_exchange
from ortflow.workflow.graph.shards.graphs import layers_in
from ortflow.workflow.graph.shards.layer_groups import Layer, block_of, layers_of
from ortflow.workflow.graph.shards.program import Fetch, Program, Send
from ortflow.workflow.kernels.library import find_library
from ortflow.workflow.onnx_runtime import onnxruntime as ort
from ortflow.workflow.sessions.shards import listen
from ortflow.workflow.trainer.shard_exchange import memory_at

Array = npt.NDArray[Any]
CHANNEL = 7


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "SMALL", 50)


def reader(name: str, *inputs: str) -> onnx.NodeProto:
    return helper.make_node("MatMul", ["x", *inputs], [f"{name}/out"], name)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("transformer.h.11.attn.c_attn.weight", "transformer.h.11"),
        ("encoder.layer.3.output.dense.bias", "encoder.layer.3"),
        ("layer2.1.conv1.weight", "layer2.1"),
        ("encoder.block.0.layer.1.DenseReluDense.wi.weight", "encoder.block.0"),
        ("lm_head.weight", "lm_head"),
        ("0.weight", "0"),
        ("scale", "scale"),
    ],
)
def test_the_block_of_a_parameter_is_its_path_up_to_a_number(name: str, path: str) -> None:
    assert block_of(name) == path


def test_a_parameter_without_a_path_belongs_to_the_block_of_its_reader() -> None:
    assert block_of("onnx::MatMul_301", [reader("/model/layers.4/mlp/MatMul")]) == "model.layers.4"


def test_blocks_are_layers_in_the_order_of_their_first_use() -> None:
    counts = {"h.1.w": 100, "h.1.b": 10, "h.0.w": 100, "h.0.b": 10, "head.w": 100}
    nodes = [reader("a", "h.0.b", "h.0.w"), reader("b", "h.1.w"), reader("c", "h.1.b"), reader("d", "head.w")]
    found = layers_of(nodes, counts)
    assert [layer.tensors for layer in found] == [("h.0.b", "h.0.w"), ("h.1.w", "h.1.b"), ("head.w",)]
    assert [layer.name for layer in found] == ["h.0", "h.1", "head"]


def test_small_layers_join_the_next_one_and_the_last_the_one_before() -> None:
    counts = {"norm.w": 10, "h.0.w": 100, "h.1.w": 100, "last.w": 10}
    found = layers_of([reader(name, name) for name in counts], counts)
    assert [layer.tensors for layer in found] == [("norm.w", "h.0.w"), ("h.1.w", "last.w")]


def test_a_parameter_that_several_blocks_read_is_a_layer_of_its_own() -> None:
    counts = {"table.w": 100, "norm.w": 10, "h.0.w": 100}
    nodes = [
        reader("/table", "table.w"),
        reader("/norm", "norm.w"),
        reader("/h.0/a", "h.0.w"),
        reader("/h.1/a", "table.w"),
    ]
    assert [layer.tensors for layer in layers_of(nodes, counts)] == [("table.w",), ("norm.w", "h.0.w")]


def test_unread_parameters_belong_to_a_layer() -> None:
    found = layers_of([reader("a", "h.0.w")], {"h.0.w": 100, "unread": 100})
    assert [layer.tensors for layer in found] == [("h.0.w",), ("unread",)]


class Rank:
    """Answers fetches from whole tensors and keeps what is sent, as a single rank with all shards would."""

    def __init__(self, tensors: Mapping[str, Array], program: Program) -> None:
        self.tensors, self.program = tensors, program
        self.order: list[int] = []
        self.gradients: dict[str, Array] = {}
        library = find_library().path
        assert library is not None, "the test needs a compiler"
        self.library = library
        listen(library, CHANNEL, self.act)

    def act(self, number: int, given: Sequence[int], made: Sequence[int]) -> None:
        self.order.append(number)
        step = self.program[number]
        for place, name in enumerate(step.tensors):
            tensor = self.tensors[name]
            if isinstance(step, Fetch):
                memory_at(made[place], tensor.size)[:] = tensor.reshape(-1)
            else:
                self.gradients[name] = memory_at(given[place], tensor.size).copy().reshape(tensor.shape)

    def run(self, model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        options.register_custom_ops_library(str(self.library))
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        outputs = [each.name for each in session.get_outputs()]
        feeds = {**feeds, TOKEN: np.zeros(1, np.float32)}
        given = {each.name: feeds[each.name] for each in session.get_inputs()}
        return dict(zip(outputs, session.run(outputs, given), strict=True))


def steps(program: Program) -> list[tuple[str, tuple[str, ...]]]:
    return [(type(step).__name__, step.tensors) for step in program]


def test_a_training_graph_gives_the_same_with_parameters_that_are_fetched(tmp_path: Path) -> None:
    graphs = built(perceptron(tmp_path / "model.onnx"))
    from safetensors.numpy import load_file

    tensors = load_file(graphs.initial)
    shapes = {name: array.shape for name, array in tensors.items()}
    found = layers_in(onnx.load(graphs.train).graph, graphs.index)
    assert [layer.tensors for layer in found] == [("a", "first"), ("b", "second"), ("third",)]
    random = np.random.default_rng(0)
    batch = {"x": random.normal(size=(8, 5)).astype("float32"), "labels": random.integers(0, 3, 8)}
    for path in (graphs.train, Form.KERNELS.of(graphs.train)):
        plain = onnx.load(path)
        model, program = with_exchange(plain, found, shapes, CHANNEL)
        rank = Rank(tensors, program)
        expected, got = rank.run(plain, {**batch, **tensors}), rank.run(model, batch)
        assert rank.order == list(range(len(program)))
        # The forward pass, then the backward pass, in which biases and the first weight are not read.
        fetches, sends = ([step.tensors for step in program if isinstance(step, kind)] for kind in (Fetch, Send))
        assert fetches == [("a", "first"), ("b", "second"), ("third",), ("second",)]
        assert sends == [("third",), ("b", "second"), ("a", "first")]
        assert program.index(Send(("third",))) < program.index(Send(("b", "second"))), "while the pass goes on"
        for name, array in expected.items():
            there = rank.gradients[name.removesuffix("_grad")] if name.endswith("_grad") else got[name]
            np.testing.assert_array_equal(there, array)
        assert not {value.name for value in model.graph.input} & tensors.keys()
        assert not [name for node in model.graph.node for name in walk.inputs(node) if name in tensors]


def test_a_later_layer_is_not_fetched_before_what_is_behind_the_one_before(tmp_path: Path) -> None:
    """ONNX Runtime runs a node as early as it can; a fetch reads what its first reader reads."""
    graphs = built(perceptron(tmp_path / "model.onnx"))
    found = layers_in(onnx.load(graphs.train).graph, graphs.index)
    shapes = {entry.name: entry.tensor.shape for entry in graphs.index}
    model, _program = with_exchange(onnx.load(graphs.train), found, shapes, CHANNEL)
    makers = walk.producers(model.graph)
    fetches = [node for node in model.graph.node if node.op_type == OPERATOR and len(node.output) > 1]
    for before, fetch in itertools.pairwise(fetches):
        waiting, seen = list(fetch.input[2:]), set[str]()
        assert waiting, fetch.name
        while waiting:
            node = makers.get(waiting.pop())
            if node is not None and node.name not in seen:
                seen.add(node.name)
                waiting += node.input
        assert before.name in seen, fetch.name


def test_less_memory_is_held_at_a_time(tmp_path: Path) -> None:
    """Eight layers of 64 x 64: with all parameters and gradients as values of the graph, and as they are fetched."""
    random, width, depth = np.random.default_rng(0), 64, 8
    tensors = {f"h.{i}.w": (random.normal(size=(width, width)) / 8).astype("float32") for i in range(depth)}
    nodes, x = [], "x"
    for i in range(depth):
        nodes += [
            helper.make_node("MatMul", [x, f"h.{i}.w"], [f"m{i}"], f"/h.{i}/MatMul"),
            helper.make_node("Tanh", [f"m{i}"], [f"t{i}" if i + 1 < depth else "y"], f"/h.{i}/Tanh"),
        ]
        x = f"t{i}"
    path = save_model(
        tmp_path / "model.onnx", nodes, [value("x", ["batch", width])], [value("y", ["batch", width])], tensors
    )
    graphs = built(path)
    shapes = {name: array.shape for name, array in tensors.items()}
    found = layers_in(onnx.load(graphs.train).graph, graphs.index)
    assert len(found) == depth
    model, program = with_exchange(onnx.load(graphs.train), found, shapes, CHANNEL)
    types = concrete(model, {"x": (2, width), "labels": (2,)})
    bound = {value.name for value in (*model.graph.input, *model.graph.output)}
    size = 4 * width * width
    assert size <= peak_of(model.graph, sizes_of(types), bound).size < size * 3
    # The last layer is the first of the backward pass, and is there still.
    assert [len(step.tensors) for step in program if isinstance(step, Fetch)] == [1] * (2 * depth - 1 - 1)


def graph_of(nodes: Sequence[onnx.NodeProto], outputs: Sequence[str], **initializers: Array) -> onnx.ModelProto:
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in initializers.items()]
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [3, 3]) for name in ("x", "p.0.w", "p.1.w", "p.2.w")
    ]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph(nodes, "graph", inputs, made, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


SHAPES = {f"p.{i}.w": (3, 3) for i in range(3)}
LAYERS = [Layer(f"p.{i}", (f"p.{i}.w",)) for i in range(3)]


def rewritten(model: onnx.ModelProto) -> tuple[list[tuple[str, tuple[str, ...]]], dict[str, Array], dict[str, Array]]:
    """The program, and the outputs before and after."""
    changed, program = with_exchange(model, LAYERS, SHAPES, CHANNEL)
    random = np.random.default_rng(1)
    tensors = {name: random.normal(size=shape).astype("float32") for name, shape in SHAPES.items()}
    x = random.normal(size=(3, 3)).astype("float32")
    rank = Rank(tensors, program)
    return steps(program), rank.run(model, {"x": x, **tensors}), rank.run(changed, {"x": x})


def chain(*operators: tuple[str, Sequence[str], str]) -> list[onnx.NodeProto]:
    return [helper.make_node(operator, given, [made], made) for operator, given, made in operators]


def test_a_tied_parameter_is_fetched_again_where_others_were_between() -> None:
    model = graph_of(
        chain(
            ("MatMul", ["x", "p.0.w"], "a"), ("MatMul", ["a", "p.1.w"], "b"), ("MatMul", ["b", "p.2.w"], "c"),
            ("MatMul", ["c", "p.0.w"], "y"),
        ),
        ["y"],
    )  # fmt: skip
    program, before, after = rewritten(model)
    assert [names for _, names in program] == [("p.0.w",), ("p.1.w",), ("p.2.w",), ("p.0.w",)]
    np.testing.assert_array_equal(after["y"], before["y"])


def test_what_is_computed_from_a_parameter_alone_is_computed_where_it_is_read() -> None:
    """Kept, a transposed weight would be the weight in another form."""
    model = graph_of(
        chain(
            ("Transpose", ["p.0.w"], "t"), ("MatMul", ["x", "t"], "a"), ("MatMul", ["a", "p.1.w"], "b"),
            ("MatMul", ["b", "p.2.w"], "c"), ("MatMul", ["c", "t"], "y"),
        ),
        ["y"],
    )  # fmt: skip
    program, before, after = rewritten(model)
    assert [names for _, names in program] == [("p.0.w",), ("p.1.w",), ("p.2.w",), ("p.0.w",)]
    np.testing.assert_array_equal(after["y"], before["y"])


def test_a_parameter_is_not_fetched_for_its_shape() -> None:
    model = graph_of(
        [
            helper.make_node("Shape", ["p.0.w"], ["s"], "s", start=1),
            helper.make_node("Expand", ["x", "both"], ["e"], "e"),
            helper.make_node("Cast", ["s"], ["f"], "f", to=1),
            helper.make_node("Add", ["e", "f"], ["y"], "y"),
        ],
        ["y"],
        both=np.array([3, 3]),
    )
    program, before, after = rewritten(model)
    assert program == []
    np.testing.assert_array_equal(after["y"], before["y"])


def test_an_output_of_parameters_alone_is_computed_once() -> None:
    model = graph_of(chain(("Mul", ["p.0.w", "p.0.w"], "y"), ("MatMul", ["x", "p.1.w"], "z")), ["y", "z"])
    program, before, after = rewritten(model)
    assert [names for _, names in program] == [("p.0.w",), ("p.1.w",)]
    for name in ("y", "z"):
        np.testing.assert_array_equal(after[name], before[name])


def test_subgraphs_read_fetched_parameters() -> None:
    then = helper.make_graph(
        [helper.make_node("MatMul", ["x", "p.0.w"], ["inner"], "inner")], "then", [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)],
    )  # fmt: skip
    otherwise = helper.make_graph(
        [helper.make_node("Identity", ["p.1.w"], ["other"], "other")], "else", [],
        [helper.make_tensor_value_info("other", TensorProto.FLOAT, None)],
    )  # fmt: skip
    node = helper.make_node("If", ["yes"], ["y"], "y", then_branch=then, else_branch=otherwise)
    program, before, after = rewritten(graph_of([node], ["y"], yes=np.array(True)))
    assert sorted(name for _, names in program for name in names) == ["p.0.w", "p.1.w"]
    np.testing.assert_array_equal(after["y"], before["y"])


def test_a_graph_without_gradients_sends_nothing(tmp_path: Path) -> None:
    graphs = built(perceptron(tmp_path / "model.onnx"))
    found = layers_in(onnx.load(graphs.train).graph, graphs.index)
    shapes = {entry.name: entry.tensor.shape for entry in graphs.index}
    program = with_exchange(onnx.load(graphs.eval), found, shapes, CHANNEL)[1]
    assert not [step for step in program if isinstance(step, Send)]
    assert [step.tensors for step in program] == [("a", "first"), ("b", "second"), ("third",)]
