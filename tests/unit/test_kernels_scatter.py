"""GatherElements and ScatterAdd with broadcast indices: random cases, refusals, and where graphs use them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from kernels import LEVELS, Array, compute, library_of, needs_kernels, normal
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.kernels.graph import with_kernels
from ortflow.workflow.onnx_runtime import native
from ortflow.workflow.onnx_runtime import onnxruntime as ort

pytestmark = needs_kernels
SIZES = (1, 1, 2, 3, 5, 16, 17, 40, 150)


@pytest.fixture(params=LEVELS)
def library(request: pytest.FixtureRequest) -> Path:
    return library_of(request.param)


def case(seed: int) -> tuple[int, Array, Array, tuple[int, ...]]:
    """Axis, data, indices with axes of one element, and the dims that they are broadcast to."""
    random = np.random.default_rng(seed)
    rank = int(random.integers(1, 5))
    axis = int(random.integers(rank))
    dims = [int(random.choice(SIZES[: 7 if rank > 2 else 9])) for _ in range(rank)]
    items = [size if random.random() < 0.8 else int(random.integers(0, size + 1)) for size in dims]
    items[axis] = int(random.choice((0, 1, 3, 20, 60)))
    given = [1 if random.random() < 0.4 else size for size in items]
    indices = random.integers(-dims[axis], dims[axis], given)
    return axis, np.asarray(random.standard_normal(dims), np.float32), indices, tuple(items)


def added(axis: int, data: Array, indices: Array, updates: Array) -> Array:
    """One after the other, in fp32."""
    result, places = data.copy(), list(np.indices(updates.shape))
    places[axis] = np.broadcast_to(indices, updates.shape)
    # In the order of the updates along the axis, which is that of all elements.
    np.add.at(result, tuple(places), updates)
    return result


def test_gathered_elements(library: Path) -> None:
    for seed in range(200):
        axis, data, indices, dims = case(seed)
        shape = np.array(dims, np.int64)
        (found,) = compute("GatherElements", shape, indices, data, library=library, axis=axis)
        part = tuple(slice(None) if i == axis else slice(size) for i, size in enumerate(dims))
        places = np.broadcast_to(indices, dims) % data.shape[axis]
        assert np.array_equal(found, np.take_along_axis(data[part], places, axis)), seed


def test_added_elements_are_summed_in_the_order_of_the_updates(library: Path) -> None:
    for seed in range(200):
        axis, data, indices, dims = case(seed)
        updates = normal(seed, *dims)
        (found,) = compute("ScatterAdd", indices, updates, data, library=library, axis=axis)
        assert np.array_equal(found, added(axis, data, indices, updates)), seed


def test_sums_do_not_depend_on_the_threads() -> None:
    indices, updates = np.random.default_rng(0).integers(0, 50, (3, 2000, 1)), normal(1, 3, 2000, 300)
    data = normal(2, 3, 50, 300)
    one, two = (compute("ScatterAdd", indices, updates, data, threads=threads, axis=1)[0] for threads in (1, 2))
    assert np.array_equal(one, two)


@pytest.mark.parametrize("outside", [4, -5])
def test_indices_outside_are_refused(outside: int) -> None:
    indices = np.array([[0], [outside]])
    with pytest.raises(native.InvalidArgument, match="an index lies outside of the data"):
        compute("ScatterAdd", indices, normal(1, 2, 3), normal(2, 4, 3), axis=0)
    with pytest.raises(native.InvalidArgument, match="an index lies outside of the data"):
        compute("GatherElements", np.array([2, 3]), indices, normal(2, 4, 3), axis=0)


@pytest.mark.parametrize("dims", [(3, 3), (2, 4), (2, 3, 1)])
def test_tensors_that_do_not_fit_are_refused(dims: tuple[int, ...]) -> None:
    indices = np.zeros((2, 1), np.int64)
    with pytest.raises(native.InvalidArgument, match="do not fit each other"):
        compute("ScatterAdd", indices, normal(1, *dims), normal(2, 4, 3), axis=0)
    with pytest.raises(native.InvalidArgument, match="do not fit each other"):
        compute("GatherElements", np.array(dims), indices, normal(2, 4, 3), axis=0)


def rows_read_and_added(reduction: str, axis: int) -> onnx.ModelProto:
    """Rows of x are read at `source` and combined at `target`, as exporters write gather and scatter_add."""
    to = numpy_helper.from_array(np.array([2, 1, 5], np.int64), "to")
    nodes = [
        helper.make_node("Expand", ["source", "to"], ["from_place"]),
        helper.make_node("Expand", ["target", "to"], ["to_place"]),
        helper.make_node("GatherElements", ["x", "from_place"], ["read"], axis=axis),
        helper.make_node("ScatterElements", ["start", "to_place", "read"], ["y"], axis=axis, reduction=reduction),
    ]
    of_data = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4, 5]) for name in ("x", "start")]
    places = [helper.make_tensor_value_info(name, TensorProto.INT64, [2, 9, 1]) for name in ("source", "target")]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4, 5])
    graph = helper.make_graph(nodes, "rows", [*of_data, *places], [y], [to])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return onnx.shape_inference.infer_shapes(compose(model))


@pytest.mark.parametrize("axis", [1, -2])
def test_graphs_do_not_write_broadcast_indices_out(axis: int, library: Path) -> None:
    plain = rows_read_and_added("add", axis)
    own = with_kernels(plain)
    assert sorted(node.op_type for node in own.graph.node) == ["GatherElements", "ScatterAdd"]
    assert {node.domain for node in own.graph.node} == {"ortflow"}
    random = np.random.default_rng(3)
    feeds = {name: random.standard_normal((2, 4, 5), np.float32) for name in ("x", "start")}
    feeds |= {name: random.integers(-4, 4, (2, 9, 1)) for name in ("source", "target")}
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(library))
    results = [
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, feeds)[0]
        for model in (plain, own)
    ]
    assert np.array_equal(*results)


def test_other_reductions_stay_onnx_runtimes() -> None:
    own = with_kernels(rows_read_and_added("max", 1))
    assert sorted(node.op_type for node in own.graph.node) == ["Expand", "GatherElements", "ScatterElements"]
