"""A gate before the first step, in runs of two nodes and one in reserve, of which one node is really slow."""

from __future__ import annotations

import json
from pathlib import Path

from messages import mentions
from project import of_kind
from tiny_runs import Tiny, has_traceback

from ortflow.workflow.run.rundir import RunDir

SLOW = str(Path(__file__).parents[1] / "support" / "slow_node")


def test_a_slow_node_is_replaced_by_one_in_reserve(tmp_path: Path) -> None:
    tiny = Tiny.make(
        tmp_path, preflight=True, resources={"nodes": 2, "spares": 1, "cpus_per_rank": 1},
        restart={"failures": 0, "backoff": {"first": 0.0, "limit": 0.0}},
    )  # fmt: skip
    done = tiny.command("run", "run.yaml", timeout=120, PYTHONPATH=SLOW, SLOW_NODE="node2")
    assert done.code == 0, done.said
    assert not has_traceback(done.said)
    records = RunDir(tiny.run_dir).read_attempts()
    starts, ends = ([r for r in records if r["event"] == event] for event in ("start", "end"))
    assert [start["on"] for start in starts] == [["node1", "node2"], ["node1", "node3"]]
    assert [start["elastic"] for start in starts] == [
        "all 2 nodes, 1 node in reserve", "all 2 nodes: node2 is excluded, 0 nodes in reserve",
    ]  # fmt: skip
    assert [end["outcome"] for end in ends] == ["failure", "finished"]
    assert mentions(ends[0]["cause"], "preflight: node node2 computes at …% of its peers' median")
    assert ends[0]["counts"] is False, "with a budget of 0 failures the run would have ended"
    assert list(ends[0]["excludes"]) == ["node2"]
    before, after = of_kind(tiny.run_dir, "preflight")
    assert list(before["nodes"]) == ["node1", "node2"]
    assert list(before["bad"]) == ["node2"]
    assert after["bad"] == {}
    assert 1.5 < after["seconds"] < 40
    assert set(after["nodes"]["node3"]) == {"compute", "copy", "network"}
    assert after["all_reduce"] > 1
    status = json.loads(tiny.command("status", "tiny", "--json").out)
    assert list(status["excluded_nodes"]) == ["node2"]
    assert mentions(status["preflight"], "2 nodes: compute")
    report = json.loads(tiny.command("report", "tiny", "--json").out)
    assert list(report["preflight"]["nodes"]) == ["node1", "node3"]
    assert list(report["excluded_nodes"]) == ["node2"]
    tiny.command("report", "tiny")
    assert "Nodes in the preflight" in (tiny.folder / "tiny.html").read_text()
    assert mentions(done.said, "node2 takes part in no further attempt")


def test_an_elastic_program_goes_on_without_the_slow_node(tmp_path: Path) -> None:
    """The gate is in the rank: the program is not started beside a slow node. Nobody waits for an excluded one."""
    (tmp_path / "train.py").write_text("import os; print('one of', os.environ['WORLD_SIZE'], flush=True)\n")
    (tmp_path / "run.yaml").write_text(
        "name: tiny\nprogram: {script: train.py}\npreflight: true\n"
        "resources: {nodes: 3, min_nodes: 2, cpus_per_rank: 1}\n"
        "restart: {failures: 0, shrink_seconds: 1000, backoff: {first: 0}}\n"
    )
    tiny = Tiny(tmp_path)
    done = tiny.command("run", "run.yaml", timeout=120, PYTHONPATH=SLOW, SLOW_NODE="node2")
    assert done.code == 0, done.said
    assert not has_traceback(done.said)
    starts = [record for record in RunDir(tiny.run_dir).read_attempts() if record["event"] == "start"]
    assert [start["on"] for start in starts] == [["node1", "node2", "node3"], ["node1", "node3"]]
    assert starts[1]["elastic"] == "2 of 3 nodes: node2 is excluded"
    assert "one of 2" in done.said
    assert "one of 3" not in done.said
    assert set(of_kind(tiny.run_dir, "preflight")[1]["nodes"]["node3"]) == {"compute", "copy", "network"}
