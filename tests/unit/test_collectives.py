"""Collective nodes of a graph: what they compute, on which thread, in which order, and what a failure of one does."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from kernels import LIBRARY, needs_kernels
from onnx import TensorProto, helper
from parts import Parts
from project import MPICH_SUMS
from real_ranks import on_ranks

from ortflow.workflow.assembly.child import Child
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.collective import Kind, finish, has_collectives, in_order, is_collective, kind_of
from ortflow.workflow.kernels.graph import with_kernels
from ortflow.workflow.onnx_runtime import onnxruntime as ort
from ortflow.workflow.sessions import collectives
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions

pytestmark = needs_kernels
CHANNEL = 7
DOUBLE, FLOAT, INT64 = TensorProto.DOUBLE, TensorProto.FLOAT, TensorProto.INT64
NUMPY: dict[int, Any] = {DOUBLE: np.float64, FLOAT: np.float32, INT64: np.int64}


@pytest.fixture(autouse=True)
def _disconnected() -> Iterator[None]:
    yield
    collectives.connected.clear()


def node(kind: Kind, value: str, output: str, parts: int) -> onnx.NodeProto:
    flags = {"kind": int(kind), "channel": CHANNEL, "parts": parts}
    return helper.make_node("Collective", [value], [output], output, domain="ortflow", **flags)


def model_of(
    nodes: Sequence[onnx.NodeProto], inputs: dict[str, Any], outputs: Sequence[str], element: int = FLOAT
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "collectives",
        [helper.make_tensor_value_info(name, element, dims) for name, dims in inputs.items()],
        [helper.make_tensor_value_info(name, element, None) for name in outputs],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("ortflow", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


def sessions() -> Sessions:
    assert LIBRARY.path is not None
    return Sessions(CpuDevice(), 1, "error", LIBRARY.path)


def connect(parts: Parts) -> None:
    assert LIBRARY.path is not None
    collectives.connect(LIBRARY.path, {CHANNEL: parts})


def run(model: onnx.ModelProto, parts: Parts, given: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Of each part, the outputs."""
    connect(parts)
    opened = [sessions().open(model.SerializeToString()) for _ in given]
    return parts.run(lambda part: opened[part].run(None, given[part]))


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("element", [FLOAT, DOUBLE, INT64])
@pytest.mark.parametrize("columns", [0, 1, 5, 64])
def test_each_kind_gives_what_numpy_gives(parts: int, element: int, columns: int) -> None:
    random, rows = np.random.default_rng(parts), 2 * parts
    values = [random.integers(-9, 9, (rows, columns)).astype(NUMPY[element]) for _ in range(parts)]
    kinds = [Kind.ALL_REDUCE, Kind.ALL_REDUCE_MAX, Kind.ALL_GATHER, Kind.REDUCE_SCATTER]
    nodes = [node(kind, "x", kind.name, parts) for kind in kinds]
    model = model_of(nodes, {"x": [None, columns]}, [kind.name for kind in kinds], element)
    finish(model)
    total = np.sum(values, axis=0)
    found = run(model, Parts(parts), [{"x": value} for value in values])
    for part, (summed, largest, gathered, scattered) in enumerate(found):
        np.testing.assert_array_equal(summed, total)
        np.testing.assert_array_equal(largest, np.max(values, axis=0))
        np.testing.assert_array_equal(gathered, np.concatenate(values))
        np.testing.assert_array_equal(scattered, total[2 * part : 2 * part + 2])
        assert summed.dtype == scattered.dtype == NUMPY[element]


def test_the_callback_runs_on_the_thread_that_runs_the_session() -> None:
    # Two branches that could run at the same time, and more threads for one operator than one.
    nodes = [
        helper.make_node("MatMul", ["x", "x"], ["a"]),
        helper.make_node("MatMul", ["x", "a"], ["b"]),
        node(Kind.ALL_REDUCE, "a", "sum.a", 1),
        node(Kind.ALL_REDUCE, "b", "sum.b", 1),
    ]
    model = model_of(nodes, {"x": [64, 64]}, ["sum.a", "sum.b"])
    finish(model)

    seen: list[int] = []

    def compute(*arguments: Any) -> None:
        seen.append(threading.get_ident())

    parts = Parts(1)
    connect(parts)
    assert LIBRARY.path is not None
    opened = Sessions(CpuDevice(), 2, "error", LIBRARY.path).open(model.SerializeToString())
    value = np.ones((64, 64), np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "compute", compute)
        for _ in range(20):
            parts.run(lambda part: opened.run(None, {"x": value}))
            opened.run(None, {"x": value})
    assert len(seen) == 80
    assert set(seen[2::4]) == set(seen[3::4]) == {threading.get_ident()}
    assert threading.get_ident() not in seen[::4]


