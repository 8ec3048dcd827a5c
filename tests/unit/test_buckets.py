"""Buckets of the gradient: each is summed when all of it is there, every element once, in an order all ranks share."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from fake_cuda import FakeCuda, fake_device
from graph_build_models import built, save_model, value
from operators_on_cpu import needs_compilers, operators_here, session_of
from queued import network
from safetensors.numpy import load_file

from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.fusion.buckets import MOST_INPUTS, OPERATOR, TOKEN, buckets_of, with_buckets, with_small_end
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.layout import FlatIndex, Tensor
from ortflow.workflow.trainer.overlap import Overlap

INDEX = FlatIndex.place(
    [
        *(Tensor(f"w{place}", (64, 2), "decay") for place in range(7)),
        *(Tensor(f"b{place}", (3,), "no_decay") for place in range(3)),
        Tensor("mean", (3,), "state"),
    ]
)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> GraphSet:
    return built(network(tmp_path_factory.mktemp("model") / "model.onnx"))


@pytest.mark.parametrize("least", [1, 256, 300, 10**9])
def test_buckets_cover_the_gradient_and_end_with_their_group(least: int) -> None:
    buckets = buckets_of(INDEX, least)
    assert [bucket.start for bucket in buckets] == [0, *(bucket.stop for bucket in buckets[:-1])]
    assert buckets[-1].stop == INDEX.trained
    assert [name for bucket in buckets for name in bucket.names] == [entry.name for entry in INDEX][:-1]
    for bucket in buckets:
        assert len({INDEX[name].tensor.group for name in bucket.names}) == 1
    ends = {INDEX.span("decay")[1], INDEX.trained}
    assert all(bucket.stop - bucket.start >= least for bucket in buckets if bucket.stop not in ends)
    assert len(buckets) == {1: 10, 256: 5, 300: 4, 10**9: 2}[least]


@pytest.mark.parametrize("place", range(4))
def test_the_last_bucket_is_cut_into_smaller_ones(place: int) -> None:
    buckets = buckets_of(INDEX, 300)
    last = buckets[place]
    cut = with_small_end(buckets, last, INDEX, 128)
    assert [bucket.start for bucket in cut] == [0, *(bucket.stop for bucket in cut[:-1])]
    assert cut[-1].stop == INDEX.trained
    assert [bucket for bucket in cut if bucket in buckets and bucket != last] == [b for b in buckets if b != last]
    pieces = [bucket for bucket in cut if last.start <= bucket.start < last.stop]
    assert tuple(name for piece in pieces for name in piece.names) == last.names
    assert len(pieces) == [3, 3, 1, 2][place]


def test_a_bucket_of_more_tensors_than_a_node_takes() -> None:
    count = 2 * MOST_INPUTS + 5
    index = FlatIndex.place(Tensor(f"w{place}", (2,), "decay") for place in range(count))
    nodes = [onnx.helper.make_node("Neg", ["x"], [f"w{place}_grad"]) for place in range(count)]
    values = [onnx.helper.make_tensor_value_info(f"w{place}_grad", 1, [2]) for place in range(count)]
    graph = onnx.helper.make_graph(nodes, "g", [onnx.helper.make_tensor_value_info("x", 1, [2])], values)
    made, order = with_buckets(onnx.helper.make_model(graph), buckets_of(index, 10**9))
    assert len(order) == 1
    marks = [node for node in made.graph.node if node.op_type == OPERATOR]
    assert [node.attribute[0].i for node in marks] == [-1, -1, 0]
    assert {name for node in marks for name in node.input if name.endswith("_grad")} == {value.name for value in values}


@needs_compilers
@pytest.mark.parametrize("least", [1, 100])
def test_a_bucket_is_ready_when_all_of_its_gradients_are_computed(
    graphs: GraphSet, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, random = onnx.load(graphs.train), np.random.default_rng(0)
    feeds: dict[str, Any] = {"x": random.normal(size=(8, 5)).astype("float32"), "labels": random.integers(0, 3, 8)}
    feeds |= load_file(graphs.initial)
    feeds |= {value.name: np.array([8]) for value in train.graph.input if value.name not in feeds}
    operators = operators_here(tmp_path, monkeypatch)
    model, order = with_buckets(train, buckets_of(graphs.index, least))
    assert len(order) == (5 if least == 1 else 3), order
    names = [value.name for value in train.graph.output]
    plain = session_of(operators, train.SerializeToString())
    wanted = {value.name for value in plain.get_inputs()}
    feeds = {name: array for name, array in feeds.items() if name in wanted}
    expected = dict(zip(names, plain.run(names, feeds), strict=True))
    seen: list[int] = []

    def ready(number: int, pointers: Sequence[int]) -> None:
        seen.append(number)
        gradients = [f"{name}_grad" for name in order[number].names if f"{name}_grad" in expected]
        assert len(pointers) == len(gradients) > 0
        for name, pointer in zip(gradients, pointers, strict=True):
            found = np.ctypeslib.as_array((ctypes.c_float * expected[name].size).from_address(pointer))
            np.testing.assert_array_equal(found, expected[name].ravel(), err_msg=name)

    operators.on_bucket = ready
    session = session_of(operators, model.SerializeToString())
    found = dict(zip(names, session.run([*names, TOKEN], feeds), strict=False))
    assert seen == list(range(len(order)))
    for name in names:
        np.testing.assert_array_equal(found[name], expected[name])


@needs_compilers
def test_no_node_reads_a_gradient_that_is_summed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of w enters those of a and b: it must be this rank's own there, not the sum in its place."""
    random = np.random.default_rng(0)
    shapes = {"w": (5, 3), "a": (5, 2), "b": (2, 3), "c": (5, 3)}
    tensors = {name: random.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    nodes = [
        onnx.helper.make_node("MatMul", ["a", "b"], ["low"]),
        onnx.helper.make_node("Sum", ["w", "low", "c"], ["weight"]),
        onnx.helper.make_node("MatMul", ["x", "weight"], ["logits"]),
    ]
    inputs, outputs = [value("x", ["batch", 5])], [value("logits", ["batch", 3])]
    graphs = built(save_model(tmp_path / "model.onnx", nodes, inputs, outputs, tensors))
    train = onnx.load(graphs.train)
    feeds: dict[str, Any] = {"x": random.normal(size=(8, 5)).astype("float32"), "labels": random.integers(0, 3, 8)}
    feeds |= tensors
    operators = operators_here(tmp_path, monkeypatch)
    gradients = [f"{name}_grad" for name in tensors]
    plain = session_of(operators, train.SerializeToString())
    feeds = {value.name: feeds.get(value.name, np.array([8])) for value in plain.get_inputs()}
    expected = dict(zip(gradients, plain.run(gradients, feeds), strict=True))
    model, order = with_buckets(train, buckets_of(graphs.index, 1))
    assert len(order) == len(tensors)

    def double(number: int, pointers: Sequence[int]) -> None:
        for name, pointer in zip(order[number].names, pointers, strict=True):
            np.ctypeslib.as_array((ctypes.c_float * tensors[name].size).from_address(pointer))[:] *= 2

    operators.on_bucket = double
    session = session_of(operators, model.SerializeToString())
    for name, found in zip(gradients, session.run([*gradients, TOKEN], feeds), strict=False):
        np.testing.assert_array_equal(found, 2 * expected[name], err_msg=name)


class Sums:
    """A communicator that notes what is summed, and where the stream waits for it."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def begin_all_reduce(self, buffer: Any) -> None:
        self.done.append((buffer.pointer, buffer.count))

    def sum_parts(self, buffers: Sequence[Any], gathered: Sequence[Any]) -> None:
        assert not gathered
        self.done += [(buffer.pointer, buffer.count) for buffer in buffers]

    def join(self) -> None:
        self.done.append("join")


@pytest.mark.parametrize("order", [[3, 2, 1, 0, 4], [0, 4, 3, 2, 1]])
def test_every_element_is_summed_once_in_the_order_of_ranks_without_samples(order: list[int]) -> None:
    device, sums = fake_device(FakeCuda()), Sums()
    sync = device.allocate(INDEX.trained + 100, np.float32)
    found = buckets_of(INDEX, 256)
    buckets = [found[place] for place in order]
    overlap = Overlap(sums, sums, sync, INDEX.trained, buckets)  # type: ignore[arg-type]
    at = [sync.pointer + 4 * bucket.start for bucket in buckets]
    # A check of the gradient, on one rank alone, sums nothing.
    for number in range(len(buckets)):
        overlap.ready(number, [at[number]])
    assert not sums.done
    overlap.begin()
    for number in range(len(buckets)):
        overlap.ready(-1, [])
        overlap.ready(number, [at[number]])
    overlap.finish()
    mine, sums.done = sums.done, []
    overlap.finish()
    assert mine == sums.done
    assert mine[-1] == "join"
    pieces = sorted(((start - sync.pointer) // 4, count) for start, count in mine[:-1])
    assert [start for start, _ in pieces] == [0, *(start + count for start, count in pieces[:-1])]
    assert sum(pieces[-1]) == sync.count


def test_a_gradient_outside_of_its_bucket_is_refused() -> None:
    device, sums = fake_device(FakeCuda()), Sums()
    sync = device.allocate(INDEX.trained + 100, np.float32)
    buckets = buckets_of(INDEX, 256)
    overlap = Overlap(sums, sums, sync, INDEX.trained, buckets)  # type: ignore[arg-type]
    overlap.begin()
    with pytest.raises(OrtflowError, match="not where or when"):
        overlap.ready(0, [sync.pointer + 4 * buckets[1].start])
    with pytest.raises(OrtflowError, match="not where or when"):
        overlap.ready(1, [sync.pointer + 4 * buckets[1].start])
    assert not sums.done
