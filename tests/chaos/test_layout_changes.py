"""Runs that go through layouts, step by step, with the curve and the model of one rank.

pytest -m chaos tests/chaos/test_layout_changes.py                               # twenty random changes, and with LAMB
ORTFLOW_LAYOUT_CHANGES=all pytest -m chaos tests/chaos/test_layout_changes.py    # and from each layout into each other
ORTFLOW_PART=3/13 pytest -m chaos tests/chaos/test_layout_changes.py             # and a thirteenth of those
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from kernels import needs_kernels
from layout_table import PARALLEL
from onnx import numpy_helper
from project import FEW_CORES, Project, command, curve, logs, of_kind
from real_ranks import on_ranks
from rotation import PART, piece
from walking_ranks import Stop, write_walk

from ortflow.workflow.checkpoint.load import load
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.run.rundir import RunDir

pytestmark = [pytest.mark.chaos, needs_kernels]
SUPPORT = Path(__file__).parent.parent / "support"
FAULTS = SUPPORT / "faults"
CHANGES = os.environ.get("ORTFLOW_LAYOUT_CHANGES", "20")
SOME = 20 if CHANGES == "all" else int(CHANGES)
SEED = int(os.environ.get("ORTFLOW_SEED", "0")) + 2 * int((PART or "0").partition("/")[0])
"""Each part has random walks of its own."""


class Layout(NamedTuple):
    """One that a run may continue under."""

    ranks: int
    parallel: dict[str, Any]
    nodes: int = 1
    """Of an elastic run: all but the first are lost if there are several."""

    @property
    def micro_batch(self) -> int:
        """Samples of a micro-batch: replicas accumulate two to four, except for the four of data parallelism alone."""
        replicas = self.ranks // (self.parallel.get("pipeline", 1) * self.parallel.get("horizontal", 1))
        return {1: 3, 2: 3, 3: 2, 4: 1 if self.parallel.get("zero") == 3 else 3}[replicas]


LAYOUTS = {
    "one-rank": Layout(1, {}),
    **{name: Layout(*parallel) for name, parallel in PARALLEL.items()},
    "zero-2-of-3": Layout(3, {"zero": 2}),
    "data-2-sequence-2-zero-1": Layout(4, {"horizontal": 2, "data": 2, "zero": 1, "sequence_parallel": True}),
    "elastic-pipeline-2": Layout(2, {"pipeline": 2}, nodes=2),
}
ONE_RANK = LAYOUTS["one-rank"]
LIMIT = 1500
"""Seconds of a walk, at most."""
BATCH = 12
"""Samples of a step: a multiple of every number of replicas."""
# Adam makes steps of the rounding of vanishing gradients, which adds up. With a larger learning rate, so does rounding
# in hundreds of steps: at 0.05 also two layouts that never change differ by 5% after 240.
SGD: dict[str, Any] = {
    "train__optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}, "train__clip_norm": 1.0,
}  # fmt: skip
LAMB: dict[str, Any] = {
    "train__optimizer": {"name": "lamb", "lr": 2e-3, "weight_decay": 0.1}, "train__clip_norm": 0.5,
    "model__recompute": "layers",
}  # fmt: skip


def every_change(places: Iterable[str]) -> list[str]:
    """A closed walk that goes once from each place into each other, those of fewer places first."""
    first, *others = places
    walk = [first]
    for number, place in enumerate(others):
        # first -> place -> 1 -> place -> 2 ... -> place -> first: the changes that the walk over fewer places lacks.
        walk += [stop for before in others[:number] for stop in (place, before)] + [place, first]
    return walk


def random_changes(places: Iterable[str], changes: int, seed: int) -> list[str]:
    places, chance = list(places), random.Random(seed)
    walk = places[:1]
    while len(walk) <= changes:
        walk.append(chance.choice([place for place in places if place != walk[-1]]))
    return walk


def walks() -> list[Any]:
    """The walks of ranks that stay, and what is trained."""
    found = [pytest.param(random_changes(LAYOUTS, SOME, SEED + 1), LAMB, id="lamb")]
    each = every_change(LAYOUTS)
    # Three runs for all: in 700 steps rounding adds up to 1e-5, also between two layouts that never change.
    parts = ("0/3", "1/3", "2/3") if CHANGES == "all" else (PART,) if PART else ()
    return [*found, *(pytest.param(piece(each, part), SGD, id=f"each-into-each-{part}") for part in parts)]


def test_a_walk_makes_each_change_once() -> None:
    walk = every_change("abcde")
    assert sorted(pairwise(walk)) == [(a, b) for a in "abcde" for b in "abcde" if a != b]


def test_every_layout_of_the_table_is_among_those_that_change() -> None:
    assert [name for name, parallel in PARALLEL.items() if LAYOUTS.get(name) != Layout(*parallel)] == []
    assert set(every_change(LAYOUTS)) == LAYOUTS.keys()


def test_a_run_goes_through_layouts(tmp_path: Path) -> None:
    """With new processes for each, started by `ortflow run`."""
    project = Project.make(tmp_path / "layouts", dropout=0.0)
    walk = random_changes(LAYOUTS, SOME, SEED)
    for step, name in enumerate(walk, 1):
        found = trained(project, "changes", LAYOUTS[name], train__steps=step, export__enabled=step == len(walk), **SGD)
    ranks = [LAYOUTS[name].ranks for name in walk]
    ranks[0] *= LAYOUTS[walk[0]].nodes  # a new run has lost none
    starts = [record for record in RunDir(found).read_attempts() if record["event"] == "start"]
    assert [start["world_size"] for start in starts] == ranks
    alone = trained(project, "alone", ONE_RANK, train__steps=len(walk), **SGD)
    same(found, alone, walk, moments=1)
    here, there = exported(found), exported(alone)
    for name, tensor in there.items():
        np.testing.assert_allclose(here[name], tensor, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("walk", "training"), walks())
def test_ranks_go_through_layouts(walk: list[str], training: dict[str, Any], tmp_path: Path) -> None:
    """With processes that stay: they end a layout with a checkpoint, and resume under the next."""
    project = Project.make(tmp_path / "layouts", dropout=0.0)
    kept = {key: value for key, value in training.items() if key != "model__recompute"}
    alone = trained(project, "alone", ONE_RANK, train__steps=len(walk), **kept)
    run_dir = project.run_dir("changes")
    run_dir.mkdir()
    stops = []
    for step, name in enumerate(walk, 1):
        layout = LAYOUTS[name]
        shape = {**shape_of(layout), **training, "train__steps": step, "train__check_gradient": False}
        file = project.write(f"step-{step}", **shape, export__enabled=False, data__eval=None, model__metrics=[])
        stops.append(Stop(name, layout.ranks, 1, str(file)))
    program = str(SUPPORT / "walking_ranks.py")
    walk_file = write_walk(project.folder / "walk", stops)
    printed = on_ranks(4, program, str(run_dir), str(walk_file), timeout=LIMIT, **FEW_CORES)
    assert printed.count("good") == 4, printed
    worlds = [record["world_size"] for record in of_kind(run_dir, "resume")]
    assert worlds == [LAYOUTS[name].ranks for name in walk[1:]]
    same(run_dir, alone, walk, moments=1 if training is SGD else 2)
    (here, there) = (load(DirectoryStore(each / "checkpoints"), len(walk)) for each in (run_dir, alone))
    assert here.buffers.keys() == there.buffers.keys()
    for name, values in there.buffers.items():
        np.testing.assert_allclose(here.buffers[name], values, rtol=1e-5, atol=1e-5, err_msg=name)


def same(found: Path, alone: Path, walk: list[str], moments: int) -> None:
    """Each resume has the bits of the checkpoint, and the curve is that of one rank."""
    resumes = list(range(1, len(walk)))
    assert [record["step"] for record in of_kind(found, "resume")] == resumes
    compared = of_kind(found, "compared")
    assert [(record["step"], len(record["buffers"])) for record in compared] == [(at, 1 + moments) for at in resumes]
    for (step, loss, norm, _), (same_step, same_loss, same_norm, _) in zip(curve(found), curve(alone), strict=True):
        about = f"seed {SEED}, step {step} under {walk[step - 1]}"
        assert step == same_step
        assert (loss, norm) == pytest.approx((same_loss, same_norm), rel=1e-5), about


def shape_of(layout: Layout) -> dict[str, Any]:
    """The keys of a run file that depend on the layout, and those that all have."""
    resources: dict[str, Any] = {"ranks_per_node": layout.ranks, "cpus_per_rank": 1}
    if layout.nodes > 1:
        resources |= {"nodes": layout.nodes, "min_nodes": 1}
    return {
        "train__global_batch": BATCH, "data__micro_batch": layout.micro_batch, "resources": resources,
        "parallel": layout.parallel, "train__schedule": {"name": "constant"}, "train__evaluation": None,
        "restart": {"failures": 0, "shrink_seconds": 0.1},
    }  # fmt: skip


def trained(project: Project, name: str, layout: Layout, **changes: Any) -> Path:
    """The directory of a run that goes to a step under a layout; an elastic one has lost all nodes but one."""
    run_dir = project.run_dir(name)
    (run_dir / ".lost_nodes").unlink(missing_ok=True)
    if run_dir.exists():
        lost = [f"node{number}\n" for number in range(2, layout.nodes + 1)]
        (run_dir / ".lost_nodes").write_text("".join(lost))
    file = project.write(name, **shape_of(layout), **changes)
    settings = {"PYTHONPATH": str(FAULTS), "RESUMED": "1", **FEW_CORES}
    done = command("run", file.name, folder=project.folder, timeout=300, **settings)
    assert done.returncode == 0, f"{layout}\n{done.stdout}\n{done.stderr}\n{logs(run_dir)}"
    return run_dir


def exported(run_dir: Path) -> dict[str, npt.NDArray[Any]]:
    model = onnx.load(run_dir / "export" / "model.onnx")
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
