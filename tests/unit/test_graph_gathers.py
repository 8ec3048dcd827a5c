"""Graphs of GPUs that gather their parameters: the order of their nodes, whose memory is whose, and their sizes."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from graph_build_models import built, tensors_of
from onnx import TensorProto, helper
from operators_on_cpu import needs_compilers, operators_here, session_of
from sharing_ranks import tower

from ortflow.workflow.cuda import operators, shards
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.memory.concrete import concrete
from ortflow.workflow.graph.memory.peak_memory import peak_of, sizes_of
from ortflow.workflow.graph.shards import ahead
from ortflow.workflow.graph.shards import layer_groups as layers
from ortflow.workflow.graph.shards.ahead import BEGIN, READY, SEND, narrowed, with_gathers
from ortflow.workflow.graph.shards.graphs import layers_in
from ortflow.workflow.graph.shards.layer_groups import Layer
from ortflow.workflow.graph.shards.program import Fetch, Program, Send
from ortflow.workflow.graph.types import GraphSet

Array = npt.NDArray[np.float32]
CHANNEL = 3
DEPTH = 6


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "SMALL", 64)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> GraphSet:
    return built(tower(tmp_path_factory.mktemp("tower") / "model.onnx", 16, DEPTH))


def rewritten(graphs: GraphSet, path: Path) -> tuple[onnx.ModelProto, Program]:
    shapes = {entry.name: entry.tensor.shape for entry in graphs.index}
    return with_gathers(onnx.load(path), layers_in(onnx.load(graphs.train).graph, graphs.index), shapes, CHANNEL)


class Shards:
    """Gathers when it is asked whether parameters are ready, and notes which memory nodes used."""

    def __init__(self, program: Program, tensors: dict[str, Array]) -> None:
        self.program, self.tensors = program, tensors
        self.places: dict[int, list[int]] = {}
        self.events: list[tuple[str, int]] = []
        self.sent: dict[str, Array] = {}
        self.held: dict[int, Sequence[int]] = {}
        self.before: dict[int, list[Array]] = {}

    def begin(self, number: int, made: Sequence[int]) -> None:
        self.events.append((BEGIN, number))
        self.places[number] = list(made)
        for place, name in zip(made, self.program[number].tensors, strict=True):
            memory(place, self.tensors[name].size)[:] = np.nan

    def ready(self, number: int) -> None:
        self.events.append((READY, number))
        for place, name in zip(self.places[number], self.program[number].tensors, strict=True):
            memory(place, self.tensors[name].size)[:] = self.tensors[name].reshape(-1)

    def send(self, number: int, given: Sequence[int], held: int) -> None:
        self.events.append((SEND, number))
        if given:
            self.held[number] = given
            names = self.program[number].tensors
            arrays = [memory(at, self.tensors[name].size) for at, name in zip(given, names, strict=True)]
            self.before[number] = [array.copy() for array in arrays]
            self.sent.update(zip(names, self.before[number], strict=True))
        if held >= 0:
            # What is being reduced must still lie there.
            names = self.program[held].tensors
            for at, name, expected in zip(self.held[held], names, self.before[held], strict=True):
                np.testing.assert_array_equal(memory(at, self.tensors[name].size), expected)


def memory(address: int, count: int) -> Array:
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


@needs_compilers
def test_a_training_graph_gives_the_same_in_memory_that_is_not_copied(
    graphs: GraphSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    feeds = {"x": random.normal(size=(4, 5)).astype("float32"), "labels": random.integers(0, 3, 4)}
    tensors = tensors_of(graphs)
    plain = session_of(operators_here(tmp_path, monkeypatch), graphs.train.read_bytes())
    names = [value.name for value in plain.get_outputs()]
    expected = dict(zip(names, plain.run(names, {**feeds, **tensors}), strict=True))
    model, program = rewritten(graphs, graphs.train)
    made = operators_here(tmp_path, monkeypatch)
    copies: list[int] = []
    monkeypatch.setattr(operators.Operators, "copy", lambda self, target, source, size: copies.append(size))
    found = made.shards[CHANNEL] = Shards(program, tensors)
    session = session_of(made, model.SerializeToString())
    token = {"ortflow.token": np.zeros(1, np.float32)}
    (loss,) = session.run(["ortflow.loss_sum"], {**feeds, **token})
    assert copies == [], "ONNX Runtime does not let a value share the memory of another"
    np.testing.assert_allclose(loss, expected["ortflow.loss_sum"], 1e-6)
    assert {f"{name}_grad" for name in found.sent} == {name for name in names if name.endswith("_grad")}
    for name, gradient in found.sent.items():
        np.testing.assert_allclose(gradient, expected[f"{name}_grad"].reshape(-1), 1e-5, 1e-7)
    steps = [number for kind, number in found.events if kind != READY]
    assert steps == [*range(len(program)), ahead.NOTHING]
    begun, ready = 0, 0
    for kind, _ in found.events:
        begun, ready = begun + (kind == BEGIN), ready + (kind == READY)
        # Before a layer is used, the one behind it is on its way, and no other.
        assert begun <= ready + 2
        assert kind != READY or begun in (ready, ready + 1)
    gathered = [number for number, step in enumerate(program) if isinstance(step, Fetch)]
    # The last layer is still there when the backward pass begins, and of the first one it needs nothing.
    assert len(gathered) == 2 * len(layers_in(onnx.load(graphs.train).graph, graphs.index)) - 2


def test_every_reader_of_a_parameter_reads_behind_its_arrival(graphs: GraphSet) -> None:
    """A property of the graph, whatever order ONNX Runtime chooses: data flows from ShardsBegin through ShardsReady."""
    for path in (graphs.train, graphs.eval):
        model, _ = rewritten(graphs, path)
        makers = {name: node for node in model.graph.node for name in node.output}
        inputs = {value.name for value in model.graph.input}
        assert not inputs & {entry.name for entry in graphs.index}
        for node in model.graph.node:
            arriving = [name for name in walk.inputs(node) if "/arriving." in name]
            assert not arriving or node.op_type == READY
            for name in arriving:
                assert makers[name].op_type == BEGIN
        sends = [node for node in model.graph.node if node.op_type == SEND]
        for before, after in itertools.pairwise(sends):
            gradients = [name for name in before.input if name.endswith("_grad")][: attribute(before, "given")]
            assert set(gradients) <= set(after.input), "freed while it is being reduced"
            assert attribute(after, "held") == attribute(before, "number")


def attribute(node: onnx.NodeProto, name: str) -> int:
    (found,) = [int(each.i) for each in node.attribute if each.name == name]
    return found


def test_a_layer_of_many_tensors_is_gathered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "MOST", 2)
    names = [f"p{number}" for number in range(5)]
    nodes = [helper.make_node("Sum", ["x", *names], ["ortflow.loss_sum"])]
    nodes += [helper.make_node("Mul", ["x", name], [f"{name}_grad"]) for name in names]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [value(name, TensorProto.FLOAT, [8]) for name in ("x", *names)],
        [value(name, TensorProto.FLOAT, [8]) for name in ("ortflow.loss_sum", *(f"{name}_grad" for name in names))],
    )  # fmt: skip
    model, program = with_gathers(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]),
        [Layer("all", tuple(names))], dict.fromkeys(names, (8,)), CHANNEL,
    )  # fmt: skip
    assert [len(step.tensors) for step in program if isinstance(step, Fetch)] == [2, 2, 1]
    assert [len(step.tensors) for step in program if isinstance(step, Send)] == [2, 2, 1]
    assert sum(node.op_type == READY for node in model.graph.node) == 3


def test_parameters_that_are_read_rounded_alone_are_narrow() -> None:
    half, single = TensorProto.BFLOAT16, TensorProto.FLOAT
    cast = helper.make_node
    nodes = [
        cast("Cast", ["once"], ["once.half"], to=half),
        cast("Cast", ["both"], ["both.half"], to=half),
        cast("Cast", ["out"], ["y"], to=half),
        helper.make_node("Add", ["once.half", "both.half"], ["z"]),
        helper.make_node("Neg", ["both"], ["n"]),
    ]
    value = helper.make_tensor_value_info
    names = ("once", "both", "out")
    inputs = [value(name, single, [8]) for name in names]
    graph = helper.make_graph(
        nodes, "g", inputs, [value("y", half, [8]), value("z", half, [8]), value("n", single, [8])]
    )
    kinds = narrowed(graph, dict.fromkeys(names, (8,)))
    assert kinds == {"once": half}
    assert [list(node.input) for node in graph.node if node.op_type == "Add"] == [["once", "both.half"]]
    assert [node.output[0] for node in graph.node if node.op_type == "Cast"] == ["both.half", "y"]


def test_the_forecast_counts_two_layers_and_their_gradients(graphs: GraphSet) -> None:
    shapes = {"x": (4, 5), "labels": (4,)}
    model, _ = rewritten(graphs, graphs.train)
    types = concrete(model, shapes)
    bound = {value.name for value in (*model.graph.input, *model.graph.output)}
    peak = peak_of(model.graph, sizes_of(types), bound)
    assert not [name for name in peak.unknown if "h." in name or "token" in name]
    weight = 4 * 16 * 16
    alive = [name for name, size in peak.values if size == weight]
    assert not any("/fetched." in name for name in alive), "counted twice"
    assert 2 <= len(alive) <= 4, alive


@needs_compilers
def test_a_node_of_a_graph_that_nobody_serves_is_an_error(
    graphs: GraphSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = rewritten(graphs, graphs.eval)
    session = session_of(operators_here(tmp_path, monkeypatch), model.SerializeToString())
    feeds = {
        "x": np.ones((4, 5), np.float32),
        "labels": np.zeros(4, np.int64),
        "ortflow.token": np.zeros(1, np.float32),
    }
    with pytest.raises(Exception, match=r"channel 3 .* is not connected"):
        session.run(["ortflow.loss_sum"], feeds)


def test_shapes_are_read_from_one_list() -> None:
    assert list(shards.shapes_of([2, 3, 4, 0, 1, 7])) == [(3, 4), (), (7,)]
