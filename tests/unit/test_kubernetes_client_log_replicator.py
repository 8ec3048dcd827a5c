"""The copy of a run's records from launcher pods' logs: complete and without duplicates, despite interruptions."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_kubernetes import FakeCluster
from kubernetes_objects import JOB, NAMESPACE, NOW, RUN, pod
from messages import says

from ortflow.launchers.attempts.locks import hold
from ortflow.launchers.kubernetes import api
from ortflow.launchers.kubernetes import log_replicator as module
from ortflow.launchers.kubernetes.api import Cluster, Refused, Unreachable
from ortflow.launchers.kubernetes.contexts import connect
from ortflow.launchers.kubernetes.links import silent
from ortflow.launchers.kubernetes.log_replicator import LogReplicator
from ortflow.launchers.kubernetes.place import Place, is_real, read_place, write_place
from ortflow.launchers.status import read_status
from ortflow.workflow.run.rundir import RunDir


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    with FakeCluster(tmp_path) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        yield cluster


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "runs" / RUN)
    found.root.mkdir(parents=True)
    write_place(found, Place(NAMESPACE, RUN, JOB, "fake"))
    found.record_attempt(event="submit", launcher="kubernetes", job=JOB)
    return found


def reported(file: str, **record: Any) -> str:
    return "::ortflow " + json.dumps({"file": file, "record": record})


def step(number: int, attempt: int = 0) -> str:
    return reported(
        "events", event="step", attempt=attempt, time=NOW + number + 100 * attempt, step=number, loss=1.0 / number
    )


def again(line: str) -> str:
    """As reported by a pod that is not the first."""
    mark, _, reported = line.partition(" ")
    return f"{mark} {json.dumps({**json.loads(reported), 'again': True})}"


START = reported("attempts", event="start", attempt=0, time=NOW)


def launcher(index: int = 0, **given: Any) -> dict[str, Any]:
    return pod("launcher", index, created=NOW + index, **given)


def sync(run: RunDir, fake: FakeCluster) -> Cluster:
    cluster = connect()
    LogReplicator(run, cluster).sync(cluster.find_all("Pod"))
    return cluster


def steps(run: RunDir) -> list[int]:
    lines = run.events(0).read_text().splitlines()
    return [record["step"] for line in lines if (record := json.loads(line))["event"] == "step"]


def test_everything_is_copied_once(run: RunDir, fake: FakeCluster) -> None:
    one = launcher()
    fake.add(one)
    name = one["metadata"]["name"]
    fake.say(name, "12:00:00  waiting for 2 workers", START, "[0] hello", "[1] hello too", step(1), at=NOW)
    sync(run, fake)
    fake.say(name, "[0] same second", step(2), at=NOW)
    sync(run, fake)
    sync(run, fake)
    fake.say(name, "[0] later", step(3), at=NOW + 1.25)
    sync(run, fake)
    assert steps(run) == [1, 2, 3]
    assert run.log(0, 0).read_text() == "hello\nsame second\nlater\n"
    assert run.log(0, 1).read_text() == "hello too\n"
    assert (run.root / "logs" / "launcher.log").read_text() == "12:00:00  waiting for 2 workers\n"
    assert [record["event"] for record in run.read_attempts()] == ["submit", "start"]
    how = read_status(run, alive=True)
    assert (how.state.value, how.step) == ("running", 3)
    assert [query.get("sinceTime") for _, path, query in fake.asked if path.endswith("/log")][1]


def test_a_new_launcher_pod_continues_without_repetition(run: RunDir, fake: FakeCluster) -> None:
    first = launcher()
    fake.add(first)
    fake.say(first["metadata"]["name"], START, "[0] zero", step(1), step(2), at=NOW)
    sync(run, fake)
    first["status"]["phase"] = "Failed"
    first["status"]["containerStatuses"][0]["state"] = {"terminated": {"exitCode": 1}}
    second = launcher(1)
    fake.add(second)
    end = reported("attempts", event="end", attempt=0, time=NOW + 9, outcome="lost", next="restart")
    start = reported("attempts", event="start", attempt=1, time=NOW + 10)
    back = reported("events", event="rewind", attempt=1, time=NOW + 101, from_step=2, to_step=1)
    lines = (START, end, again(step(1)), again(step(2)), start, back, "[0] one", step(2, 1))
    fake.say(second["metadata"]["name"], *lines, at=NOW + 11)
    sync(run, fake)
    assert [record["event"] for record in run.read_attempts()] == ["submit", "start", "end", "start"]
    assert steps(run) == [1, 2], "the step that was rewound is recorded once"
    assert run.log(0, 0).read_text() == "zero\n"
    assert run.log(1, 0).read_text() == "one\n"
    before = len(fake.asked)
    sync(run, fake)
    assert not any(first["metadata"]["name"] in path for _, path, _ in fake.asked[before:]), "its log is not read again"


def test_the_clock_of_a_rank_is_set_back(run: RunDir, fake: FakeCluster) -> None:
    """Later events are shown; late lines of an earlier attempt are not."""
    first = launcher()
    fake.add(first)
    back = reported("events", event="step", attempt=1, time=NOW - 7200, step=3, loss=0.1)
    fake.say(first["metadata"]["name"], START, step(1), step(2, 1), back, step(4), at=NOW)
    sync(run, fake)
    assert steps(run) == [1, 2, 3]
    second = launcher(1)
    fake.add(second)
    fake.say(second["metadata"]["name"], again(step(2, 1)), again(back), step(4, 2), at=NOW + 11)
    sync(run, fake)
    assert steps(run)[:3] == [1, 2, 3]
    assert steps(run)[-1] == 4


def test_a_full_volume_is_reported_as_long_as_it_is_full(run: RunDir, fake: FakeCluster) -> None:
    one = launcher()
    fake.add(one)
    name = one["metadata"]["name"]
    fake.say(
        name, START, reported("notice"), step(1), reported("notice", path="/ortflow/runs/gpt", needed=2_500_000), at=NOW
    )
    sync(run, fake)
    assert says(read_status(run, alive=True).waits, "out of disk … /ortflow/runs/gpt … 2.5 MB")
    fake.say(name, reported("notice"), at=NOW + 2)
    sync(run, fake)
    assert read_status(run, alive=True).waits is None


def test_a_pod_that_has_reported_nothing_yet_is_known(run: RunDir, fake: FakeCluster) -> None:
    """It may have reported missing space: it waits for that before it reads the run."""
    one = launcher()
    fake.add(one)
    fake.say(one["metadata"]["name"], "12:00:00  out of disk", reported("notice", path="/x", needed=1), at=NOW)
    sync(run, fake)
    assert silent(run) == {one["metadata"]["uid"]}
    fake.say(one["metadata"]["name"], START, at=NOW + 1)
    sync(run, fake)
    assert not silent(run)


def test_a_pod_that_vanishes_and_a_log_that_was_rotated(run: RunDir, fake: FakeCluster) -> None:
    one = launcher()
    fake.add(one)
    name = one["metadata"]["name"]
    fake.say(name, START, step(1), at=NOW)
    cluster = sync(run, fake)
    fake.logs[name] = []
    fake.say(name, step(5), at=NOW + 60)
    sync(run, fake)
    assert steps(run) == [1, 5]
    pods = cluster.find_all("Pod")
    fake.remove("pods", name)
    LogReplicator(run, cluster).sync(pods)
    assert steps(run) == [1, 5]


def test_a_pod_whose_node_does_not_answer_does_not_delay_others(
    run: RunDir, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not reported an attempt, so another pod's is not attributed to it; its log is read later."""
    monkeypatch.setattr(api, "LOG", 0.2)
    first, second = launcher(node="n1"), launcher(1, node="n2")
    first["status"]["phase"] = "Failed"
    fake.add(first, second)
    fake.cut = {"n1"}
    fake.say(first["metadata"]["name"], START, step(1), at=NOW)
    fake.say(second["metadata"]["name"], START, again(step(1)), step(2), at=NOW + 1)
    cluster = connect()
    pods = cluster.find_all("Pod")
    uids = [one["metadata"]["uid"] for one in (first, second)]
    assert LogReplicator(run, cluster).sync(pods) == {uids[0]}
    assert steps(run) == [1, 2]
    assert silent(run) == {uids[0]}
    fake.cut = {"n2"}
    assert LogReplicator(run, cluster).sync(pods) == {uids[1]}
    assert not silent(run)
    fake.cut = set()
    assert not LogReplicator(run, cluster).sync(pods)
    assert steps(run) == [1, 2]


