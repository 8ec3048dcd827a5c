"""Images channels last in half precision compute the same; here our operators run as ONNX functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cuda_composed import composed
from differentiated_models import differentiated
from graph_build_models import Array, run_graph, save_model, tensors_of, value
from kernels import off
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.cuda.operators import Tensor
from ortflow.workflow.cuda.place import completed, place
from ortflow.workflow.cuda.rectified import sum_before_relu
from ortflow.workflow.cuda.table import HALF, HALF_ONLY
from ortflow.workflow.cuda.windows import Windows, shape_of
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.fusion.groups import fuse
from ortflow.workflow.fusion.half import half
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir.edit import described, dims_of
from ortflow.workflow.graph.ir.order import sort_nodes
from ortflow.workflow.graph.ir.rewriter import Rewriter
from ortflow.workflow.graph.types import GraphSet

CHANNELS, CLASSES = 8, 5


class Model:
    """Nodes and weights in the making."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: dict[str, Array] = {}

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"{operator.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [name], name=f"/{name}", **attributes))
        return name

    def tensor(self, *shape: int, mean: float = 0) -> str:
        name = f"w{len(self.tensors)}"
        self.tensors[name] = self.random.normal(mean, 0.3, shape).astype("float32")
        return name

    def convolution(self, x: str, channels: int, outputs: int, size: int, *, bias: bool = False, **more: Any) -> str:
        weight = self.tensor(outputs, channels // more.get("group", 1), size, size)
        return self.add("Conv", x, weight, *([self.tensor(outputs)] if bias else []), **more)

    def norm(self, x: str, channels: int) -> str:
        scale, bias = self.tensor(channels, mean=1), self.tensor(channels)
        mean, variance = self.tensor(channels), self.tensor(channels)
        self.tensors[variance] = np.abs(self.tensors[variance]) + np.float32(1)
        return self.add("BatchNormalization", x, scale, bias, mean, variance, epsilon=1e-4)

    def save(self, path: Path, image: str, *, size: int = 12) -> Path:
        """A head behind the mean over the pixels of an image of CHANNELS channels."""
        self.tensors["axes"] = np.array([2, 3])
        mean = self.add("ReduceMean", image, "axes", keepdims=1)
        flat = self.add("Flatten", mean)
        self.nodes.append(helper.make_node("Gemm", [flat, self.tensor(CHANNELS, CLASSES)], ["y"], name="/head"))
        return save_model(
            path, self.nodes, [value("x", ["batch", 3, size, size])], [value("y", ["batch", CLASSES])], self.tensors
        )


def residual(path: Path) -> Path:
    """As ResNet begins: a pooling, two branches, one of them with a stride."""
    m = Model()
    first = m.add("Relu", m.norm(m.convolution("x", 3, CHANNELS, 3, pads=[1, 1, 1, 1]), CHANNELS))
    pooled = m.add("MaxPool", first, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    left = m.add("Relu", m.norm(m.convolution(pooled, CHANNELS, CHANNELS, 1), CHANNELS))
    left = m.convolution(left, CHANNELS, CHANNELS, 3, strides=[2, 2], pads=[1, 1, 1, 1], bias=True)
    right = m.norm(m.convolution(pooled, CHANNELS, CHANNELS, 1, strides=[2, 2]), CHANNELS)
    return m.save(path, m.add("Relu", m.add("Add", m.norm(left, CHANNELS), right)))


def feeds_of(graphs: GraphSet, size: int = 12) -> dict[str, Array]:
    random = np.random.default_rng(1)
    images, labels = random.normal(size=(4, 3, size, size)).astype("float32"), random.integers(0, CLASSES, 4)
    return {**tensors_of(graphs), "x": images, "labels": labels, "ortflow.loss_grad": np.array(1, np.float32)}


def check(path: Path) -> tuple[onnx.ModelProto, Counter[str]]:
    """Check that the placed graph computes the same; it, and the number of our nodes of each operator."""
    return check_graph(*differentiated(path))


def check_graph(graphs: GraphSet, model: onnx.ModelProto) -> tuple[onnx.ModelProto, Counter[str]]:
    """The same for a differentiated graph."""
    placed = place(model, halves=True)
    kinds = {name: given.type.tensor_type.elem_type for name, given in described(placed.graph).items()}
    for node in placed.graph.node:
        if node.domain == CUDA_DOMAIN:
            assert node.op_type in HALF
            wanted = [TensorProto.FLOAT] * len(node.output)
            if node.op_type == "MaxPool":
                wanted[1:] = [TensorProto.UINT8]
            assert [kinds.get(name) for name in node.output] == wanted, node.op_type
    feeds = feeds_of(graphs)
    expected, found = run_graph(compose(model), feeds), run_graph(compose(composed(placed)), feeds)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        # The bias before a normalisation has no gradient but rounding.
        apart = off(found[name], array) if np.abs(array).max() > 1e-5 else np.abs(found[name]).max()
        assert apart < 3e-5, (name, apart)
    return placed, Counter(node.op_type for node in placed.graph.node if node.domain == CUDA_DOMAIN)


def plain(model: onnx.ModelProto) -> set[str]:
    """The operators that are not ours."""
    return {node.op_type for node in model.graph.node if node.domain != CUDA_DOMAIN}


def test_a_residual_network_is_channels_last_from_its_input_on(tmp_path: Path) -> None:
    placed, counts = check(residual(tmp_path / "m.onnx"))
    wanted = {
        "Convolution": 4, "ConvolutionDataGrad": 3, "ConvolutionWeightGrad": 4, "BatchStatistics": 4,
        "BatchGradients": 4, "MaxPool": 1, "MaxPoolGrad": 1, "ChannelsLast": 2,
    }  # fmt: skip
    assert {name: counts[name] for name in wanted} == wanted
    turned = [node for node in placed.graph.node if node.op_type == "Transpose"]
    weights = {name for node in turned for name in (node.input[0], node.output[0]) if name.startswith("w")}
    images = [node for node in turned if weights.isdisjoint((node.input[0], node.output[0]))]
    # The mean over all pixels, and its gradient; weights of 1 x 1 are not moved, and few channels are padded.
    assert len(images) <= 2, [(node.input[0], node.output[0]) for node in images]
    assert len(turned) - len(images) == 1


@pytest.mark.rotates
@pytest.mark.parametrize(("kernel", "stride", "pad", "made"), [
    (7, 2, 3, (4, 16)), (3, 2, 1, (2, 16)), (4, 4, 0, (1, 48)), (3, 1, 1, (3, 8)), (1, 2, 0, (1, 8)),
])  # fmt: skip
def test_the_first_convolution_reads_blocks_of_its_stride(
    tmp_path: Path, kernel: int, stride: int, pad: int, made: tuple[int, int]
) -> None:
    m = Model()
    first = m.convolution("x", 3, CHANNELS, kernel, strides=[stride] * 2, pads=[pad] * 4)
    beside = m.convolution("x", 3, CHANNELS, 2, strides=[2, 2])
    x = m.add("Relu", m.norm(first, CHANNELS))
    whole = m.add("Add", m.add("GlobalAveragePool", x), m.add("GlobalAveragePool", beside))
    placed, counts = check(m.save(tmp_path / "m.onnx", whole))
    kinds = described(placed.graph)
    shapes = {dims_of(kinds[node.input[1]]) for node in placed.graph.node if node.op_type == "Convolution"}
    assert (CHANNELS, made[0], made[0], made[1]) in shapes, shapes
    # The image once for each size of blocks, and both weights.
    assert counts["ChannelsLast"] == 4


def statistics_of(placed: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in placed.graph.node if node.op_type == "BatchStatistics"]


def moving(placed: onnx.ModelProto) -> set[str]:
    """The running statistics that our nodes move, which the graph gives back under the names that trainers bind."""
    found = {name for node in statistics_of(placed) for name in node.output[6:]}
    assert found <= {value.name for value in placed.graph.output}
    return found


def test_running_statistics_move_with_those_of_the_batch(tmp_path: Path) -> None:
    placed, _ = check(residual(tmp_path / "m.onnx"))
    states = {value.name for value in placed.graph.output if value.name.endswith("_new")}
    assert len(states) == 8
    assert moving(placed) == states
    for node in statistics_of(placed):
        assert [f"{name}_new" for name in node.input[3:]] == list(node.output[6:])
        readers = [each.op_type for each in placed.graph.node if not set(node.input[3:]).isdisjoint(each.input)]
        assert readers == ["BatchStatistics"]


def test_a_layer_that_is_called_twice_moves_its_statistics_twice(tmp_path: Path) -> None:
    m = Model()
    x = m.norm(m.convolution("x", 3, CHANNELS, 3), CHANNELS)
    first = m.nodes[-1]
    first.attribute.append(helper.make_attribute("momentum", 0.7))
    again = m.convolution(m.add("Relu", x), CHANNELS, CHANNELS, 3)
    m.nodes.append(onnx.NodeProto.FromString(first.SerializeToString()))
    m.nodes[-1].name, m.nodes[-1].input[0], m.nodes[-1].output[0] = "/again", again, "again"
    placed, _ = check(m.save(tmp_path / "m.onnx", m.convolution("again", CHANNELS, CHANNELS, 1)))
    one, other = statistics_of(placed)
    assert list(other.input[3:]) == list(one.output[6:])
    assert {name.removesuffix("_new") for name in other.output[6:]} == set(one.input[3:])


def reader(model: onnx.ModelProto, operator: str, *values: str) -> onnx.NodeProto:
    """The first node of an operator that reads these values."""
    return next(each for each in model.graph.node if each.op_type == operator and set(values) <= set(each.input))


def other_count(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(2, np.float32), "two"))
    node = reader(model, "Max")
    node.input[1] = "two"


def other_momentum(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0.25, np.float32), "quarter"))
    node = reader(model, "Mul", "w4")
    node.input[1] = "quarter"


