"""`export.quantize` and `export.optimize`: forms that are near enough are written and measured, others refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.data.inputs import MicroBatch
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.head import PRODUCER, is_exported
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.spec.export import ExportSection
from ortflow.workflow.weights.variants import path_of, write_variants

RANDOM = np.random.default_rng(6)


def model(path: Path, convolution: bool = False) -> Path:
    """8 numbers, or an image of 3 x 8 x 8, to 16 numbers."""
    shape = [3, 8, 8] if convolution else [8]
    tensors = {"w": RANDOM.normal(size=(8, 3, 3, 3) if convolution else (8, 64)), "v": RANDOM.normal(size=(64, 16))}
    first = (
        [helper.make_node("Conv", ["x", "w"], ["c"], strides=[3, 3], pads=[1, 1, 0, 0]),
         helper.make_node("ReduceMean", ["c"], ["m"], axes=[3], keepdims=0), helper.make_node("Flatten", ["m"], ["f"])]
        if convolution
        else [helper.make_node("MatMul", ["x", "w"], ["f"])]
    )  # fmt: skip
    if convolution:
        tensors["v"] = tensors["v"][:24]
    nodes = [*first, helper.make_node("Relu", ["f"], ["r"]), helper.make_node("MatMul", ["r", "v"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *shape])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 16])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in tensors.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9, producer_name=PRODUCER)
    onnx.save(made, path)
    return path


def samples(*shape: int) -> list[MicroBatch]:
    return [MicroBatch({"x": RANDOM.normal(size=(16, *shape)).astype(np.float32)}, 16) for _ in range(3)]


@pytest.mark.parametrize("convolution", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_near_forms_are_written_and_measured(convolution: bool, tmp_path: Path) -> None:
    path = model(tmp_path / "model.onnx", convolution)
    batches = samples(*((3, 8, 8) if convolution else (8,)))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    expected = [session.run(None, dict(batch.arrays))[0] for batch in batches]
    for section in (ExportSection(quantize="int8", optimize=True), ExportSection(quantize="fp16")):
        for variant in write_variants(path, section, batches):
            assert variant.path == path_of(path, variant.kind)
            assert is_exported(variant.path)
            assert variant.bytes[0] == variant.path.stat().st_size
            assert min(variant.seconds) > 0
            assert variant.agreement is not None
            assert variant.agreement > 0.9
            other = onnxruntime.InferenceSession(str(variant.path), providers=["CPUExecutionProvider"])
            made = [other.run(None, dict(batch.arrays))[0] for batch in batches]
            off = np.sqrt(np.sum((np.array(made) - expected) ** 2) / np.sum(np.square(expected)))
            assert variant.difference == pytest.approx(off, rel=0.05, abs=1e-6)
            assert f"{variant.path}: " in str(variant)
    names = {"model.onnx", "model.int8.onnx", "model.optimized.onnx", "model.fp16.onnx"}
    assert {each.name for each in tmp_path.iterdir()} == names


@pytest.mark.parametrize("convolution", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_products_of_8_bits_saturate_on_no_processor(convolution: bool, tmp_path: Path) -> None:
    path = model(tmp_path / "model.onnx", convolution)
    batches = samples(*((3, 8, 8) if convolution else (8,)))
    (variant,) = write_variants(path, ExportSection(quantize="int8"), batches)
    tensors = [numpy_helper.to_array(tensor) for tensor in onnx.load(variant.path).graph.initializer]
    weights = [tensor.astype(int) for tensor in tensors if tensor.dtype == np.int8 and tensor.ndim > 1]
    assert len(weights) == 2
    # Without VNNI, two products of an element of at most 255 and a weight are added in 16 bits.
    assert all(2 * 255 * np.abs(weight).max() < 2**15 for weight in weights)


@pytest.mark.filterwarnings("ignore")
def test_a_form_beyond_the_tolerance_is_refused(tmp_path: Path) -> None:
    path = model(tmp_path / "model.onnx")
    section = ExportSection(quantize="int8", quantize_tolerance=1e-6)
    with pytest.raises(UserError, match=r"the int8 model differs by 0\.0\d+ from the exported one on real samples"):
        [*write_variants(path, section, samples(8))]
    with pytest.raises(UserError, match="no samples with the model's inputs"):
        [*write_variants(path, ExportSection(quantize="fp16"), [])]
    (tmp_path / "model.fp16.onnx").write_text("mine")
    with pytest.raises(UserError, match=r"model\.fp16\.onnx exists and is not a model"):
        [*write_variants(path, ExportSection(quantize="fp16"), samples(8))]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.fp16.onnx", "model.onnx"]
