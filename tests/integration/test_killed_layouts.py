"""Under every layout: kill -9 of one rank ends the attempt, and the next has the end of an undisturbed run, bit by bit.

pytest tests/integration/test_killed_layouts.py                             # a few
pytest -m "chaos or not chaos" tests/integration/test_killed_layouts.py     # all
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from kernels import needs_kernels
from killing import run_and_kill
from layout_table import PARALLEL
from project import FEW_CORES, MPICH_SUMS, Project, command, curve, evaluations, logs, of_kind
from rotation import rotating

pytestmark = [needs_kernels, pytest.mark.rotates]
SHAPE: dict[str, Any] = {
    "train__steps": 8, "train__global_batch": 8, "data__micro_batch": 2, "resources__cpus_per_rank": 1,
    "train__schedule": {"name": "constant"}, "train__evaluation": {"every_steps": 4}, "checkpoint__every_steps": 2,
    "train__optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1}, "train__clip_norm": 1.0,
}  # fmt: skip
RECOMPUTED = {"model__recompute": "layers"}
LAMB = {"train__optimizer": {"name": "lamb", "lr": 1e-2, "weight_decay": 0.1}}
LIMIT = 500
"""Seconds of a run, at most."""


class Layout(NamedTuple):
    """Ranks, how they divide the model, and what else differs from `SHAPE`."""

    ranks: int
    parallel: dict[str, Any]
    changes: Mapping[str, Any] = MappingProxyType({})


LAYOUTS = {
    **{name: Layout(*parallel) for name, parallel in PARALLEL.items()},
    "data-4": Layout(*PARALLEL["data-4"], {"data__micro_batch": 1}),
    "without-accumulation": Layout(*PARALLEL["data-4"]),
    "zero-3-of-4": Layout(*PARALLEL["zero-3-of-4"], {"data__micro_batch": 1}),
    "recompute": Layout(*PARALLEL["data-2"], RECOMPUTED),
    **{f"recompute-{name}": Layout(*PARALLEL[name], RECOMPUTED) for name in ("zero-3", "pipeline-2", "sequence-2")},
    **{f"lamb-{name}": Layout(*PARALLEL[name], LAMB) for name in ("zero-2", "horizontal-2")},
}
ALWAYS = ("pipeline-2", "interleaved-2", "horizontal-2", "recompute-sequence-2")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project.make(tmp_path_factory.mktemp("killed"), dropout=0.1)


@pytest.mark.parametrize("name", rotating(LAYOUTS, ALWAYS))
def test_a_killed_rank_ends_the_attempt_and_the_next_has_the_same_end(name: str, project: Project) -> None:
    ranks, parallel, changes = LAYOUTS[name]
    shape = {**SHAPE, "resources__ranks_per_node": ranks, "parallel": parallel, **changes}
    # One layout keeps MPICH's own choice of sums, which are slow where ranks share cores.
    settings = MPICH_SUMS if name == "horizontal-2" else FEW_CORES
    killed = run_and_kill(project, project.write(name, **shape), rank=ranks - 1, step=2, **settings)
    # Another run times the nodes of the model itself, and may be cut elsewhere.
    for event in of_kind(killed, "stages"):
        shape["parallel"] = {**parallel, "cuts": event["cuts"]}
    file = project.write(f"{name}-undisturbed", **shape)
    done = command("run", file.name, folder=project.folder, timeout=LIMIT, **settings)
    undisturbed = project.run_dir(file.stem)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs(undisturbed)}"
    for rank in range(ranks):
        assert curve(killed, rank) == curve(undisturbed, rank)
    assert evaluations(killed) == evaluations(undisturbed)
    model = Path("export", "model.onnx")
    assert (killed / model).read_bytes() == (undisturbed / model).read_bytes()
