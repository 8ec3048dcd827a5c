"""`kl_div` with a teacher graph against PyTorch in double precision; the teacher is constant; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
import numpy as np
import torch
from graph_build_models import built, linear, run_graph, save_model, tensors_of, value
from onnx import helper
from run_files import reported, spec_of
from torch.nn import functional

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.types import LOSS_SUM, LOSS_WEIGHT
from ortflow.workflow.spec.file.paths import input_files, resolve_paths

RNG = np.random.default_rng(3)


def teacher(path: Path, *, classes: int = 5, softmax: bool = False, dropout: bool = True) -> dict[str, Any]:
    """Logits of x and of z: a BatchNormalization, a Dropout and a layer; z is an input that the student lacks."""
    tensors = {
        "w": RNG.normal(size=(4, classes)), "scale": RNG.normal(size=4), "shift": RNG.normal(size=4),
        "mean": RNG.normal(size=4), "var": RNG.random(4) + 0.5,
    }  # fmt: skip
    tensors = {name: array.astype("float32") for name, array in tensors.items()}
    nodes = [
        helper.make_node("BatchNormalization", ["x", "scale", "shift", "mean", "var"], ["n"], name="/norm"),
        helper.make_node("Add", ["n", "z"], ["s"], name="/sum"),
        helper.make_node("Dropout", ["s"], ["d"], name="/drop"),
        helper.make_node("MatMul", ["d", "w"], ["logits"], name="/matmul"),
        helper.make_node("Softmax", ["logits"], ["p"], name="/softmax", axis=-1),
    ]
    inputs = [value("x", ["N", 4]), value("z", ["N", 4])]
    save_model(path, nodes, inputs, [value("p" if softmax else "logits", ["N", classes])], tensors)
    return tensors


def logits_of(tensors: dict[str, Any], x: Any, z: Any) -> torch.Tensor:
    t = {name: torch.tensor(array, dtype=torch.float64) for name, array in tensors.items()}
    return ((x - t["mean"]) / (t["var"] + 1e-5).sqrt() * t["scale"] + t["shift"] + z) @ t["w"]


@pytest.mark.parametrize("softmax", [False, True])
def test_a_sum_with_a_label_loss(softmax: bool, tmp_path: Path) -> None:
    temperature = 2.5
    known = teacher(tmp_path / "teacher.onnx", softmax=softmax)
    terms = [
        {
            "weight": 0.7,
            "loss": {"kind": "kl_div", "teacher": str(tmp_path / "teacher.onnx"), "temperature": temperature},
        },
        {"weight": 0.3, "loss": {"kind": "cross_entropy", "ignore_index": None}},
    ]
    sections = {"loss": {"kind": "sum", "terms": terms}, "model__metrics": ["accuracy"]}
    graphs = built(linear(tmp_path / "model.onnx"), **sections)
    assert {each.name for each in graphs.index} == {"w", "b"} == {*tensors_of(graphs)}, (
        "nothing of the teacher is a parameter"
    )
    assert [each.name for each in graphs.inputs] == ["x", "z", "labels"]
    x, z = (RNG.normal(size=(6, 4)).astype("float32") for _ in range(2))
    labels = RNG.integers(0, 5, 6)
    given = {
        name: torch.tensor(array, dtype=torch.float64, requires_grad=True) for name, array in tensors_of(graphs).items()
    }
    y = torch.tensor(x, dtype=torch.float64) @ given["w"] + given["b"]
    truth = (logits_of(known, torch.tensor(x).double(), torch.tensor(z).double()) / temperature).softmax(1)
    kl = functional.kl_div((y / temperature).log_softmax(1), truth, reduction="batchmean") * temperature**2
    expected = 0.7 * kl + 0.3 * functional.cross_entropy(y, torch.tensor(labels))
    expected.backward()
    feeds = {"x": x, "z": z, "labels": labels, **tensors_of(graphs)}
    made = run_graph(graphs.train, feeds)
    assert made[LOSS_SUM] / made[LOSS_WEIGHT] == pytest.approx(expected.item(), rel=2e-6)
    for name, tensor in given.items():
        np.testing.assert_allclose(made[f"{name}_grad"] / made[LOSS_WEIGHT], tensor.grad.numpy(), rtol=2e-5, atol=1e-6)
    evaluated = run_graph(graphs.root / "eval.onnx", feeds)
    assert evaluated["ortflow.loss.kl_div_sum"] / 6 == pytest.approx(kl.item(), rel=2e-6)
    assert evaluated["ortflow.accuracy_sum"] == (y.argmax(1).numpy() == labels).sum()
    exported = (graphs.root / "infer.onnx").read_bytes()
    assert b"teacher" not in exported


def test_what_is_refused(tmp_path: Path) -> None:
    teacher(tmp_path / "teacher.onnx", classes=7)
    loss = {"kind": "kl_div", "teacher": str(tmp_path / "teacher.onnx")}
    model = linear(tmp_path / "model.onnx")
    for changes, message in (
        ({}, r"model.loss.teacher: output 'logits' of .*teacher.onnx has the shape \[N, 7\], .* model \[batch, 5\]"),
        ({"teacher_output": "h"}, r"model.loss.teacher_output: .*teacher.onnx has no output 'h' \(logits\)"),
        ({"teacher": str(tmp_path / "none.onnx")}, "model.loss.teacher: .*none.onnx: "),
    ):
        with pytest.raises(UserError, match=message):
            built(model, {**loss, **changes})


def test_paths_of_teachers_and_metrics(tmp_path: Path) -> None:
    """They are relative to the run file, must exist, and are among the files that a remote submission copies."""
    terms = [{"loss": {"kind": "kl_div", "teacher": "t.onnx"}}, {"loss": {"kind": "cross_entropy"}}]
    model = {"path": "model.onnx", "loss": {"kind": "sum", "terms": terms}}
    model["metrics"] = ["accuracy", {"name": "graph", "path": "metric.onnx"}]
    spec = resolve_paths(spec_of(model=model), tmp_path / "run.yaml")
    assert {*input_files(spec)} == {
        str(tmp_path / name) for name in ("model.onnx", "metric.onnx", "t.onnx", "train.arrow")
    }
    text = (
        "name: a\nmodel:\n  path: m.onnx\n  metrics: [{name: graph, path: metric.onnx}]\n"
        "  loss: {kind: kl_div, teacher: t.onnx}\n"
        "data: {train: d.arrow, micro_batch: 1}\ntrain: {steps: 1, optimizer: {name: sgd, lr: 1}}\n"
        "parallel: {pipeline: 2}\nresources: {ranks_per_node: 2}\n"
    )
    assert not reported(tmp_path, text, "model.metrics.0.path=other.onnx")
