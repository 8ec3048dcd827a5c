"""The times of a graph's nodes: each by its name, within limits of time and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_build_models import save_model, value
from onnx import helper

from ortflow.workflow.assembly import profile

ROWS, WIDTH = 2048, 512
WEIGHTS = {"w": [WIDTH, WIDTH], "v": [WIDTH, WIDTH], "b": [WIDTH], "scale": []}


def graph(folder: Path) -> bytes:
    """Two products that take milliseconds, and smaller nodes."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"], name="first"),
        helper.make_node("MatMul", ["p", "v"], ["q"], name="second"),
        helper.make_node("Add", ["q", "b"], ["r"], name="sum"),
        helper.make_node("Mul", ["r", "scale"], ["y"], name="product"),
    ]
    shapes = {"x": ["batch", WIDTH], **WEIGHTS}
    inputs = [value(name, shape) for name, shape in shapes.items()]
    model = onnx.load(save_model(folder / "m.onnx", nodes, inputs, [value("y", ["batch", WIDTH])], {}))
    return bytes(model.SerializeToString())


def profiled(folder: Path) -> Any:
    x = np.ones((ROWS, WIDTH), np.float32)
    return profile.profile(graph(folder), {"x": x}, WEIGHTS, 1)


def test_each_node_has_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = profiled(tmp_path)
    assert found.keys() == {"first", "second", "sum", "product"}
    assert found["first"] > found["product"] > 0
    monkeypatch.setattr(profile, "ENOUGH", 0.0)
    assert profiled(tmp_path).keys() == found.keys(), "a long pass runs once"


def test_a_pass_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "LIMIT", 0.0)
    with pytest.raises(Exception, match="terminate"):
        profiled(tmp_path)
