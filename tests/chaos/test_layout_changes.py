"""One run that goes through layouts, step by step, with the curve and the model of one rank.

pytest -m chaos tests/chaos/test_layout_changes.py                     # twenty random changes
ORTFLOW_LAYOUT_CHANGES=all pytest -m chaos tests/chaos/test_layout_changes.py    # from each layout into each other
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from kernels import needs_kernels
from onnx import numpy_helper
from project import Project, command, curve, logs, of_kind

pytestmark = [pytest.mark.chaos, needs_kernels]
CHANGES = os.environ.get("ORTFLOW_LAYOUT_CHANGES", "20")
SEED = int(os.environ.get("ORTFLOW_SEED", "0"))
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}), (2, {}), (4, {}), (2, {"zero": 1}), (3, {"zero": 2}), (2, {"zero": 3}), (4, {"zero": 3}),
    (2, {"pipeline": 2}), (2, {"pipeline": 2, "schedule": "gpipe"}), (3, {"pipeline": 3}), (4, {"pipeline": 4}),
    (2, {"pipeline": 2, "schedule": "interleaved", "chunks": 2}), (4, {"pipeline": 2, "data": 2, "zero": 1}),
    (2, {"horizontal": 2}), (4, {"horizontal": 2, "data": 2, "zero": 2}), (4, {"horizontal": 2, "pipeline": 2}),
]  # fmt: skip
BATCH = 12
"""Samples of a step: a multiple of every number of replicas."""


def every_change(count: int) -> list[int]:
    """A closed walk over `count` places that goes once from each into each other (Hierholzer 1873)."""
    left = {place: [other for other in range(count) if other != place] for place in range(count)}
    walk, path = [], [0]
    while path:
        path.append(left[path[-1]].pop()) if left[path[-1]] else walk.append(path.pop())
    return walk[::-1]


def random_changes(count: int, changes: int) -> list[int]:
    chance, walk = random.Random(SEED), [0]
    while len(walk) <= changes:
        walk.append(chance.choice([place for place in range(count) if place != walk[-1]]))
    return walk


def test_a_walk_makes_each_change_once() -> None:
    walk = every_change(5)
    assert sorted(pairwise(walk)) == [(a, b) for a in range(5) for b in range(5) if a != b]


def test_a_run_goes_through_layouts(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "layouts", dropout=0.0)
    walk = every_change(len(LAYOUTS)) if CHANGES == "all" else random_changes(len(LAYOUTS), int(CHANGES))
    alone = resumed(project, "alone", [len(walk)], [0])
    found = resumed(project, "changes", range(1, len(walk) + 1), walk)
    assert [record["step"] for record in of_kind(found, "resume")] == list(range(1, len(walk)))
    for (step, loss, norm, _), (same_step, same_loss, same_norm, _) in zip(curve(found), curve(alone), strict=True):
        about = f"seed {SEED}, step {step} under {LAYOUTS[walk[step - 1]]}"
        assert step == same_step
        assert (loss, norm) == pytest.approx((same_loss, same_norm), rel=1e-5), about
    here, there = exported(found), exported(alone)
    for name, tensor in there.items():
        np.testing.assert_allclose(here[name], tensor, rtol=1e-5, atol=1e-5, err_msg=name)


def resumed(project: Project, name: str, stops: Iterable[int], walk: list[int]) -> Path:
    """The directory of a run that goes to each of the steps under the layout of the walk."""
    for steps, place in zip(stops, walk, strict=True):
        ranks, parallel = LAYOUTS[place]
        file = project.write(
            name, train__steps=steps, train__global_batch=BATCH, data__micro_batch=1, resources__ranks_per_node=ranks,
            resources__cpus_per_rank=1, parallel=parallel, train__schedule={"name": "constant"}, train__evaluation=None,
            # Adam makes steps of the rounding of vanishing gradients, which adds up.
            train__optimizer={"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}, restart={"failures": 0},
        )  # fmt: skip
        done = command("run", file.name, folder=project.folder, timeout=300)
        assert done.returncode == 0, f"{parallel}\n{done.stdout}\n{done.stderr}\n{logs(project.run_dir(name))}"
    return project.run_dir(name)


def exported(run_dir: Path) -> dict[str, Any]:
    model = onnx.load(run_dir / "export" / "model.onnx")
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