def a_difference(model: onnx.ModelProto) -> None:
    node = reader(model, "Add", reader(model, "Mul", "w3").output[0])
    node.op_type = "Sub"


def two_readers(model: onnx.ModelProto) -> None:
    """What is kept of the old statistic is read for something else."""
    kept = reader(model, "Mul", "w4").output[0]
    model.graph.node.append(helper.make_node("Identity", [kept], ["kept"], name="/kept"))
    model.graph.output.append(helper.make_tensor_value_info("kept", TensorProto.FLOAT, [CHANNELS]))


def a_cycle(model: onnx.ModelProto) -> None:
    """What moves depends on what is normalised."""
    norm = next(each for each in model.graph.node if each.op_type == "BatchNormalization")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0, 2, 3]), "all"))
    mean = helper.make_node("ReduceMean", [norm.output[0], "all"], ["far"], name="/far", keepdims=0)
    model.graph.value_info.append(helper.make_tensor_value_info("far", TensorProto.FLOAT, [CHANNELS]))
    node = reader(model, "Mul", "w3")
    node.input[0] = "far"
    model.graph.node.append(mean)
    sort_nodes(model.graph)


@pytest.mark.parametrize("change", [other_count, other_momentum, a_difference, two_readers, a_cycle])
def test_statistics_that_move_otherwise_stay(tmp_path: Path, change: Callable[[onnx.ModelProto], None]) -> None:
    graphs, model = differentiated(residual(tmp_path / "m.onnx"))
    change(model)
    placed, counts = check_graph(graphs, model)
    assert counts["BatchStatistics"] == 4
    assert len(moving(placed)) == 6, "those of the other three"


