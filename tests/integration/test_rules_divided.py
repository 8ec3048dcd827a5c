"""Averaged weights and a frozen group in a pipeline: the bits of an undivided run, also if the layout changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import numpy_helper
from tiny_runs import RUN, Tiny

TRAIN: dict[str, Any] = {
    **RUN["train"],
    "evaluation": {"every_steps": 4},
    # The first stage, whose rank writes the numbers of a checkpoint, has nothing of this group.
    "groups": [{"match": ["u"], "frozen_until": "5 steps"}],
    "average": {"name": "ema", "decay": 0.9},
}
WHOLE = ("parallel.pipeline=1", "resources.ranks_per_node=1")


OPTIMIZERS = [
    {"name": "adamw", "lr": 0.05},
    pytest.param({"name": "muon", "lr": 0.02, "adamw_lr": 0.01}, marks=pytest.mark.rotates("whole tensors in stages")),
    pytest.param(
        {"name": "adafactor", "lr": 0.05, "weight_decay": 0.1}, marks=pytest.mark.rotates("whole tensors in stages")
    ),
]


def make(folder: Path, ranks: int, optimizer: dict[str, Any]) -> Tiny:
    data = {**RUN["data"], "eval": "set.arrow"}
    resources = {"ranks_per_node": ranks, "cpus_per_rank": 1}
    train = {**TRAIN, "optimizer": optimizer}
    return Tiny.make(folder, data=data, train=train, parallel={"pipeline": ranks}, resources=resources)


def found(tiny: Tiny) -> tuple[dict[str, bytes], list[Any]]:
    events = [json.loads(line) for line in (tiny.run_dir / "events/rank-0000.jsonl").read_text().splitlines()]
    evaluations = [(each["step"], each["loss"], each["weights"]) for each in events if each["event"] == "evaluation"]
    model = onnx.load(tiny.run_dir / "export/model.onnx")
    return {each.name: numpy_helper.to_array(each).tobytes() for each in model.graph.initializer}, evaluations


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: str(optimizer["name"]))
def test_a_pipeline_has_the_bits_of_an_undivided_run(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    whole, divided = make(tmp_path / "whole", 1, optimizer), make(tmp_path / "divided", 2, optimizer)
    done = whole.command("run", "run.yaml")
    assert done.code == 0, done.said
    # Eight steps in two stages, the others undivided: the group has missed five updates, whichever rank counts them.
    for arguments in (("run", "run.yaml", "train.steps=8"), ("resume", "tiny", "train.steps=12", *WHOLE)):
        done = divided.command(*arguments, timeout=120)
        assert done.code == 0, done.said
    assert found(divided)[1][0][2] == "ema"
    assert found(divided) == found(whole)