def test_what_a_collective_raises_ends_the_run_and_is_raised_again() -> None:
    model = model_of([node(Kind.ALL_REDUCE, "x", "y", 2)], {"x": [3]}, ["y"])
    finish(model)

    class Broken(Parts):
        def all_reduce(self, buffer: Any) -> None:
            raise OrtflowError("the cable is cut")

    broken = Broken(2)
    connect(broken)
    opened = sessions().open(model.SerializeToString())
    with pytest.raises(sessions_errors(), match=r"y.*OrtflowError: the cable is cut"):
        broken.run(lambda part: opened.run(None, {"x": np.ones(3, np.float32)}))

    def bound(part: int) -> None:
        binding = Binding(opened, CpuDevice())
        binding.feed("x", np.ones(3, np.float32))
        binding.fetch(["y"])

    with pytest.raises(OrtflowError, match=r"^the cable is cut$"):
        broken.run(bound)
    collectives.connected.clear()
    with pytest.raises(OrtflowError, match="channel 7"):
        bound(0)
    connect(Parts(3))
    with pytest.raises(OrtflowError, match=r"channel 7.*3 ranks.*2 parts"):
        bound(0)


def sessions_errors() -> tuple[type[Exception], ...]:
    from ortflow.workflow.sessions.failures import SESSION_ERRORS

    return SESSION_ERRORS


def test_rows_that_do_not_divide_are_refused() -> None:
    model = model_of([node(Kind.REDUCE_SCATTER, "x", "y", 2)], {"x": [None]}, ["y"])
    finish(model)
    with pytest.raises(sessions_errors(), match="divisible"):
        run(model, Parts(2), [{"x": np.ones(3, np.float32)}] * 2)


def wild(count: int, seed: int) -> tuple[list[onnx.NodeProto], list[str]]:
    """A graph that leaves the order of its collectives open: many equal ones of equal inputs, chains and branches."""
    random = np.random.default_rng(seed)
    values, nodes, made = ["x"], [], []
    for i in range(count):
        value = values[int(random.integers(len(values)))]
        kind = Kind.ALL_REDUCE_MAX if random.random() < 0.3 else Kind.ALL_REDUCE
        nodes.append(node(kind, value, f"y{i}", 2))
        nodes.append(helper.make_node("Mul", [f"y{i}", "half"], [f"z{i}"]))
        values.append(f"z{i}")
        made.append(f"z{i}")
    return nodes, made


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"])
@pytest.mark.parametrize("order", ["DEFAULT", "PRIORITY_BASED"])
def test_no_collective_is_merged_dropped_or_reordered(seed: int, level: str, order: str) -> None:
    nodes, made = wild(12, seed)
    # Equal nodes of the same input, which a merge of equal nodes would take for one; and one that nothing reads.
    nodes += [node(Kind.ALL_REDUCE, "x", f"same{i}", 2) for i in range(3)]
    nodes.append(helper.make_node("Sum", ["same0", "same2"], ["total"]))
    model = model_of(nodes, {"x": [None]}, [made[-1], "total"])
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.5), "half"))
    finish(model)
    tags = [tag for tag, each in enumerate(filter(is_collective, model.graph.node))]
    for tag, each in zip(tags, filter(is_collective, model.graph.node), strict=True):
        next(flag for flag in each.attribute if flag.name == "channel").i = tag
    assert LIBRARY.path is not None
    parts = Parts(2)

    seen: list[list[int]] = [[], []]
    with pytest.MonkeyPatch.context() as patch:
        collectives.connect(LIBRARY.path, dict.fromkeys(tags, parts))
        original = collectives.connected

        class Watched(dict[int, Any]):
            def get(self, channel: int, default: Any = None) -> Any:
                seen[parts.rank].append(channel)
                return original[channel]

        patch.setattr(collectives, "connected", Watched())

        def one(part: int) -> Any:
            options = ort.SessionOptions()
            options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
            options.execution_order = getattr(ort.ExecutionOrder, order)
            options.register_custom_ops_library(str(LIBRARY.path))
            # The optimiser looks at other values on each part.
            content = model.SerializeToString()
            opened = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
            return opened.run(None, {"x": np.full(3, part + 1, np.float32)})

        parts.run(one)
    assert seen[0] == seen[1] == tags


