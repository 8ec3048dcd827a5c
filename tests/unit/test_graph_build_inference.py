"""The exported model: trained weights, the file's own names, checked, and replaced atomically."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_build_models import Array, built, linear, run_graph, save_model, tensors_of, value
from onnx import helper

from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.graph.export import inference
from ortflow.workflow.graph.export.inference import export_inference
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.system.disk_space import OutOfDisk

RNG = np.random.default_rng(4)
X = RNG.normal(size=(3, 4)).astype("float32")


@pytest.fixture
def graphs(tmp_path: Path) -> GraphSet:
    return built(linear(tmp_path / "m.onnx"))


def trained(graphs: GraphSet) -> dict[str, Array]:
    return {name: array + 1 for name, array in tensors_of(graphs).items()}


def check(path: Path, tensors: dict[str, Array]) -> None:
    np.testing.assert_allclose(run_graph(path, {"x": X})["y"], X @ tensors["w"] + tensors["b"], rtol=1e-5)


def test_trained_weights(graphs: GraphSet, tmp_path: Path) -> None:
    out = tmp_path / "export" / "model.onnx"
    export_inference(graphs.infer, trained(graphs), out)
    check(out, trained(graphs))
    assert [path.name for path in out.parent.iterdir()] == ["model.onnx"]
    assert {t.name for t in onnx.load(out).graph.initializer} == {"w", "b", "shape"}


def test_large_weights_lie_beside_the_model(graphs: GraphSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "export" / "model.onnx"
    monkeypatch.setattr(inference, "EXTERNAL_BYTES", 50)
    export_inference(graphs.infer, tensors_of(graphs), out)
    check(out, tensors_of(graphs))
    (first,) = out.parent.glob("*.data")
    export_inference(graphs.infer, trained(graphs), out)
    check(out, trained(graphs))
    (second,) = out.parent.glob("*.data")
    assert first != second
    assert len(list(out.parent.iterdir())) == 2
    monkeypatch.setattr(inference, "EXTERNAL_BYTES", 10**9)
    export_inference(graphs.infer, trained(graphs), out)
    assert [path.name for path in out.parent.iterdir()] == ["model.onnx"]


def test_failure_leaves_the_old_file(graphs: GraphSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "model.onnx"
    export_inference(graphs.infer, tensors_of(graphs), out)
    with pytest.raises(OrtflowError, match="no weights for b"):
        export_inference(graphs.infer, {"w": np.zeros((4, 5))}, out)
    with pytest.raises(OrtflowError, match="not valid"):
        export_inference(graphs.infer, {**trained(graphs), "w": np.zeros((3, 5))}, out)

    def failing(code: int) -> Callable[..., None]:
        def write(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        return write

    monkeypatch.setattr(inference, "write_model", failing(errno.ENOSPC))
    with pytest.raises(OutOfDisk, match=rf"out of disk on {out}, .* MB needed"):
        export_inference(graphs.infer, trained(graphs), out)
    monkeypatch.setattr(inference, "write_model", failing(errno.EIO))
    with pytest.raises(UserError, match=r"export.path: cannot write .*: Input/output error"):
        export_inference(graphs.infer, trained(graphs), out)
    check(out, tensors_of(graphs))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["graphs", "m.onnx", "model.onnx"]
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        export_inference(graphs.infer, trained(graphs), tmp_path / "file" / "model.onnx")


def labelled(path: Path, outputs: list[str]) -> Path:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("SoftmaxCrossEntropyLoss", ["y", "labels"], ["loss"]),
    ]
    described = {"loss": value("loss", []), "y": value("y", ["batch", 5])}
    inputs = [value("labels", ["batch"], "int64"), value("x", ["batch", 4])]
    tensors = {"w": RNG.normal(size=(4, 5)).astype("float32")}
    return save_model(path, nodes, inputs, [described[name] for name in outputs], tensors)


def test_labels_are_left_out(tmp_path: Path) -> None:
    loss = {"kind": "output", "output": "loss"}
    graphs = built(labelled(tmp_path / "m.onnx", ["loss", "y"]), loss, model__labels=["labels"])
    export_inference(graphs.infer, tensors_of(graphs), tmp_path / "out.onnx")
    graph = onnx.load(tmp_path / "out.onnx").graph
    assert [i.name for i in graph.input] == ["x"]
    assert [o.name for o in graph.output] == ["y"]

    path = labelled(tmp_path / "only.onnx", ["loss"])
    with pytest.raises(UserError, match="there is nothing to export"):
        built(path, loss, model__labels=["labels"])
    # With the export switched off there is none, and none of an earlier attempt.
    assert not built(path, loss, model__labels=["labels"], export__enabled=False).infer.exists()
