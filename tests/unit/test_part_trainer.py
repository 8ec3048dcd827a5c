"""The trainer of a part on real ranks: what several ranks hold counts once in all sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dividing_ranks import Divided, plain, run_grid
from queued import network
from sharing_ranks import Job, graphs_of, perceptron

DECAY = {"lr": 1e-2, "weight_decay": 0.1}
GROUPS = [{"match": ["second"], "lr_scale": 0.1, "weight_decay": 0.3}, {"match": ["a", "third"], "lr": 0.05}]
CASES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "adamw": (perceptron, {"train__optimizer": {"name": "adamw", **DECAY}, "train__clip_norm": 0.1}, 2),
    "lamb": (perceptron, {"train__optimizer": {"name": "lamb", **DECAY}}, 1),
    "groups": (perceptron, {"train__optimizer": {"name": "lamb", **DECAY}, "train__groups": GROUPS}, 1),
    "statistics": (network, {"train__optimizer": {"name": "sgd", "momentum": 0.9, **DECAY}}, 1),
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    folder, made = tmp_path_factory.mktemp("parts"), {}
    for name, (make, changes, micro_batches) in CASES.items():
        (folder / name).mkdir()
        graphs = graphs_of(make(folder / name / "model.onnx"), **changes)
        made[name] = Job(name, graphs, changes, micro_batches=micro_batches, damaged=[2] if name == "lamb" else [])
    return made


@pytest.mark.parametrize(("data", "parts"), [(2, 1), (1, 2), (2, 2), (3, 1)])
def test_parts_train_as_one_rank_does(data: int, parts: int, jobs: dict[str, Job], tmp_path: Path) -> None:
    divided = [
        Divided(Job(**{**vars(job), "stage": stage}), data, parts)
        for job in jobs.values()
        for stage in (0, 1, *([2] if job.micro_batches > 1 else []))
    ]
    found = run_grid(data, parts, tmp_path / "world", divided)
    for each in divided:
        curve, state = found[each.name]
        if each.job.name == "statistics" and data > 1:
            # Each replica normalises by its own batch.
            continue
        alone = plain(each.job)
        np.testing.assert_allclose(curve[:-1], alone.curve, rtol=1e-5, atol=1e-5, err_msg=each.name)
        assert state.keys() == alone.state.keys()
        for name, whole in alone.state.items():
            np.testing.assert_allclose(state[name], whole, rtol=1e-5, atol=1e-5, err_msg=f"{each.name} {name}")
