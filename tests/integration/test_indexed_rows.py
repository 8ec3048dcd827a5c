"""Samples that read others of their micro-batch, by an index, in stages of a pipeline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from caches import cache_without_gradients
from data_sets import write_batches
from onnx import TensorProto, helper, numpy_helper
from project import curve, of_kind
from tiny_runs import RUN, Tiny

from ortflow.workflow.graph.ir.other_rows import reads_other_rows

BATCH, SAMPLES = 8, 64


def model(axis: int = 0) -> onnx.ModelProto:
    random = np.random.default_rng(0)
    tensors = {"w": random.normal(size=(5, 7)), "u": random.normal(size=(7, 8)), "v": random.normal(size=(8, 3))}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["first"], "/first"),
        helper.make_node("Tanh", ["first"], ["bounded"], "/tanh"),
        helper.make_node("Gather", ["bounded", "other"], ["others"], "/gather", axis=axis),
        helper.make_node("Add", ["bounded", "others"], ["both"], "/add"),
        helper.make_node("MatMul", ["both", "u"], ["second"], "/second"),
        helper.make_node("MatMul", ["second", "v"], ["y"], "/third"),
    ]
    graph = helper.make_graph(
        nodes,
        "model",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 5]),
            helper.make_tensor_value_info("other", TensorProto.INT64, ["batch"]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(array.astype("float32"), name) for name, array in tensors.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_a_pipeline_checks_the_gradient_with_all_of_the_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check took two samples, whose indices point behind them; and no other run could have the directory then."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_without_gradients(tmp_path / "cache")))
    data = {**RUN["data"], "micro_batch": BATCH, "shuffle": False}
    resources = {**RUN["resources"], "ranks_per_node": 2}
    tiny = Tiny.make(tmp_path / "p", data=data, resources=resources, parallel={"pipeline": 2})
    onnx.save(model(), tiny.folder / "model.onnx")
    random = np.random.default_rng(1)
    samples = {
        "x": random.normal(size=(SAMPLES, 5)).astype(np.float32),
        "other": random.integers(3, BATCH, SAMPLES),
        "labels": random.integers(0, 3, SAMPLES),
    }
    (tiny.folder / "set.arrow").unlink()
    write_batches(tiny.folder / "set.arrow", {**samples, "other": samples["other"] + BATCH})
    behind = tiny.command("run", "run.yaml")
    assert behind.code == 2, behind.said
    assert "node '/gather' (Gather) of the graph rejects the batch" in behind.err
    assert not tiny.run_dir.exists()
    (tiny.folder / "set.arrow").unlink()
    write_batches(tiny.folder / "set.arrow", samples)
    done = tiny.command("run", "run.yaml")
    assert done.code == 0, done.said
    assert "differences of the loss" in of_kind(tiny.run_dir, "gradient_check")[0]["compared"]
    divided = curve(tiny.run_dir)
    assert tiny.command("run", "--fresh", "run.yaml", "parallel.pipeline=1", "resources.ranks_per_node=1").code == 0
    np.testing.assert_allclose(curve(tiny.run_dir), divided, rtol=1e-5)


def test_which_models_index_samples() -> None:
    graph = model().graph
    parameters = {"w", "u", "v"}
    assert reads_other_rows(graph, parameters)
    assert not reads_other_rows(model(axis=1).graph, parameters)
    graph.node[2].input[0] = "w"
    assert not reads_other_rows(graph, parameters), "rows of a table"
    graph.node[2].input[0] = "bounded"
    graph.node[2].input[1] = "w"
    assert not reads_other_rows(graph, parameters), "fixed indices"
