"""Groups of parameters against torch.optim's, with a group that gets its first gradient later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
import numpy as np
import onnx
import torch
from onnx import numpy_helper
from sharing_ranks import Job, graphs_of, perceptron
from trainers import opened

from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.run.pace import pace_of_steps

UNTIL, STEPS, CLIP = 3, 8, 0.2
TORCH: dict[str, Any] = {
    "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD, "nadam": torch.optim.NAdam,
    "rmsprop": torch.optim.RMSprop,
}  # fmt: skip


@pytest.mark.parametrize("name", TORCH)
def test_groups_are_those_of_torch(name: str, tmp_path: Path) -> None:
    momentum = {"momentum": 0.9} if name == "sgd" else {}
    changes = {
        "train__optimizer": {"name": name, "lr": 1e-2, "weight_decay": 0.1, "no_decay": ["a", "b"], **momentum},
        "train__groups": [
            {"match": ["second", "b"], "lr_scale": 0.1, "weight_decay": 0.3},
            {"match": ["third"], "frozen_until": f"{UNTIL} steps"},
        ],
        "train__clip_norm": CLIP,
    }
    job = Job("groups", graphs_of(perceptron(tmp_path / "model.onnx"), **changes), changes)
    trainer = opened(GraphSet.load(Path(job.graphs)), job.spec(1), SoloCommunicator())

    model = onnx.load(tmp_path / "model.onnx")
    w = {
        each.name: torch.nn.Parameter(torch.from_numpy(numpy_helper.to_array(each).copy()).double())
        for each in model.graph.initializer
    }
    groups = [
        {"params": [w["first"], w["third"]]}, {"params": [w["a"]], "weight_decay": 0.0},
        {"params": [w["second"]], "lr": 1e-3, "weight_decay": 0.3},
        {"params": [w["b"]], "lr": 1e-3, "weight_decay": 0.0},
    ]  # fmt: skip
    theirs = TORCH[name](groups, lr=1e-2, weight_decay=0.1, **momentum)
    w["third"].requires_grad = False
    for step in range(1, STEPS + 1):
        (batch,) = job.batches(step, 0, 1)
        trainer.at(pace_of_steps(step))
        outcome = trainer.step([batch], learning_rate=1e-2, update=step, seeds=[1], control_values=[])

        w["third"].requires_grad = step > UNTIL
        theirs.zero_grad()
        x, labels = (torch.from_numpy(batch.arrays[key]) for key in ("x", "labels"))
        hidden = torch.sigmoid(torch.tanh(x.double() @ w["first"] + w["a"]) @ w["second"] + w["b"])
        torch.nn.functional.cross_entropy(hidden @ w["third"], labels.long()).backward()
        norm = torch.nn.utils.clip_grad_norm_([each for each in w.values() if each.grad is not None], CLIP)
        theirs.step()
        assert outcome.grad_norm == pytest.approx(float(norm), rel=1e-5), step
    for key, values in w.items():
        entry = trainer.index[key]
        found = trainer.state()["parameters"].read()[entry.offset : entry.end]  # type: ignore[union-attr]
        np.testing.assert_allclose(found, values.detach().numpy().reshape(-1), rtol=1e-4, atol=2e-6, err_msg=key)
