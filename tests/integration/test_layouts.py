"""Whole runs under every layout: the curve and the model of one rank, resumed under other layouts.

After a kill: test_killed_layouts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from in_process import command_here
from onnx import numpy_helper
from project import FEW_CORES, MPICH_SUMS, Project, command, curve, evaluations, logs, of_kind

pytestmark = pytest.mark.rotates

SHAPE: dict[str, Any] = {
    "train__steps": 12, "train__global_batch": 8, "data__micro_batch": 2, "resources__cpus_per_rank": 1,
    "train__schedule": {"name": "constant"}, "train__evaluation": {"every_steps": 6}, "checkpoint__every_steps": 4,
    "train__optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1}, "train__clip_norm": 1.0,
}  # fmt: skip
LAMB: dict[str, Any] = {
    "train__optimizer": {"name": "lamb", "lr": 1e-2, "weight_decay": 0.1}, "train__steps": 10
}  # fmt: skip
SHORT: dict[str, Any] = {
    "train__steps": 6, "train__evaluation": {"every_steps": 3}, "train__check_gradient": False,
    "train__average": {"name": "ema", "decay": 0.7},
}  # fmt: skip
LIMIT = 500
"""Seconds of a run, at most."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pipeline-2": (2, {"pipeline": 2}),
    "gpipe": (2, {"pipeline": 2, "schedule": "gpipe"}),
    "interleaved": (2, {"pipeline": 2, "schedule": "interleaved", "chunks": 2}),
    "cut": (2, {"pipeline": 2, "cuts": [["h.0.output"]]}),
    "pipeline-3": (3, {"pipeline": 3}),
    "pipeline-4": (4, {"pipeline": 4}),
    "horizontal-2": (2, {"horizontal": 2}),
    "named": (2, {"horizontal": 2, "whole": ["wte.weight"], "rows": ["h.*.mlp.c_proj.weight"]}),
    "sequence-2": (2, {"horizontal": 2, "sequence_parallel": True}),
    "data-sequence": (4, {"horizontal": 2, "sequence_parallel": True, "zero": 1}),
    "pipeline-sequence": (4, {"pipeline": 2, "horizontal": 2, "sequence_parallel": True}),
    "data-pipeline": (4, {"data": 2, "pipeline": 2, "zero": 1}),
    "data-horizontal": (4, {"horizontal": 2, "zero": 2}),
    "pipeline-horizontal": (4, {"pipeline": 2, "horizontal": 2}),
}
COMBINED: dict[str, tuple[int, dict[str, Any]]] = {
    "data-gpipe": (4, {"data": 2, "pipeline": 2, "schedule": "gpipe"}),
    "data-interleaved": (4, {"data": 2, "pipeline": 2, "schedule": "interleaved", "chunks": 2}),
    "gpipe-horizontal": (4, {"pipeline": 2, "horizontal": 2, "schedule": "gpipe"}),
    "data-horizontal-zero-1": (4, {"data": 2, "horizontal": 2, "zero": 1}),
    "all": (8, {"data": 2, "pipeline": 2, "horizontal": 2, "zero": 1}),
}
"""Further combinations, in shorter runs, whose averaged weights are evaluated and exported."""
MOVES: dict[str, list[tuple[int, int, dict[str, Any]]]] = {
    "stages": [(4, 2, {"pipeline": 2}), (6, 4, {"pipeline": 2}), (12, 2, {"horizontal": 2})],
    "shares": [(4, 2, {"horizontal": 2}), (10, 2, {"zero": 1}), (12, 4, {"pipeline": 2, "horizontal": 2})],
    "alone": [(4, 4, {"pipeline": 2, "horizontal": 2}), (7, 1, {}), (12, 4, {"pipeline": 2, "zero": 1})],
}  # fmt: skip
"""Of each walk: the steps after which the layout changes, its ranks, and the layout."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project.make(tmp_path_factory.mktemp("layouts"), dropout=0.1)


@pytest.fixture(scope="module")
def one_rank(project: Project) -> Path:
    return project.run("one-rank", **SHAPE, resources__ranks_per_node=1)


def run(project: Project, name: str, ranks: int, parallel: dict[str, Any], **changes: Any) -> Path:
    file = project.write(name, **{**SHAPE, "resources__ranks_per_node": ranks, "parallel": parallel, **changes})
    # Ranks that share a layer wait for each other many times a step. One layout keeps MPICH's own choice of sums.
    settings = MPICH_SUMS if name == "horizontal-2" else FEW_CORES
    done = command("run", file.name, folder=project.folder, timeout=LIMIT, **settings)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs(project.run_dir(name))}"
    return project.run_dir(name)


def exported(run_dir: Path) -> dict[str, npt.NDArray[Any]]:
    model = onnx.load(run_dir / "export" / "model.onnx")
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def same(found: Path, expected: Path) -> None:
    """Curve, evaluations and model to 1e-5."""
    np.testing.assert_allclose(np.array(curve(found)), np.array(curve(expected)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.array(evaluations(found)), np.array(evaluations(expected)), rtol=1e-5, atol=1e-6)
    here, there = exported(found), exported(expected)
    assert here.keys() == there.keys()
    for name, tensor in there.items():
        np.testing.assert_allclose(here[name], tensor, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def short(project: Project) -> Path:
    return run(project, "short", 1, {}, **SHORT)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_as_one_rank_does(name: str, project: Project, one_rank: Path) -> None:
    ranks, parallel = LAYOUTS[name]
    divided_as_one(run(project, name, ranks, parallel), ranks, parallel, one_rank)


@pytest.mark.parametrize("name", COMBINED)
def test_combined_layouts_train_as_one_rank_does(name: str, project: Project, short: Path) -> None:
    ranks, parallel = COMBINED[name]
    found = run(project, name, ranks, parallel, **SHORT)
    divided_as_one(found, ranks, parallel, short)
    assert {event["weights"] for event in of_kind(found, "evaluation")} == {"ema"}


def divided_as_one(found: Path, ranks: int, parallel: dict[str, Any], one_rank: Path) -> None:
    """The results of one rank, on so many ranks."""
    same(found, one_rank)
    replicas = ranks // (parallel.get("pipeline", 1) * parallel.get("horizontal", 1))
    assert f"{replicas} replica(s) of {ranks // replicas} ranks x micro_batch 2" in logs(found)
    # A rank has less than the whole model.
    memory, whole = of_kind(found, "memory")[0], of_kind(one_rank, "memory")[0]
    assert memory["parameters"] < whole["parameters"]
    assert memory["moments"] < whole["moments"]


@pytest.fixture(scope="module")
def lamb(project: Project) -> Path:
    return run(project, "lamb", 1, {}, **LAMB)


@pytest.mark.parametrize("name", ["horizontal-2", "data-horizontal", "pipeline-horizontal"])
def test_trust_ratios_are_those_of_whole_tensors(name: str, project: Project, lamb: Path) -> None:
    same(run(project, f"lamb-{name}", *LAYOUTS[name], **LAMB), lamb)


@pytest.mark.parametrize("name", MOVES)
def test_a_run_continues_under_another_layout(name: str, project: Project, one_rank: Path) -> None:
    for steps, ranks, parallel in MOVES[name]:
        found = run(project, f"moves-{name}", ranks, parallel, train__steps=steps)
    assert [record["step"] for record in of_kind(found, "resume")] == [steps for steps, *_ in MOVES[name][:-1]]
    same_curve = np.array(curve(found)), np.array(curve(one_rank))
    np.testing.assert_allclose(*same_curve, rtol=1e-5, atol=1e-6)
    here, there = exported(found), exported(one_rank)
    for parameter, tensor in there.items():
        np.testing.assert_allclose(here[parameter], tensor, rtol=1e-5, atol=1e-5, err_msg=parameter)
    again = command_here("export", str(found), "--output", f"again-{name}.onnx", folder=project.folder)
    assert again.returncode == 0, again.stderr
    assert (project.folder / f"again-{name}.onnx").read_bytes() == (found / "export" / "model.onnx").read_bytes()


def test_what_cannot_be_divided_is_refused_before_the_run(project: Project) -> None:
    for parallel, ranks, reported in (
        ({"pipeline": 4000}, 4000, "parallel.pipeline"),
        ({"pipeline": 2, "cuts": [["nothing"]]}, 2, "parallel.cuts[0]"),
        ({"horizontal": 2, "whole": ["h.0.mlp.c_fc.wieght"]}, 2, "did you mean 'h.0.mlp.c_fc.weight'"),
        ({"horizontal": 2, "rows": ["h.0.mlp.c_fc.weight"]}, 2, "parallel.rows[0]"),
    ):  # fmt: skip
        file = project.write("refused", **SHAPE, resources__ranks_per_node=ranks, parallel=parallel)
        done = command_here("validate", file.name, folder=project.folder)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
        assert reported in done.stdout + done.stderr