def test_the_api_servers_error_for_a_silent_node(run: RunDir, fake: FakeCluster) -> None:
    """It is silent once the server gives up reaching it; other errors for a log are reported."""
    one = launcher()
    fake.add(one)
    cluster = connect()
    pods = cluster.find_all("Pod")
    fake.refuse = lambda method, plural, body: "no_node"
    assert LogReplicator(run, cluster).sync(pods) == {one["metadata"]["uid"]}
    fake.refuse = lambda method, plural, body: "forbidden_pods"
    with pytest.raises(Refused):
        LogReplicator(run, cluster).sync(pods)


def test_an_absent_api_server_is_not_a_silent_node(run: RunDir, fake: FakeCluster) -> None:
    fake.add(launcher())
    cluster = connect()
    pods = cluster.find_all("Pod")
    fake.away = True
    with pytest.raises(Unreachable):
        LogReplicator(run, cluster).sync(pods)


def test_half_a_line_is_left_for_later(run: RunDir, fake: FakeCluster) -> None:
    one = launcher()
    fake.add(one)
    fake.say(one["metadata"]["name"], START, at=NOW)
    fake.say(one["metadata"]["name"], "[0] a line that is long enough", at=NOW + 0.5)
    fake.tear = 45
    sync(run, fake)
    assert not run.log(0, 0).exists()
    sync(run, fake)
    assert run.log(0, 0).read_text() == "a line that is long enough\n"