def test_a_relu_of_more_than_what_is_normalised_keeps_its_condition(tmp_path: Path) -> None:
    m = Model()
    normal = m.norm(m.convolution("x", 3, 3, 3, pads=[1, 1, 1, 1]), 3)
    # The input has no gradient, so that only the normalisation reads that of the sum.
    rectified = m.add("Relu", m.add("Add", normal, "x"))
    placed, counts = check(m.save(tmp_path / "m.onnx", m.convolution(rectified, 3, CHANNELS, 1)))
    assert counts["BatchGradients"] == 1
    assert [len(node.input) for node in placed.graph.node if node.op_type == "BatchGradients"] == [5]


def residual_blocks(path: Path, *, gate: bool = False) -> Path:
    """Two blocks with a residual connection. `gate`: another node reads the gradient of the first one's result."""
    m = Model()
    x = m.add("Relu", m.norm(m.convolution("x", 3, CHANNELS, 3, pads=[1, 1, 1, 1]), CHANNELS))
    for _ in range(2):
        inside = m.add("Relu", m.norm(m.convolution(x, CHANNELS, CHANNELS, 3, pads=[1, 1, 1, 1]), CHANNELS))
        whole = m.add("Add", m.norm(m.convolution(inside, CHANNELS, CHANNELS, 1), CHANNELS), x)
        x = m.add("Relu", whole)
        if gate:
            x, gate = m.add("Mul", x, m.tensor(1, CHANNELS, 1, 1)), False
    return m.save(path, x)


