"""A node of a real Slurm is really slow: another replaces it, from the job's reserve or in a new start elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, Run, rank_processes
from cluster import slow as slowed
from messages import mentions
from project import of_kind
from testbed import wait_until

SLOW = str(Path(__file__).parents[1] / "support" / "slow_node")
SHAPE: dict[str, Any] = {
    "train__steps": 6,
    "preflight": True,
    "restart": {"failures": 0, "preemptions": 0, "backoff": {"first": 0.0, "limit": 0.0}},
}


def shape(spares: int) -> dict[str, Any]:
    each = {"ranks_per_node": 1, "cpus_per_rank": 1, "memory": "1Gi"}
    return {**SHAPE, "resources": {"nodes": 2, "spares": spares, **each}}


@pytest.mark.parametrize("spares", [pytest.param(1, id="reserve"), pytest.param(0, id="requeued")])
def test_a_slow_node_is_replaced(spares: int, cluster_of: Cluster) -> None:
    slow = cluster_of.testbed.nodes[1]
    file = cluster_of.write(f"slow-{spares}", **shape(spares))
    done = cluster_of.ortflow("submit", "--backend", "slurm", file.name, PYTHONPATH=SLOW, SLOW_NODE=slow)
    assert done.returncode == 0, done.stdout + done.stderr

    run = Run(cluster_of, f"slow-{spares}")
    run.finish()
    first, second = run.records("end")
    assert mentions(first["cause"], f"preflight: node {slow} … of its peers' median"), run.transcript()
    assert list(first["excludes"]) == [slow]
    assert first["counts"] is False
    assert second["outcome"] == "finished"
    assert run.restarts == (0 if spares else 1), run.transcript()
    hosts = {event["host"] for rank in range(2) for event in of_kind(run.run_dir, "attempt_start", rank)[1:]}
    assert len(hosts) == 2
    assert slow not in hosts
    if not spares:
        assert run.testbed.job(run.job)["ExcNodeList"] == slow
    assert list(run.status()["excluded_nodes"]) == [slow]


def test_a_lost_node_is_replaced_within_the_job(cluster_of: Cluster) -> None:
    """With nodes in reserve, a job outlives the loss of one (--no-kill), and need not wait in the queue again."""
    run = cluster_of.submit("lost-in-job", **{**shape(1), "train__steps": 30, **slowed(0.5), "preflight": False})
    run.until_step(6)
    lost = run.testbed.hosts(run.job)[1]
    run.testbed.node("off", lost)
    run.finish()
    first, second = run.records("start")
    assert lost in first["on"]
    assert lost not in second["on"]
    assert run.outcomes() == ["lost", "finished"], run.transcript()
    assert run.records("end")[0]["blamed"] == [lost]
    assert run.restarts == 0, run.transcript()
    assert mentions(second["elastic"], f"{lost} is lost … 0 nodes in reserve")


def test_the_doctor_names_a_slow_node(cluster_of: Cluster) -> None:
    slow = cluster_of.testbed.nodes[1]
    file = cluster_of.write("doctored-slow", **shape(0))
    words = ["doctor", "--backend", "slurm", "--json", file.name, "--job"]
    done = cluster_of.ortflow(*words, PYTHONPATH=SLOW, SLOW_NODE=slow)
    found = {line["about"]: line for line in json.loads(done.stdout)["findings"]}
    assert found["preflight"]["level"] == "fault", done.stdout
    assert mentions(found["preflight"]["what"], f"{slow} … of its peers' median")
    assert set(found["preflight"]["data"]["nodes"][slow]) == {"compute", "copy", "network"}


@pytest.mark.parametrize("others", [pytest.param(True, id="excluded"), pytest.param(False, id="stays")])
def test_a_node_on_which_ranks_die_twice(others: bool, cluster_of: Cluster) -> None:
    """Another node takes its place; a run on all nodes keeps it, because nothing else could."""
    restart = {"failures": 3, "preemptions": 0, "backoff": {"first": 0.0, "limit": 0.0}}
    changes = {**shape(0), "train__steps": 30, **slowed(0.3, attempts=2), "preflight": False, "restart": restart}
    if not others:
        changes["resources"] = {**changes["resources"], "nodes": len(cluster_of.testbed.nodes)}
        changes["train__global_batch"] = 32
    run = cluster_of.submit("dies-twice-and-goes" if others else "dies-twice-and-stays", **changes)
    run.until_step(6)
    [node] = {event["host"] for event in of_kind(run.run_dir, "attempt_start", 1)}
    for attempt in range(2):
        run.until_attempt(attempt, 8 + attempt)
        rank_processes(run.run_dir)[1].kill()
        wait_until(lambda end=attempt + 1: len(run.records("end")) == end, 120, run.transcript)
    run.finish()
    ends = run.records("end")
    assert [end["outcome"] for end in ends] == ["failure", "failure", "finished"], run.transcript()
    assert [end.get("blamed") for end in ends] == [[node], [node], None]
    assert run.status()["failures"] == 2, "they count as before"
    assert run.restarts == (1 if others else 0)
    hosts = {event["host"] for event in of_kind(run.run_dir, "attempt_start", 1)[2:]}
    assert (node in hosts) is not others
    if others:
        assert list(ends[1]["excludes"]) == [node]
        assert mentions(ends[1]["excludes"][node], "two attempts … rank 1 was killed by SIGKILL")
    else:
        assert "excludes" not in ends[1]
        assert mentions(run.transcript(), f"{node}: blamed for the ends of two attempts, and stays"), run.transcript()


def test_too_few_nodes_are_left(cluster_of: Cluster) -> None:
    slow = cluster_of.testbed.nodes[1]
    four = {**shape(0), "resources": {"nodes": 4, "ranks_per_node": 1, "cpus_per_rank": 1, "memory": "1Gi"}}
    file = cluster_of.write("too-few", **four, train__global_batch=32)
    done = cluster_of.ortflow("submit", "--backend", "slurm", file.name, PYTHONPATH=SLOW, SLOW_NODE=slow)
    assert done.returncode == 0, done.stdout + done.stderr
    run = Run(cluster_of, "too-few")
    wait_until(lambda: run.records("end"), 120.0, run.transcript)
    wait_until(lambda: run.testbed.job(run.job)["ExcNodeList"] == slow, 120, run.transcript)
    wait_until(lambda: "excluded" in (run.status()["waits"] or ""), 120, run.transcript)
    status = run.status()
    assert list(status["excluded_nodes"]) == [slow]
    assert mentions(status["waits"], f"{slow} is excluded"), status["waits"]
    assert status["state"] == "restarting"
    cluster_of.ortflow("cancel", "too-few")
