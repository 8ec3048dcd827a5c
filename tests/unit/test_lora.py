"""`model.lora`: adapters are trained and the rest is frozen; weights are exported merged and apart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from in_process import command_here
from onnx import numpy_helper
from safetensors.numpy import load_file
from small_network import save_model
from tiny_runs import RUN, Tiny

from ortflow.workflow.assembly.build import build_graphs
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.layout import TRAINED
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.spec.run import TrainerRunSpec


def built(folder: Path, lora: Mapping[str, Any] | None) -> GraphSet:
    save_model(folder / "model.onnx")
    values = {
        "name": "unit",
        "model": {"path": str(folder / "model.onnx"), "loss": {"kind": "cross_entropy"}, "lora": lora},
        "data": {"train": {"path": "unused"}, "micro_batch": 1},
        "train": {"steps": 1, "optimizer": {"name": "adamw", "lr": 0.1}},
    }
    return build_graphs(TrainerRunSpec.model_validate(values), folder / "graphs")


def test_only_adapters_and_named_parameters_are_trained(tmp_path: Path) -> None:
    graphs = built(tmp_path, {"match": ["w"], "rank": 2, "train": ["b"]})
    groups = {entry.name: entry.tensor.group in TRAINED for entry in graphs.index}
    assert {name for name, trained in groups.items() if trained} == {"w.lora_A", "w.lora_B", "b"}
    tensors = load_file(graphs.initial)
    assert tensors["w.lora_A"].shape == (2, 7)
    assert not tensors["w.lora_B"].any()
    outputs = {value.name for value in onnx.load(graphs.train).graph.output}
    assert {name for name in outputs if name.endswith("_grad")} == {"w.lora_A_grad", "w.lora_B_grad", "b_grad"}
    again = load_file(built(tmp_path, {"match": ["w"], "rank": 2}).initial)
    assert np.array_equal(again["w.lora_A"], tensors["w.lora_A"])


def test_wrong_sections_are_one_sentence(tmp_path: Path) -> None:
    for section, message in (
        ({"match": ["none*"]}, "'none\\*' matches no trained parameter"),
        ({"match": ["b"]}, "no parameter of b is a matrix"),
        ({"match": ["w"], "rank": 6}, "is 6, and w is 5 x 7"),
        ({"match": ["w"], "rank": 2, "train": ["w"]}, "w is in both"),
    ):
        with pytest.raises(UserError, match=message):
            built(tmp_path, section)
    assert not (tmp_path / "graphs").exists()


def test_a_run_exports_adapters_merged_and_apart(tmp_path: Path) -> None:
    section = {"match": ["[wu]"], "rank": 2, "alpha": 4.0}
    tiny = Tiny.make(tmp_path, model={**RUN["model"], "lora": section})
    done = tiny.command("run", "run.yaml")
    assert done.code == 0, done.said
    assert command_here("export", "tiny", "--to", "safetensors", folder=tmp_path).returncode == 0
    assert command_here("export", "tiny", "--to", "lora", folder=tmp_path).returncode == 0
    whole = load_file(tiny.run_dir / "export/model.safetensors")
    apart = load_file(tiny.run_dir / "export/adapter_model.safetensors")
    before = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "model.onnx").graph.initializer}
    assert whole.keys() == before.keys()
    for name in ("w", "u"):
        a, b = (apart[f"base_model.model.{name}.lora_{end}.weight"] for end in "AB")
        assert b.any()
        np.testing.assert_allclose(whole[name], before[name] + 2 * b @ a, rtol=1e-6, atol=1e-7)
    assert all(np.array_equal(whole[name], before[name]) for name in ("b", "scale", "shift"))
    plain = onnx.load(tmp_path / "model.onnx")
    for tensor in plain.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(whole[tensor.name], tensor.name))
    x = np.random.default_rng(4).normal(size=(3, 5)).astype(np.float32)
    models = (plain.SerializeToString(), (tiny.run_dir / "export/model.onnx").read_bytes())
    merged, adapted = (
        onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for model in models
    )
    np.testing.assert_allclose(adapted, merged, rtol=1e-5, atol=1e-6)