def test_two_gradients_are_added_where_they_are_summed(tmp_path: Path) -> None:
    placed, counts = check(residual_blocks(tmp_path / "m.onnx"))
    assert (counts["BatchGradients"], counts["BatchGradientsOfSum"]) == (4, 1)
    # Its sum is what the first block's input gets past the block, and is not computed again.
    node = next(node for node in placed.graph.node if node.op_type == "BatchGradientsOfSum")
    makers = [each for each in placed.graph.node if node.output[-1] in each.output]
    readers = [each.op_type for each in placed.graph.node if node.output[-1] in each.input]
    assert makers == [node]
    assert readers.count("Add") == 1
    assert not any(
        set(node.input[:1]) | {node.input[5]} <= set(each.input) for each in placed.graph.node if each != node
    )


def test_added_gradients_are_stored_as_halves(tmp_path: Path) -> None:
    graphs, model = differentiated(residual_blocks(tmp_path / "m.onnx"))
    trained = [entry.name for entry in graphs.index if entry.tensor.group in ("decay", "no_decay")]
    stored = half(completed(model, halves=True), TensorProto.BFLOAT16, trained, HALF, HALF_ONLY)
    kinds = {name: given.type.tensor_type.elem_type for name, given in described(stored.graph).items()}
    node = next(node for node in stored.graph.node if node.op_type == "BatchGradientsOfSum")
    images = [*node.input[:2], *node.input[5:], node.output[5]]
    assert {kinds[name] for name in images} == {TensorProto.BFLOAT16}
    assert {kinds[name] for name in (*node.input[2:5], *node.output[:5])} == {TensorProto.FLOAT}


