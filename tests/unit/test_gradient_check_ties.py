"""The check of a run's gradient passes a right max pooling whose elements are equal, and names a wrong one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from graph_build_models import Array, built, run_file, save_model, value
from onnx import helper
from test_gradient_check import spoil
from trainers import trainer_on

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.trainer import MicroBatch


def batch() -> MicroBatch:
    random = np.random.default_rng(1)
    x = random.normal(size=(8, 1, 1, 1)).astype("float32")
    return MicroBatch({"x": x, "labels": random.integers(0, 3, 8)}, 8)


def pooled(folder: Path, lowest: int, highest: int) -> Path:
    """x plus an image that is trained, pooled. Many elements of its windows begin equal."""
    random = np.random.default_rng(0)
    image = random.integers(lowest, highest + 1, (1, 2, 8, 8)).astype("float32")
    tensors: dict[str, Array] = {
        "image": image,
        "u": (0.4 * random.normal(size=(32, 3))).astype("float32"),
        "shape": np.array([0, -1]),
    }
    nodes = [
        helper.make_node("Add", ["x", "image"], ["h"], name="/in"),
        helper.make_node("MaxPool", ["h"], ["p"], name="/pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Reshape", ["p", "shape"], ["f"], name="/flat"),
        helper.make_node("MatMul", ["f", "u"], ["y"], name="/out"),
    ]
    inputs, outputs = [value("x", ["batch", 1, 1, 1])], [value("y", ["batch", 3])]
    return save_model(folder / "m.onnx", nodes, inputs, outputs, tensors)


@pytest.mark.parametrize(("lowest", "highest"), [(0, 0), (1, 1), (-1, 1)])
def test_a_right_gradient_between_equal_elements_passes(lowest: int, highest: int, tmp_path: Path) -> None:
    model = pooled(tmp_path, lowest, highest)
    assert trainer_on(built(model), run_file(model)).training.checker.gradient.run(batch(), 5) is not None


@pytest.mark.parametrize("factor", [0.0, 2.0, -1.0])
def test_a_wrong_one_is_named(factor: float, tmp_path: Path) -> None:
    model = pooled(tmp_path, 0, 0)
    graphs = built(model)
    for path in (graphs.train, Form.KERNELS.of(graphs.train)):
        if path.exists():
            spoil(path, "image_grad", factor)
    with pytest.raises(UserError, match="gradient of 'image' disagrees with"):
        trainer_on(graphs, run_file(model)).training.checker.gradient.run(batch(), 5)
