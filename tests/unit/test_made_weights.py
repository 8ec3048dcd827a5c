"""Weights that nodes make of numbers: stored as parameters, left alone with a warning, or no weights at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_small_models import graph, node, random
from messages import mentions
from onnx import TensorProto, helper, numpy_helper
from onnx.tools.replace_constants import replace_initializer_by_constant_of_shape

from ortflow.workflow.graph.intake.inspect import findings
from ortflow.workflow.graph.intake.source import read_source
from ortflow.workflow.graph.ir.recorded_roles import CONSTANTS
from ortflow.workflow.graph.normalize.prepare import prepare
from ortflow.workflow.graph.roles.made_weights import store_made_weights
from ortflow.workflow.spec.model import CrossEntropy, ModelSection, ParameterPatterns

NONE = ParameterPatterns()
IMAGE: dict[str, tuple[int, list[int | str]]] = {"x": (TensorProto.FLOAT, ["batch", 2, 4, 4])}
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def fill(output: str, value: float = 0.5) -> onnx.NodeProto:
    """A ConstantOfShape that reads `shape`."""
    return node("ConstantOfShape", "shape", output=output, value=numpy_helper.from_array(np.array([value], np.float32)))


def filled(name: str, *made: onnx.NodeProto, properties: dict[str, list[str]] | None = None) -> onnx.ModelProto:
    """A linear layer whose [4, 4] weight `name` is made by `made`, or by a fill."""
    nodes = [*(made or [fill(name)]), node("MatMul", "x", name, output="h"), node("MatMul", "h", "head.weight")]
    tensors = {"shape": np.array([4, 4]), "half": np.array(0.5, np.float32), "head.weight": random(4, 4)}
    return graph(nodes, tensors, properties=properties)


def tensors_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


class TestStored:
    def test_a_filled_weight(self) -> None:
        model = filled("layer.weight")
        (note,), warnings = store_made_weights(model, NONE)
        assert mentions(note, "'layer.weight'")
        assert not warnings
        assert tensors_of(model)["layer.weight"].tolist() == [[0.5] * 4] * 4
        assert [each.op_type for each in model.graph.node] == ["MatMul", "MatMul"]

    @pytest.mark.parametrize(
        "made",
        [
            [node("Expand", "half", "shape", output="w")],
            [fill("a"), node("Add", "a", "half", output="w")],
            [fill("onnx::Fill_1"), node("Mul", "onnx::Fill_1", "half", output="w")],
        ],
        ids=["expand", "add", "mul"],
    )
    def test_other_nodes_that_read_only_numbers(self, made: list[onnx.NodeProto]) -> None:
        model = filled("w", *made)
        store_made_weights(model, NONE)
        assert tensors_of(model).keys() == {"w", "head.weight"}

    @pytest.mark.parametrize("width", [4, 200, 2000])
    @pytest.mark.parametrize("ranges", [False, True], ids=["fill", "range"])
    def test_what_onnxs_own_tool_writes(self, ranges: bool, width: int) -> None:
        """It replaces each large tensor by ConstantOfShape, or by a Range over its elements."""
        stored = graph([node("MatMul", "x", "layer.weight")], {"layer.weight": random(4, width)})
        light = replace_initializer_by_constant_of_shape(stored, threshold=1, use_range=ranges)
        assert isinstance(light, onnx.ModelProto)
        model, _ = prepare(light)
        store_made_weights(model, NONE)
        values = tensors_of(model)["layer.weight"]
        assert values.shape == (4, width)
        assert (values.std() > 0) == ranges

    def test_a_convolution_its_norm_and_a_scale(self) -> None:
        tensors = {"shape": np.array([3]), "axes": np.array([1, 2]), "w.shape": np.array([3, 2, 1, 1])}
        names = ["bias", "scale", "shift", "mean", "var", "gamma"]
        nodes = [
            *map(fill, names),
            node("ConstantOfShape", "w.shape", output="w"),
            node("Conv", "x", "w", "bias", output="c"),
            helper.make_node("BatchNormalization", ["c", "scale", "shift", "mean", "var"], ["n"], "norm"),
            node("Unsqueeze", "gamma", "axes", output="g"),
            node("Mul", "n", "g"),
        ]
        model = graph(nodes, tensors, IMAGE)
        store_made_weights(model, NONE)
        assert tensors_of(model).keys() == {"w", *names, "axes"}
        # A weight that is rearranged is stored as it was before.
        assert tensors_of(model)["gamma"].shape == (3,)

    def test_a_generated_name_if_the_run_file_names_it(self) -> None:
        model = filled("/ConstantOfShape_output_0")
        notes, warnings = store_made_weights(model, ParameterPatterns(train=["/Constant*"]))
        assert notes
        assert not warnings
        assert "/ConstantOfShape_output_0" in tensors_of(model)


class TestLeftAlone:
    def check(self, model: onnx.ModelProto) -> list[str]:
        before = model.SerializeToString()
        notes, warnings = store_made_weights(model, NONE)
        assert not notes
        assert model.SerializeToString() == before
        return warnings

    @pytest.mark.parametrize(
        "name",
        [
            "/ConstantOfShape_output_0",
            "val_3",
            "ones_like_1",
            "new_zeros",
            "model/lstm/zeros:0",
            "Fill__7:0",
            "a/ones_like__5",
        ],
    )
    def test_a_generated_name_is_warned_of(self, name: str) -> None:
        (warning,) = self.check(filled(name))
        assert mentions(warning, repr(name), "MatMul", "model.parameters.train")

    @pytest.mark.parametrize("operator", ["Mul", "Add"])
    def test_the_first_state_of_an_unrolled_lstm(self, operator: str) -> None:
        nodes = [node("MatMul", "x", "w", output="gate"), fill("model/lstm/zeros:0", 0)]
        nodes.append(node(operator, "gate", "model/lstm/zeros:0"))
        assert not self.check(graph(nodes, {"shape": np.array([1, 4]), "w": random(4, 4)}))

    def test_a_file_that_records_roles(self) -> None:
        assert not self.check(filled("layer.weight", properties={CONSTANTS: ["head.weight"]}))

    def test_a_weight_of_a_parameter(self) -> None:
        """PyTorch names a single number only if it is a parameter: the weight follows it."""
        model = filled("w", node("Expand", "half", "shape", output="w"))
        model.producer_name = "pytorch"
        assert not self.check(model)

    def test_a_product_of_constants(self) -> None:
        nodes = [fill("fill"), node("MatMul", "fill", "table", output="m"), node("MatMul", "x", "m")]
        assert not self.check(graph(nodes, {"shape": np.array([4, 4]), "table": random(4, 4)}))

    def test_a_table_of_sines_and_a_mask(self) -> None:
        for op in ("Sin", "Trilu"):
            assert not self.check(filled("w", fill("a"), node(op, "a", output="w")))

    def test_a_norm_without_parameters(self) -> None:
        nodes = [fill("/Ones_output_0", 1), fill("/Zeros_output_0", 0), node("MatMul", "x", "w", output="h")]
        nodes.append(node("LayerNormalization", "h", "/Ones_output_0", "/Zeros_output_0"))
        assert not self.check(graph(nodes, {"shape": np.array([4]), "w": random(4, 4)}))

    def test_zeros_that_data_is_joined_with(self) -> None:
        nodes = [fill("zeros"), node("Concat", "x", "zeros", output="c", axis=0), node("MatMul", "c", "w")]
        assert not self.check(graph(nodes, {"shape": np.array([1, 4]), "w": random(4, 4)}))

    def test_quantised_weights(self) -> None:
        nodes = [node("Cast", "q", output="w", to=TensorProto.FLOAT), node("MatMul", "x", "w")]
        assert not self.check(graph(nodes, {"q": np.ones((4, 4), np.int8)}))


def test_a_run_trains_them(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(filled("layer.weight").SerializeToString())
    source = read_source(ModelSection(path=str(path), loss=CrossEntropy(kind="cross_entropy")))
    assert source.roles.trained == ["head.weight", "layer.weight"]
    assert source.tensors["layer.weight"].tolist() == [[0.5] * 4] * 4
    assert any("'layer.weight'" in note for note in source.notes)
    path.write_bytes(filled("val_1").SerializeToString())
    source = read_source(ModelSection(path=str(path), loss=CrossEntropy(kind="cross_entropy")))
    assert source.roles.trained == ["head.weight"]
    assert any("'val_1'" in warning for warning in source.warnings)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("squeezenet", 1_235_496), ("resnet50", 25_557_032), ("shufflenet", 1_393_320), ("densenet121", 8_062_504)],
)
def test_light_files_of_the_model_zoo(name: str, parameters: int) -> None:
    report = findings(LIGHT / f"light_{name}.onnx")
    assert report.parameters == parameters
    assert not report.warnings