@pytest.mark.parametrize("dims", [(2, 4, 4, 8), (1, 1, 1, 8)], ids=["as large", "spread"])
def test_gradients_that_are_added_have_the_sizes_of_their_sum(dims: tuple[int, ...]) -> None:
    whole = (2, 4, 4, 8)
    shapes = {"x": whole, "one": whole, "other": dims}
    made = {"y": whole, "sum": whole, "number": whole, "masked": whole}
    nodes = [
        helper.make_node("Relu", ["x"], ["y"]),
        helper.make_node("Greater", ["y", "zero"], ["larger"]),
        helper.make_node("Cast", ["larger"], ["number"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["one", "other"], ["sum"]),
        helper.make_node("Mul", ["sum", "number"], ["masked"]),
    ]
    graph = helper.make_graph(
        nodes, "g", [value(name, list(each)) for name, each in shapes.items()], [value("masked", list(whole))],
        [numpy_helper.from_array(np.zeros((), np.float32), "zero")],
        value_info=[value(name, list(each)) for name, each in made.items() if name != "masked"],
    )  # fmt: skip
    found = sum_before_relu(Rewriter(graph), "masked")
    assert (found is not None) == (dims == whole)
    if found is not None:
        assert (found.one, found.other, found.result) == ("one", "other", "y")


def test_a_sum_of_gradients_that_is_read_elsewhere_stays(tmp_path: Path) -> None:
    _, counts = check(residual_blocks(tmp_path / "m.onnx", gate=True))
    assert counts["BatchGradientsOfSum"] == 0


def test_fp32_graphs_keep_their_convolutions(tmp_path: Path) -> None:
    _, model = differentiated(residual(tmp_path / "m.onnx"))
    operators = {node.op_type for node in place(model).graph.node if node.domain == CUDA_DOMAIN}
    assert operators.isdisjoint({"Convolution", "MaxPool", "BatchStatistics"})
    assert "Conv" in {node.op_type for node in place(model).graph.node}


def test_in_half_precision_images_are_stored_as_halves_and_masks_not_at_all(tmp_path: Path) -> None:
    graphs, model = differentiated(residual(tmp_path / "m.onnx"))
    trained = [entry.name for entry in graphs.index if entry.tensor.group in ("decay", "no_decay")]
    stored = half(completed(model, halves=True), TensorProto.BFLOAT16, trained, HALF, HALF_ONLY)
    fused, _ = fuse(stored)
    kinds = {name: given.type.tensor_type.elem_type for name, given in described(fused.graph).items()}
    for node in fused.graph.node:
        if node.op_type.startswith(("Convolution", "MaxPool")):
            given = {kinds[name] for name in node.input if kinds[name] != TensorProto.UINT8}
            assert given == {TensorProto.BFLOAT16}, node.op_type
    # Behind a normalisation that nothing but a Relu reads, not even the gradient is stored before it is summed.
    sums = [node for node in fused.graph.node if node.op_type == "BatchGradients"]
    assert sorted(len(node.input) for node in sums) == [5, 5, 7, 7]
    relus = {node.input[0] for node in sums if len(node.input) == 5}
    assert len(relus) == 1, "that of the sum of both branches"
    # The gradient of another Relu reads its result: the forward pass writes no mask.
    written = [name for node in fused.graph.node if node.op_type == "Fused" for name in node.output]
    assert any(name.startswith("relu") for name in written)
    assert not [name for name in written if "Cast" in name or "Greater" in name]


@pytest.mark.parametrize(
    "attributes",
    [{"pads": [1, 0, 0, 1]}, {"auto_pad": "SAME_UPPER"}, {"group": 8}],
    ids=["uneven pads", "auto_pad", "one channel a group"],
)
def test_other_convolutions_stay_between_ours(tmp_path: Path, attributes: dict[str, Any]) -> None:
    m = Model()
    x = m.add("Relu", m.convolution("x", 3, CHANNELS, 3, pads=[1, 1, 1, 1]))
    x = m.add("Relu", m.convolution(x, CHANNELS, CHANNELS, 3, **attributes))
    placed, counts = check(m.save(tmp_path / "m.onnx", m.convolution(x, CHANNELS, CHANNELS, 3, pads=[1, 1, 1, 1])))
    assert counts["Convolution"] == 2
    assert "Conv" in plain(placed)


def test_groups_of_several_channels_are_ours(tmp_path: Path) -> None:
    m = Model()
    x = m.convolution(m.add("Relu", m.convolution("x", 3, CHANNELS, 3)), CHANNELS, CHANNELS, 3, group=2)
    placed, counts = check(m.save(tmp_path / "m.onnx", x))
    assert counts["ConvolutionDataGrad"] == 1
    assert "Conv" not in plain(placed)


def test_gates_and_other_operators_between_convolutions(tmp_path: Path) -> None:
    """A gate per channel, an average pooling, which stays channels first, and a sum of both."""
    m = Model()
    x = m.convolution("x", 3, CHANNELS, 3, pads=[1, 1, 1, 1])
    gate = m.add("Sigmoid", m.convolution(m.add("GlobalAveragePool", x), CHANNELS, CHANNELS, 1, bias=True))
    gated = m.add("Mul", x, gate)
    pooled = m.add("AveragePool", gated, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    half_ = m.add("Mul", m.add("Add", pooled, gated), m.tensor(CHANNELS, 1, 1))
    placed, counts = check(m.save(tmp_path / "m.onnx", m.convolution(half_, CHANNELS, CHANNELS, 1)))
    assert counts["Convolution"] == 3
    assert "AveragePool" in plain(placed)


def test_a_pooling_whose_indices_are_read_stays(tmp_path: Path) -> None:
    m = Model()
    x = m.convolution("x", 3, CHANNELS, 3, pads=[1, 1, 1, 1])
    pool = helper.make_node("MaxPool", [x], ["pooled", "indices"], name="/pool", kernel_shape=[2, 2], strides=[2, 2])
    m.nodes.append(pool)
    cast = m.add("Cast", "indices", to=TensorProto.FLOAT)
    m.tensors["small"] = np.array(1e-3, np.float32)
    placed, counts = check(m.save(tmp_path / "m.onnx", m.add("Add", "pooled", m.add("Mul", cast, "small"))))
    assert not counts["MaxPool"]
    assert {"MaxPool", "MaxPoolGrad"} <= plain(placed)


def image(*shape: int, kind: int = TensorProto.BFLOAT16) -> Tensor:
    return Tensor(1, tuple(shape), kind)


def test_sizes_follow_from_any_two_of_three_values() -> None:
    settings: dict[str, Sequence[int] | int] = {
        "group": 2, "kernel_shape": (3, 2), "strides": (2, 1), "dilations": (1, 2), "pads": (1, 0, 1, 0),
    }  # fmt: skip
    for last, kind in ((0, TensorProto.FLOAT), (1, TensorProto.FLOAT), (1, TensorProto.FLOAT16)):
        windows = Windows.of({**settings, "channels_last": last})

        def of(*sizes: int, last: int = last, kind: int = kind) -> Tensor:
            first, channels, height, width = sizes
            return image(*((first, height, width, channels) if last else sizes), kind=kind)

        x, w, y = of(5, 8, 9, 11), of(6, 4, 3, 2), of(5, 6, 5, 9)
        found = shape_of(windows, image=x, weight=w)
        assert found.stored(found.made) == y.shape
        assert found == shape_of(windows, weight=w, made=y, sizes=(9, 11)) == shape_of(windows, image=x, made=y)
        assert found.stored(found.weight) == w.shape
        dims, strides = found.layout(found.image)
        assert dims == [5, 8, 9, 11]
        assert strides == ([792, 1, 88, 8] if last else [792, 99, 11, 1])


def test_values_that_do_not_match_are_refused() -> None:
    windows = Windows.of({"kernel_shape": (3, 3), "channels_last": 1})
    with pytest.raises(OrtflowError, match=r"convolution of \[2, 8, 9, 9\] is \(4, 8, 2, 3\)"):
        shape_of(windows, image=image(2, 9, 9, 8), weight=image(4, 2, 3, 8))
    with pytest.raises(OrtflowError, match="the result of a convolution"):
        shape_of(windows, weight=image(4, 3, 3, 8), made=image(2, 9, 9, 4), sizes=(9, 9))
    with pytest.raises(OrtflowError, match="a convolution of"):
        shape_of(windows, image=image(2, 9, 9, 8), weight=image(4, 3, 3, 8, kind=TensorProto.FLOAT))
    with pytest.raises(OrtflowError, match="a convolution of"):
        shape_of(windows, image=image(2, 2, 2, 8), weight=image(4, 3, 3, 8))


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_halves_with_channels_first_are_refused(kind: int) -> None:
    x, w = Tensor(1, (2, 8, 5, 5), kind), Tensor(1, (4, 8, 3, 3), kind)
    with pytest.raises(OrtflowError, match="halves with channels first"):
        shape_of(Windows.of({"kernel_shape": (3, 3)}), image=x, weight=w)
