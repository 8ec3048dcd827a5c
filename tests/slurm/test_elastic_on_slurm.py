"""A run that names a range of nodes: one is switched off in the middle of it, and on again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cluster import ENDS, Cluster, slow
from messages import says
from project import Project, curve, evaluations, of_kind
from testbed import Testbed, wait_until

SHAPE: dict[str, Any] = {
    "data__micro_batch": 2,
    "train__global_batch": 24,
    "train__steps": 40,
    "train__optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1},
    "train__schedule": {"name": "constant"},
    "checkpoint__every_steps": 4,
    "restart": {
        "failures": 0, "preemptions": 0, "grow_seconds": 2.0, "backoff": {"first": 0.0, "limit": 0.0},
    },
}  # fmt: skip
NODES = {"nodes": 4, "min_nodes": 2, "ranks_per_node": 1, "cpus_per_rank": 1, "memory": "1Gi"}


@pytest.fixture
def without_dropout(testbed: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """Dropout would draw other masks on another number of ranks."""
    return Cluster(testbed, Project.make(tmp_path_factory.mktemp("elastic"), dropout=0.0))


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("node", "mpi"),
    [
        pytest.param(2, "pmi2", id="ranks-alone"),
        # The batch script and the run supervisor are lost, too: nobody records the end of the attempt.
        pytest.param(0, "pmi2", id="batch-script"),
        pytest.param(2, "mpirun", id="mpirun", marks=pytest.mark.chaos),
        pytest.param(0, "mpirun", id="batch-script-mpirun", marks=pytest.mark.chaos),
    ],
)
def test_a_node_is_lost_and_comes_back(node: int, mpi: str, without_dropout: Cluster) -> None:
    testbed, project = without_dropout.testbed, without_dropout.project
    name = f"elastic-{node}-{mpi}"
    run = without_dropout.submit(name, **SHAPE, resources=NODES, backends__slurm__mpi=mpi, **slow(0.5, attempts=2))
    run.until_step(7)
    lost = testbed.hosts(run.job)[node]
    testbed.node("off", lost)
    undisturbed = project.run("undisturbed", **SHAPE, resources={"ranks_per_node": 1})
    wait_until(lambda: len(run.records("start")) == 2, ENDS, run.transcript)
    assert run.records("start")[1]["elastic"] == f"3 of 4 nodes: {lost} is lost"
    assert run.restarts == 1, "the job itself starts again"
    run.until_attempt(1, 10)
    assert says(run.status()["ranks"], f"3 … 3 of 4 nodes … {lost} is lost")
    assert "3 of 4" in without_dropout.ortflow("list").stdout
    testbed.node("start", lost)
    run.finish()

    # Slurm repeats the end of the first step 60 s later to the node that is back, whose rank has the same step again.
    repeated = {end["attempt"] for end in run.records("end") if "step of an earlier start" in end["cause"]}
    starts, ends = (
        [record for record in run.records(kind) if record["attempt"] not in repeated] for kind in ("start", "end")
    )
    assert [(start["nodes"], start["world_size"]) for start in starts] == [(4, 4), (3, 3), (4, 4)], run.transcript()
    assert [end["outcome"] for end in ends] == ["lost", "preempted", "finished"]
    assert "4 of 4 nodes are there again" in ends[1]["cause"]
    assert (run.status()["failures"], run.status()["preemptions"]) == (0, 0), "neither counts"
    elastic = [event for event in of_kind(run.run_dir, "elastic") if event["attempt"] not in repeated]
    assert [event["gradient_accumulation"] for event in elastic] == [3, 4, 3]
    assert {event["samples"] for event in of_kind(run.run_dir, "step")} == {24}
    np.testing.assert_allclose(curve(run.run_dir), curve(undisturbed), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(evaluations(run.run_dir), evaluations(undisturbed), rtol=1e-5, atol=1e-6)
