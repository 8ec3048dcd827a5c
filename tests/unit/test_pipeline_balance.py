"""Automatic cuts give each stage about as much to do, and are where little crosses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_build_models import save_model, value
from onnx import TensorProto, helper, numpy_helper
from stage_models import opened, transformer

from ortflow.workflow.graph.stages.balance import PER_BYTE_ON_GPUS, balanced_cuts, sizes_of
from ortflow.workflow.graph.stages.costs import Costs
from ortflow.workflow.graph.stages.pieces import cut_graph


@pytest.mark.parametrize("count", [2, 4])
def test_stages_of_equal_layers_have_equal_work(count: int, tmp_path: Path) -> None:
    model = opened(transformer(tmp_path / "m.onnx", layers=8))
    weights = model.source.tensors
    sizes = sizes_of(model.prepared.graph, weights, 4, 16)
    costs = Costs(model.prepared, sizes, 1)
    cuts = balanced_cuts(model.prepared, count, weights, costs)
    work = [
        sum(costs.operations(node) for node in piece.model.graph.node)
        for piece in cut_graph(model.prepared, cuts, weights)
    ]
    assert max(work) < 1.15 * sum(work) / count
    # Nothing but the residual stream leaves a layer; within one, several values would.
    assert all(len(cut) == 1 for cut in cuts)


def bottleneck(path: Path) -> Path:
    """The work of the layers is equal, and the value between the second and third is a hundredth of the others."""
    return chain(path, [200, 200, 2, 200, 200])


def chain(path: Path, widths: Sequence[int]) -> Path:
    """Products one behind the other, of values as wide as this."""
    random = np.random.default_rng(0)
    nodes, tensors, x = [], {}, "x"
    for number, (read, made) in enumerate(itertools.pairwise(widths)):
        tensors[f"{number}.weight"] = random.normal(size=(read, made)).astype("float32")
        nodes.append(helper.make_node("MatMul", [x, f"{number}.weight"], [f"{number}.product"]))
        x = f"{number}.product"
    ends = [value(name, ["batch", width]) for name, width in (("x", widths[0]), (x, widths[-1]))]
    return save_model(path, nodes, ends[:1], ends[1:], tensors)


def test_a_narrow_place_is_preferred(tmp_path: Path) -> None:
    model = opened(bottleneck(tmp_path / "m.onnx"), {"kind": "mse"})
    weights = model.source.tensors
    costs = Costs(model.prepared, sizes_of(model.prepared.graph, weights, 64, 1), 1)
    assert balanced_cuts(model.prepared, 2, weights, costs, per_byte=1000) == [["1.product"]]


def test_gpus_rather_send_little_than_be_equal(tmp_path: Path) -> None:
    """In the middle the work is equal, and the value is four times as wide as those beside it."""
    model = opened(chain(tmp_path / "m.onnx", [64, 64, 256, 64, 64]), {"kind": "mse"})
    weights = model.source.tensors
    costs = Costs(model.prepared, sizes_of(model.prepared.graph, weights, 64, 1), 1)
    assert balanced_cuts(model.prepared, 2, weights, costs) == [["1.product"]]
    (cut,) = balanced_cuts(model.prepared, 2, weights, costs, per_byte=PER_BYTE_ON_GPUS)
    assert cut != ["1.product"]


def test_measured_costs_replace_the_estimate(tmp_path: Path) -> None:
    model = opened(transformer(tmp_path / "m.onnx", layers=4))
    weights = model.source.tensors
    costs = Costs(model.prepared, sizes_of(model.prepared.graph, weights, 4, 16), 1)

    def seconds(node: onnx.NodeProto) -> float:
        return 1.0 if node.output[0] in ("h.0.mlp.gelu", "h.3.mlp.gelu") else 1e-6

    # Any place between the two nodes that take time is as good: the transfer decides.
    (cut,) = balanced_cuts(model.prepared, 2, weights, costs, seconds=seconds, per_byte=1e-12)
    first, second = cut_graph(model.prepared, [cut], weights)
    for piece, name in ((first, "h.0.mlp.gelu"), (second, "h.3.mlp.gelu")):
        assert any(name in node.output for node in piece.model.graph.node)


def test_axes_are_the_rows_and_the_length_of_a_batch(tmp_path: Path) -> None:
    model = opened(transformer(tmp_path / "m.onnx"))
    assert sizes_of(model.prepared.graph, model.source.tensors, 4, 16) == {"batch": 4, "sequence": 16}


NODES = 9


def products(widths: Sequence[int]) -> tuple[onnx.ModelProto, list[str]]:
    """Products in a row and their sum as the loss, and the weights; value `i` has the width `widths[i]`."""
    nodes, weights = [], []
    for number, (read, made) in enumerate(itertools.pairwise(widths)):
        weights.append(numpy_helper.from_array(np.ones((read, made), np.float32), f"w{number}"))
        nodes.append(helper.make_node("MatMul", [f"v{number}", f"w{number}"], [f"v{number + 1}"], name=str(number)))
    last = len(widths) - 1
    nodes.append(helper.make_node("ReduceSum", [f"v{last}"], ["loss"], name=str(last), keepdims=0))
    x = helper.make_tensor_value_info("v0", TensorProto.FLOAT, [4, widths[0]])
    loss = helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])
    graph = helper.make_graph(nodes, "products", [x], [loss], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    return onnx.shape_inference.infer_shapes(model), [weight.name for weight in weights]


def ends(widths: Sequence[int], stages: int, seconds: Sequence[float], per_byte: float = 0) -> list[int]:
    """The nodes behind which `products` is cut, for a time of each node."""
    model, weights = products(widths)
    costs = Costs(model, {}, 1)
    cuts = balanced_cuts(
        model, stages, weights, costs, seconds=lambda node: float(seconds[int(node.name)]), per_byte=per_byte
    )
    return [int(name.removeprefix("v")) for [name] in cuts]


def slowest(seconds: Sequence[float], found: Sequence[int]) -> float:
    """The time of the stage that takes longest."""
    return max(sum(seconds[start:stop]) for start, stop in itertools.pairwise([0, *found, len(seconds)]))


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_no_cuts_are_faster(stages: int, seed: int) -> None:
    seconds = np.random.default_rng(seed).integers(1, 10, NODES).astype(float).tolist()
    every = itertools.combinations(range(1, NODES), stages - 1)
    assert slowest(seconds, ends([8] * NODES, stages, seconds)) == min(slowest(seconds, each) for each in every)


@pytest.mark.parametrize(("widths", "expected"), [([8, 2, 8, 8], [1, 3]), ([8, 8, 2, 8], [2, 3])])
def test_of_equally_fast_cuts_the_fewest_bytes_cross(widths: list[int], expected: list[int]) -> None:
    assert ends(widths, 3, [1, 1, 1, 100]) == expected


def test_bytes_that_cross_count_as_time() -> None:
    widths, seconds = [8, 8, 8, 8, 4096, 8, 8, 8], [1] * 8
    assert ends(widths, 2, seconds) == [4]
    assert ends(widths, 2, seconds, per_byte=1) == [3]