def test_a_killed_copy_duplicates_no_line(run: RunDir, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    one = launcher()
    fake.add(one)
    name = one["metadata"]["name"]
    fake.say(name, START, "[0] one", step(1), at=NOW)
    sync(run, fake)
    fake.say(name, "[0] two", step(2), reported("attempts", event="end", attempt=0, time=NOW + 5), at=NOW + 2)

    def dies(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_place", dies)
        with pytest.raises(KeyboardInterrupt):
            sync(run, fake)
    assert "two" in run.log(0, 0).read_text(), "the test kills too early"
    sync(run, fake)
    assert run.log(0, 0).read_text() == "one\ntwo\n"
    assert steps(run) == [1, 2]
    assert [record["event"] for record in run.read_attempts()] == ["submit", "start", "end"]


def test_two_simultaneous_copies_do_not_mix(run: RunDir, fake: FakeCluster) -> None:
    one = launcher()
    fake.add(one)
    fake.say(one["metadata"]["name"], START, "[0] one", at=NOW)
    held = hold(run.root / module.LOCK)
    sync(run, fake)
    assert not run.log(0, 0).exists()
    os.close(held)
    sync(run, fake)
    assert run.log(0, 0).read_text() == "one\n"


def test_the_runs_own_record_of_a_submission_takes_the_place_of_ours(run: RunDir, fake: FakeCluster) -> None:
    one = launcher()
    fake.add(one)
    old = [
        reported("attempts", event="submit", launcher="kubernetes", job="digits-old111", submission="a", time=NOW - 90),
        reported("attempts", event="start", attempt=0, time=NOW - 80),
        reported("attempts", event="end", attempt=0, time=NOW - 70, outcome="failure", next="stop"),
    ]
    new = reported(
        "attempts", event="submit", launcher="kubernetes", job=JOB, submission="b", time=NOW, new_budget=True
    )
    fake.say(one["metadata"]["name"], *old, new, at=NOW)
    sync(run, fake)
    records = run.read_attempts()
    assert [record.get("job") for record in records if record["event"] == "submit"] == ["digits-old111", JOB]
    assert read_status(run, alive=True).state.value == "pending", "the earlier submission failed"


def test_the_plan_comes_along(run: RunDir, fake: FakeCluster) -> None:
    one = launcher()
    fake.add(one)
    fake.say(one["metadata"]["name"], reported("plan", total_steps=7), at=NOW)
    sync(run, fake)
    assert read_status(run, alive=True).total_steps == 7


def test_the_real_run_directory_is_never_written_to(run: RunDir, fake: FakeCluster) -> None:
    one = launcher()
    fake.add(one)
    fake.say(one["metadata"]["name"], START, "[0] one", at=NOW)
    run.owner.write_text("{}")
    before = {path: path.stat().st_mtime_ns for path in run.root.rglob("*")}
    assert is_real(run)
    sync(run, fake)
    assert {path: path.stat().st_mtime_ns for path in run.root.rglob("*")} == before
    run.owner.unlink()
    run.record_attempt(event="start", attempt=0)
    assert is_real(run), "an attempt that is in no log"
    place = read_place(run)
    assert place is not None
    assert not place.cursors


def test_a_broken_cursor_file_is_as_good_as_none(run: RunDir) -> None:
    (run.root / "kubernetes.json").write_text("{")
    assert read_place(run) is None
    (run.root / "kubernetes.json").write_text('{"namespace": "a", "name": "b", "colour": 3}')
    assert read_place(run) is None