def test_the_gradient_is_the_undivided_graphs() -> None:
    # Part t multiplies by its own columns of v and rows of w: f, g, and both ways of rows, in a row.
    random, parts = np.random.default_rng(0), 2
    x, v, w = (random.normal(size=dims).astype(np.float32) for dims in ((4, 6), (6, 8), (8, 6)))
    nodes = [
        helper.make_node("Mul", ["u", "x"], ["ux"]),
        node(Kind.COPY, "ux", "f", parts),
        helper.make_node("MatMul", ["f", "v"], ["hidden"]),
        helper.make_node("Tanh", ["hidden"], ["active"]),
        helper.make_node("MatMul", ["active", "w"], ["partial"]),
        node(Kind.REDUCE_SCATTER, "partial", "rows", parts),
        helper.make_node("Tanh", ["rows"], ["mine"]),
        node(Kind.ALL_GATHER, "mine", "g", parts),
        helper.make_node("MatMul", ["g", "v"], ["again"]),
        helper.make_node("MatMul", ["again", "w"], ["more"]),
        node(Kind.ALL_REDUCE, "more", "y", parts),
        helper.make_node("Mul", ["y", "y"], ["square"]),
        helper.make_node("ReduceSum", ["square"], ["loss"], keepdims=0),
    ]
    divided = model_of(nodes, {"u": [4, 6], "x": [4, 6], "v": [6, 4], "w": [4, 6]}, ["loss"])
    whole = model_of(
        [each if not is_collective(each) else helper.make_node("Identity", each.input, each.output) for each in nodes],
        {"u": [4, 6], "x": [4, 6], "v": [6, 8], "w": [8, 6]},
        ["loss"],
    )
    given = {"u": np.ones((4, 6), np.float32), "x": x, "v": v, "w": w}
    expected, names = differentiate(whole, ["u", "v", "w"], "loss")
    model, reached = differentiate(divided, ["u", "v", "w"], "loss")
    assert reached == names == ["u", "v", "w"]
    assert shapes.shape(shapes.value_types(model), "rows") == [2, 6]
    for each in (model, with_kernels(model)):
        finish(each)
        assert [kind_of(n) for n in each.graph.node if is_collective(n)].count(Kind.ALL_REDUCE) == 2
        cut = [{**given, "v": v[:, :4], "w": w[:4]}, {**given, "v": v[:, 4:], "w": w[4:]}]
        loss, u, *weights = expected_of(expected, given)
        for part, (found, of_u, of_v, of_w) in enumerate(run(each, Parts(parts), cut)):
            np.testing.assert_allclose(found, loss, rtol=1e-5)
            np.testing.assert_allclose(of_u, u, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(of_v, weights[0][:, 4 * part :][:, :4], rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(of_w, weights[1][4 * part :][:4], rtol=1e-4, atol=1e-4)


def expected_of(model: onnx.ModelProto, given: dict[str, Any]) -> list[Any]:
    opened = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(opened.run(None, given))


def test_the_process_without_mpi_loads_a_graph_with_collectives() -> None:
    model = model_of([node(Kind.ALL_REDUCE, "x", "y", 2)], {"x": [3]}, ["y"])
    finish(model)
    assert has_collectives(model)
    with Child() as child:
        child.load(model.SerializeToString(), LIBRARY.path)


def test_the_order_is_written_again_after_a_change() -> None:
    model = model_of([node(Kind.ALL_REDUCE, "x", "y", 2), node(Kind.ALL_REDUCE, "y", "z", 2)], {"x": [3]}, ["z"])
    finish(model)
    once = model.SerializeToString(deterministic=True)
    in_order(model.graph)
    assert model.SerializeToString(deterministic=True) == once
    assert list(model.graph.node[1].input) == ["y", model.graph.node[0].output[1]]


RANKS = """
import sys, threading
import numpy as np
from ortflow.workflow.comm.mpi import MpiCommunicator
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.kernels.library import find_library
from ortflow.workflow.sessions import collectives
from ortflow.workflow.sessions.session import Sessions

world = MpiCommunicator()
from mpi4py import MPI
assert MPI.Query_thread() == MPI.THREAD_FUNNELED and MPI.Is_thread_main()
rank, ranks = world.rank, world.world_size
library = find_library().path
ran = []
original = collectives.compute
def watched(*arguments):
    ran.append(MPI.Is_thread_main() and threading.current_thread() is threading.main_thread())
    original(*arguments)
collectives.compute = watched
collectives.connect(library, {7: world.subset(range(ranks))})
session = Sessions(CpuDevice(), 2, "error", library).open(open(sys.argv[1], "rb").read())
for _ in range(5):
    plain = np.arange(10, dtype=np.float32).reshape(2, 5)
    summed, largest, gathered, scattered = session.run(None, {"x": plain + rank})
    assert (summed == 2 * plain + 1).all(), summed
    assert (largest == plain + 1).all()
    assert (gathered == np.concatenate([plain, plain + 1])).all()
    assert (scattered == (2 * plain + 1)[rank : rank + 1]).all()
assert ran == [True] * 20, ran
world.close()
"""


def test_real_ranks_reduce_on_mpis_thread(tmp_path: Path) -> None:
    kinds = [Kind.ALL_REDUCE, Kind.ALL_REDUCE_MAX, Kind.ALL_GATHER, Kind.REDUCE_SCATTER]
    model = model_of([node(kind, "x", kind.name, 2) for kind in kinds], {"x": [2, 5]}, [kind.name for kind in kinds])
    finish(model)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    on_ranks(2, "-c", RANKS, str(path), **MPICH_SUMS)
