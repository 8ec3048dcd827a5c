"""A run that starts from PyTorch's weights, is resumed without them, and gives its weights back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from in_process import command_here
from onnx import numpy_helper
from safetensors.numpy import load_file, save_file
from tiny_runs import RUN, Tiny


def test_start_resume_export_and_start_again(tmp_path: Path) -> None:
    two = {"ranks_per_node": 2, "cpus_per_rank": 1}
    start = {**RUN["model"], "start_from": "w.safetensors"}
    tiny = Tiny.make(tmp_path, model=start, resources=two, parallel={"zero": 1}, train={**RUN["train"], "steps": 3})
    begin = {
        t.name: np.full(tuple(t.dims), 0.25, np.float32) for t in onnx.load(tmp_path / "model.onnx").graph.initializer
    }
    wrong = {**begin, "u": np.zeros((7, 4), np.float32)}
    save_file(wrong, tmp_path / "w.safetensors")
    refused = tiny.command("run", "run.yaml")
    assert refused.code == 2
    assert "u (7 x 3 in the model, 7 x 4 in the file)" in refused.said

    save_file(begin, tmp_path / "w.safetensors")
    done = tiny.command("run", "run.yaml")
    assert done.code == 0, done.said
    initial = load_file(tiny.run_dir / "graphs/initial.safetensors")
    assert all(np.array_equal(initial[name], array) for name, array in begin.items())

    (tmp_path / "w.safetensors").unlink()
    resumed = tiny.command("resume", "tiny", "train.steps=4")
    assert resumed.code == 0, resumed.said
    plan = json.loads((tiny.run_dir / "plan.json").read_text())
    digest = json.loads((tiny.run_dir / "graphs/start_from.json").read_text())["digest"]
    assert plan["run"]["model"].endswith(digest)

    exported = command_here("export", "tiny", "--to", "safetensors", folder=tmp_path)
    assert exported.returncode == 0, exported.stderr
    assert "step 4, 7 tensors under the names of the ONNX file" in exported.stdout
    weights = load_file(tiny.run_dir / "export/model.safetensors")
    model = onnx.load(tiny.run_dir / "export/model.onnx")
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            np.testing.assert_array_equal(numpy_helper.to_array(tensor), weights[tensor.name])
    (tmp_path / "mine.safetensors").write_text("mine")
    kept = command_here("export", "tiny", "--to", "safetensors", "-o", "mine.safetensors", folder=tmp_path)
    assert kept.returncode == 2
    assert "is not replaced" in kept.stderr
