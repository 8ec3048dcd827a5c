"""Grids of ranks in the run file: a step's samples are divided among the replicas, and the ranks of one share its."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import write_batches
from messages import alike, mentions
from run_files import spec_of

from ortflow.launchers.changes import batch_messages, continued_run, division
from ortflow.workflow.data.inputs import BatchInput, Limits
from ortflow.workflow.errors import UserError
from ortflow.workflow.parallel.grid import Grid
from ortflow.workflow.ranks import Place
from ortflow.workflow.run.progress import Progress
from ortflow.workflow.spec.checks.batch import undivided
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.steps.run_plan import Plan, resolve
from ortflow.workflow.steps.shard import Stream

TRAIN = {"steps": 4, "optimizer": {"name": "adamw", "lr": 0.1}}


def spec(
    ranks: int, samples: dict[str, Any] | None = None, train: dict[str, Any] | None = None, **parallel: int
) -> TrainerRunSpec:
    return spec_of(
        resources={"ranks_per_node": ranks}, parallel=parallel, train={**TRAIN, **(train or {})},
        data={"train": {"path": "t.arrow"}, "micro_batch": 2, **(samples or {})},
    )  # fmt: skip


def plan_of(run: TrainerRunSpec, samples: int = 40) -> Plan:
    return resolve(run, samples=samples, data="", parameters=1, fingerprint="", graphs={})


def test_replicas_share_the_samples_of_a_step() -> None:
    for ranks, parallel, copies in (
        (4, {}, 4), (4, {"pipeline": 2}, 2), (4, {"pipeline": 4}, 1), (4, {"horizontal": 2}, 2),
        (8, {"pipeline": 2, "horizontal": 2}, 2), (8, {"data": 2, "pipeline": 4}, 2),
    ):  # fmt: skip
        run = spec(ranks, train={"gradient_accumulation": 3}, **parallel)
        assert run.grid.world_size == ranks
        assert (run.replicas, run.global_batch, run.accumulation) == (copies, copies * 6, 3)
        plan = plan_of(run)
        assert (plan.world_size, plan.replicas, plan.global_batch) == (ranks, copies, copies * 6)
        assert plan.steps_per_epoch == 40 // (copies * 6)
        assert spec(ranks, train={"global_batch": 24}, **parallel).accumulation == 12 // copies


def test_a_plan_without_replicas_has_as_many_as_ranks(tmp_path: Path) -> None:
    path, plan = tmp_path / "plan.json", plan_of(spec(4, pipeline=2))
    plan.save(path)
    assert Plan.load(path) == plan
    body = json.loads(path.read_text())
    del body["hash"], body["replicas"]
    path.write_text(json.dumps(body))
    assert Plan.load(path).replicas == 4
    body["replicas"] = "2"
    path.write_text(json.dumps(body))
    with pytest.raises(ValueError, match="replicas is '2'"):
        Plan.load(path)


def test_what_replicas_do_not_divide_is_said_in_ranks() -> None:
    error = undivided(10, 2, Grid(2, 2))
    assert isinstance(error, UserError)
    assert mentions(error.what, "10 samples", "2 replicas of 2 ranks x 2", "data.micro_batch")
    assert mentions(
        error.fix, "data.micro_batch=1", "2 ranks or 10 ranks", "train.global_batch=8 or train.global_batch=12"
    )
    assert undivided(12, 2, Grid(2, 2)) is None


def test_a_run_keeps_its_batch_under_another_grid() -> None:
    before, now = spec(2), spec(4, horizontal=2, pipeline=2)
    assert continued_run(before, now, 4).accumulation == 2
    assert alike(
        batch_messages(before, continued_run(before, now, 4), 4),
        ["… keeps … 4 samples … 1 replica of 4 ranks x micro_batch 2 x gradient_accumulation 2"],
    )
    assert division(spec(4, pipeline=2), 8) == "2 replicas of 2 ranks x micro_batch 2 x gradient_accumulation 2"


def test_ranks_of_a_replica_read_the_same_samples(tmp_path: Path) -> None:
    write_batches(tmp_path / "t.arrow", {"x": np.arange(32, dtype=np.float32).reshape(32, 1)})
    data = {"train": {"path": str(tmp_path / "t.arrow")}, "eval": {"path": str(tmp_path / "t.arrow")}, "shuffle": False}
    run = spec(8, data, {"gradient_accumulation": 2}, pipeline=2, horizontal=2)
    inputs = [BatchInput("x", "float32", (None, 1), "data")]
    read, evaluated = [], []
    for rank in range(8):
        place = Place(rank, 8, rank, 8, "none", "here")
        stream = Stream(run, plan_of(run, 32), inputs, Limits({}), place, Progress())
        read.append([batch.arrays["x"].ravel().tolist() for batch in stream.next().micro_batches])
        evaluated.append([batch.arrays["x"].ravel().tolist() for batch in stream.evaluation()])
        stream.close()
    for rank in range(8):
        replica = run.grid.place(rank).data
        assert read[rank] == [[2 * replica, 2 * replica + 1], [4 + 2 * replica, 5 + 2 * replica]]
        assert evaluated[rank] == [[4 * k + 2 * replica, 4 * k + 2 * replica + 1] for k in range(8)]
