"""Groups, averaged weights and a schedule with state in one run: resumed to the bit, and exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from project import Project, command, curve, evaluations, of_kind

from ortflow.workflow.checkpoint.load import load
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.layout import TRAINED

RULES = {
    "resources__ranks_per_node": 1, "resources__cpus_per_rank": 1, "checkpoint__every_steps": 4,
    "train__optimizer": {"name": "nadam", "lr": 5e-3, "weight_decay": 0.1},
    "train__schedule": {
        "name": "reduce_on_plateau", "warmup": "8 samples", "patience": 1, "min_delta": 100.0, "gamma": 0.5,
    },
    "train__evaluation": {"every_steps": 2},
    "train__groups": [{"match": ["*ln*"], "lr_scale": 0.5}, {"match": ["*wte*"], "frozen_until": "8 steps"}],
    "train__average": {"name": "ema", "decay": 0.9, "warmup": True},
}  # fmt: skip


def test_a_run_with_all_of_them_resumes_exactly_and_exports_the_average(tmp_path: Path) -> None:
    project = Project.make(tmp_path)
    whole = project.run("whole", **RULES, train__steps=14)
    project.run("parts", **RULES, train__steps=6)
    parts = project.run("parts", **RULES, train__steps=14)
    assert [each["step"] for each in of_kind(parts, "resume")] == [6]
    assert curve(parts) == curve(whole)
    assert evaluations(parts) == evaluations(whole)
    assert {each["weights"] for each in of_kind(whole, "evaluation")} == {"ema"}
    # The first evaluation sets the mark; every second one after it is one too many.
    assert [each["step"] for each in of_kind(parts, "lr_reduced")] == [6, 10, 14]
    rates = {step: rate for step, *_, rate in curve(whole)}
    assert [rates[step] for step in (1, 2, 6, 7, 11)] == [2.5e-3, 5e-3, 5e-3, 2.5e-3, 1.25e-3]

    found = load(DirectoryStore(whole / "checkpoints"), 14)
    assert command("export", "runs/parts", "--output", "offline.onnx", folder=tmp_path).returncode == 0
    models = [whole / "export" / "model.onnx", tmp_path / "offline.onnx"]
    for path in models:
        values = {each.name: numpy_helper.to_array(each) for each in onnx.load(path).graph.initializer}
        compared = 0
        for entry in found.manifest.index:
            if entry.tensor.group in TRAINED and entry.name in values:
                average = found.buffers["average"][entry.offset : entry.end]
                np.testing.assert_array_equal(values[entry.name].reshape(-1), average)
                compared += not np.array_equal(average, found.buffers["parameters"][entry.offset : entry.end])
        assert compared > 5
