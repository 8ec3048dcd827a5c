"""Repairs of a run that the operator cannot recover, and that nothing else is done."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_clock import FakeClock
from fake_kubernetes import FakeCluster
from kubernetes_objects import JOB, NAMESPACE, NOW, RUN, Object, batch_job, event, mpijob, pod, stamp
from messages import alike, says

from ortflow.launchers.kubernetes import api, avoidance
from ortflow.launchers.kubernetes import supervise as module
from ortflow.launchers.kubernetes.contexts import connect
from ortflow.launchers.kubernetes.links import Links
from ortflow.launchers.kubernetes.place import Place, write_place
from ortflow.launchers.kubernetes.reasons import end_reason
from ortflow.launchers.kubernetes.reconciler import (
    Action,
    AvoidNodes,
    DeletePod,
    Done,
    EndRetries,
    Resubmit,
    reconcile,
    submissions_without_attempt,
)
from ortflow.launchers.kubernetes.retries import Retries
from ortflow.launchers.kubernetes.snapshot import View
from ortflow.launchers.kubernetes.supervise import BIRTH, PERIOD, SupervisedRun, successor, supervise
from ortflow.launchers.records import Outcome
from ortflow.launchers.status import read_status
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.restart import Backoff, Restart

SUBMIT = {"event": "submit", "launcher": "kubernetes", "job": JOB}
START = {"event": "start", "attempt": 0}
RUNNING = [SUBMIT, START]
RESTART = Restart(failures=2, backoff=Backoff(first=0.0))
PAUSE = 40.0
"""Seconds before a run is submitted again."""
FAILED = [("Failed", "True", "BackoffLimitExceeded", "Job has reached the specified backoff limit")]


def actions(records: list[dict[str, Any]], pods: list[Object], restart: Restart = RESTART, **view: Any) -> list[Action]:
    given = {"mpijob": mpijob(), "job": batch_job(), "events": [], **view}
    return reconcile(View(given["mpijob"], NOW, given["job"], pods, given["events"]), records, restart)


def over(**given: Any) -> Object:
    return mpijob(conditions=FAILED, completionTime=stamp(NOW), **given)


def test_nothing_is_done_to_a_healthy_run() -> None:
    pods = [pod("worker", 0), pod("worker", 1, phase="Pending", node="", ready=False), pod("launcher")]
    assert actions(RUNNING, pods) == []
    assert actions(RUNNING, [pod("worker", 0, deleted=NOW + 40), pod("launcher", phase="Failed")]) == []
    assert actions(RUNNING, [], mpijob=mpijob(suspend=True)) == []


def test_dead_workers_are_deleted() -> None:
    evicted = pod("worker", 0, phase="Failed", reason="Evicted")
    succeeded = pod("worker", 1, phase="Succeeded", uid="u1")
    found = actions(RUNNING, [evicted, succeeded, pod("launcher", phase="Failed")])
    assert [(one.name, one.force) for one in found if isinstance(one, DeletePod)] == [
        (f"{JOB}-worker-0", False), (f"{JOB}-worker-1", False),
    ]  # fmt: skip
    assert len(found) == 2


def test_pods_on_lost_nodes_are_removed_by_force_and_only_when_late() -> None:
    assert actions(RUNNING, [pod("worker", 0, deleted=NOW - 10)]) == []
    (found,) = actions(RUNNING, [pod("worker", 0, node="n2", deleted=NOW - 16)])
    assert isinstance(found, DeletePod)
    assert found.force
    assert says(str(found), f"… lost pod {JOB}-worker-0 … node n2 …")
    assert not found.held
    held = pod("launcher", deleted=NOW - 16)
    held["metadata"]["finalizers"] = ["batch.kubernetes.io/job-tracking"]
    (launcher,) = actions(RUNNING, [held])
    assert isinstance(launcher, DeletePod)
    assert launcher.held, "the operator's Job replaces no launcher that has not failed"


def test_workers_of_excluded_nodes_come_back_elsewhere() -> None:
    """First the template, or the operator would create a worker by the old one."""
    end = {"event": "end", "attempt": 0, "outcome": "failure", "next": "restart", "excludes": {"n2": "slow"}}
    records = [*RUNNING, end]
    pods = [pod("worker", 0, node="n1"), pod("worker", 1, node="n2"), pod("worker", 2, node="n2", deleted=NOW + 9)]
    dead = pod("worker", 3, node="n3", phase="Failed")
    assert [type(one) for one in actions(records, [*pods, dead])] == [AvoidNodes, DeletePod]
    assert actions(records, pods) == [AvoidNodes(("n2",))]
    job = mpijob()
    merge(job, avoidance.change(job, ["n2"]))
    assert avoidance.avoided(job) == {"n2"}
    (found,) = actions(records, pods, mpijob=job)
    assert isinstance(found, DeletePod)
    assert says(str(found), f"deleting pod {JOB}-worker-1: its node n2 takes part in no attempt")
    assert actions([*records, {"event": "submit", "new_budget": True}], pods, mpijob=job) == []


def merge(thing: Object, change: Object) -> None:
    """A merge patch (RFC 7386)."""
    for key, value in change.items():
        if isinstance(value, dict):
            merge(thing.setdefault(key, {}), value)
        else:
            thing[key] = value


def test_an_affinity_of_the_user_stays() -> None:
    gpu = {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    given = {"nodeAffinity": {required: {"nodeSelectorTerms": [gpu, zone]}}, "podAffinity": {"x": 1}}
    found = avoidance.avoiding(avoidance.avoiding(given, ["n1"]), ["n1", "n2"])
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in ("n1", "n2")]
    terms = [{**gpu, "matchFields": fields}, {**zone, "matchFields": fields}]
    assert found == {"nodeAffinity": {required: {"nodeSelectorTerms": terms}}, "podAffinity": {"x": 1}}
    assert given["podAffinity"] == {"x": 1}
    assert "matchFields" not in gpu


@pytest.mark.parametrize("outcome", ["failure", "user_error"])
def test_retries_of_a_run_that_has_ended_are_ended(outcome: str) -> None:
    ended = [*RUNNING, {"event": "end", "attempt": 0, "outcome": outcome, "next": "stop"}]
    dead = pod("worker", 0, phase="Succeeded")
    assert [type(one) for one in actions(ended, [dead])] == [EndRetries]
    assert actions(ended, [], job=batch_job(limit=0)) == []
    assert [type(one) for one in actions(ended, [], mpijob=over())] == [Done]


def test_a_finished_run_is_left_to_the_operator() -> None:
    done = [*RUNNING, {"event": "end", "attempt": 0, "outcome": "finished", "next": "stop"}]
    assert actions(done, [pod("worker", 0)]) == []
    succeeded = mpijob(conditions=[("Succeeded", "True", "", "")], completionTime=stamp(NOW))
    assert [str(one) for one in actions(done, [], mpijob=succeeded)] == ["the run has ended: finished"]


def test_wrong_input_is_not_tried_again() -> None:
    output = pod("launcher", phase="Failed", state={"terminated": {"exitCode": 2, "message": "no such file"}})
    (found,) = actions([SUBMIT], [output])
    assert isinstance(found, EndRetries)
    (ended,) = actions([SUBMIT], [output], mpijob=over())
    assert isinstance(ended, Done)
    assert ended.outcome is Outcome.USER_ERROR


def test_a_run_that_the_operator_gave_up_is_submitted_again() -> None:
    (found,) = actions(RUNNING, [pod("launcher", phase="Failed")], mpijob=over())
    assert isinstance(found, Resubmit)
    assert "counts against no budget" in found.why


def test_submissions_without_an_attempt_spend_the_budget_of_failures() -> None:
    records: list[dict[str, Any]] = [*RUNNING]
    for number in range(2):
        records.append({**SUBMIT, "job": f"digits-{number}"})
        (found,) = actions(records, [pod("launcher", phase="Failed")], mpijob=over())
        assert isinstance(found, Resubmit), number
    records.append({**SUBMIT, "job": "digits-2"})
    assert submissions_without_attempt(records) == 3
    (found,) = actions(records, [pod("launcher", phase="Failed")], mpijob=over())
    assert isinstance(found, Done)
    assert found.outcome is Outcome.FAILURE
    assert "the budget of 2 failures is spent" in found.why


def test_preemptions_spend_only_their_own() -> None:
    target = [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]
    taken = pod("launcher", phase="Failed", conditions=target)
    failures = [{"event": "end", "attempt": n, "outcome": "failure", "next": "restart", "step": n} for n in range(2)]
    records = [*RUNNING, *failures, {**START, "attempt": 2}]
    (found,) = actions(records, [taken], mpijob=over())
    assert isinstance(found, Resubmit)
    (none_left,) = actions(records, [taken], Restart(failures=2, preemptions=0), mpijob=over())
    assert isinstance(none_left, Done)


def test_ends_that_need_no_reconciliation() -> None:
    (gone,) = actions(RUNNING, [], mpijob=None)
    assert isinstance(gone, Done)
    late = mpijob(conditions=[("Failed", "True", "DeadlineExceeded", "")], completionTime=stamp(NOW))
    (deadline,) = actions(RUNNING, [], mpijob=late)
    assert isinstance(deadline, Done)
    assert deadline.outcome is Outcome.PREEMPTED
    (refused,) = actions([SUBMIT], [], mpijob=mpijob(conditions=[]), events=[event(JOB, "ValidationError", "wrong")])
    assert isinstance(refused, Done)


def test_the_successor_is_the_same_run_under_another_name() -> None:
    old = mpijob()
    old["metadata"] |= {"resourceVersion": "7", "managedFields": [], "annotations": {"a": "b"}}
    new = successor(old, "zzz999")
    assert new["metadata"]["name"] == "digits-zzz999"
    assert new["metadata"]["labels"]["ortflow.dev/job"] == "digits-zzz999"
    assert new["metadata"]["labels"]["ortflow.dev/run"] == RUN
    assert [owner["name"] for owner in new["metadata"]["ownerReferences"]] == [JOB]
    assert set(new) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(new["metadata"]) == {"name", "namespace", "labels", "annotations", "ownerReferences"}
    launcher = new["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]
    assert launcher["metadata"]["labels"]["ortflow.dev/job"] == "digits-zzz999"
    assert launcher["spec"]["containers"][0]["env"] == [{"name": "ORTFLOW_JOB", "value": "digits-zzz999"}]
    assert launcher["spec"]["volumes"][0]["configMap"]["name"] == f"{JOB}-run", "owned by the first one"
    assert old["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["env"][0]["value"] == JOB
    third = successor({**new, "metadata": {**new["metadata"], "uid": "other"}}, "yyy888")
    assert third["metadata"]["name"] == "digits-yyy888"
    assert [owner["name"] for owner in third["metadata"]["ownerReferences"]] == [JOB], "all are owned by the first"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    with FakeCluster(tmp_path) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        yield cluster


def test_the_loop_repairs_resubmits_and_ends(fake: FakeCluster, tmp_path: Path) -> None:
    run, clock, messages = RunDir(tmp_path / "run"), FakeClock(), list[str]()
    for record in (SUBMIT, START):
        run.record_attempt(**record)
    fake.add(mpijob(now=NOW), batch_job(), pod("worker", 0, phase="Failed"), pod("worker", 1), pod("launcher"))

    def away() -> None:
        assert messages == [f"deleting dead pod {JOB}-worker-0: {end_reason(pod('worker', 0, phase='Failed'))}"]
        fake.away = True

    def gives_up() -> None:
        assert len([text for text in messages if "does not answer" in text]) == 1, "reported once"
        fake.away = False
        fake.objects["mpijobs", NAMESPACE, JOB]["status"] = over()["status"]

    def finishes() -> None:
        new = next(one for one in fake.of("mpijobs") if one["metadata"]["name"] != JOB)
        assert run.read_attempts()[-1]["follows"] == JOB
        assert run.read_attempts()[-1]["job"] == new["metadata"]["name"]
        run.record_attempt(event="start", attempt=1)
        run.record_attempt(event="end", attempt=1, outcome="finished", next="stop")
        new["status"] = {"conditions": [{"type": "Succeeded", "status": "True"}], "completionTime": stamp(NOW)}

    clock.after(0.5 * PERIOD, away)
    clock.after(3.5 * PERIOD, gives_up)
    clock.after(4.5 * PERIOD + PAUSE, finishes)
    restart = Restart(failures=2, backoff=Backoff(first=PAUSE))
    assert supervise(SupervisedRun(run, Place(NAMESPACE, RUN, JOB), restart), connect(), messages.append, clock) == 0, (
        messages
    )
    assert clock.sleeps == [PERIOD] * 4 + [PAUSE, PERIOD]


EXCLUSION = {"event": "end", "attempt": 0, "outcome": "failure", "next": "restart", "excludes": {"n2": "slow"}}


@pytest.mark.parametrize(("answer", "tries"), [("policy", 1), ("webhook_broken", 5)])
def test_an_exclusion_that_the_api_server_refuses(fake: FakeCluster, tmp_path: Path, answer: str, tries: int) -> None:
    """It is tried less and less often, keeps no other action waiting, and in the end the run goes on without it."""
    run, clock, messages = RunDir(tmp_path / "run"), FakeClock(), list[str]()
    for record in (SUBMIT, START, EXCLUSION):
        run.record_attempt(**record)
    dead, excluded_worker = pod("worker", 0, phase="Failed"), pod("worker", 1, node="n2")
    fake.add(mpijob(now=NOW), batch_job(), dead, excluded_worker, pod("launcher"))
    fake.refuse = lambda method, plural, body: answer if (method, plural) == ("PATCH", "mpijobs") else None
    clock.after(100 * PERIOD, lambda: fake.remove("mpijobs", JOB, NAMESPACE))
    supervise(SupervisedRun(run, Place(NAMESPACE, RUN, JOB), RESTART), connect(), messages.append, clock)
    assert len([one for one in fake.asked if one[0] == "PATCH"]) == tries
    waits = ["… trying again, later each time"] if tries > 1 else []
    stays, deletes = "… workers stay on n2", f"deleting dead pod {JOB}-worker-0: …"
    avoids, ends = "new workers are on other nodes than n2", "the MPIJob was deleted"
    assert alike(messages, [avoids, *waits, deletes, stays, ends] if waits else [avoids, stays, deletes, ends])
    (record,) = [one for one in run.read_attempts() if one["event"] == "retain"]
    (reason,) = read_status(run).excluded_nodes.values()
    assert reason == f"slow; its worker stays there: {record['why']}"


def test_the_first_refused_action_that_is_due_bounds_a_wait() -> None:
    clock = FakeClock()
    retries = Retries(PERIOD, clock)
    assert retries.seconds_left() == math.inf
    retries.refused("second")
    clock.sleep(1.0)
    retries.refused("first")
    assert retries.seconds_left() == pytest.approx(PERIOD - 1.0)
    clock.sleep(PERIOD)
    assert retries.is_due("first")
    assert retries.seconds_left() == 0.0
    retries.refused("second")
    retries.forget_others(["second"])
    assert retries.seconds_left() == pytest.approx(2 * PERIOD)


def test_what_the_api_server_refuses_for_good_keeps_nothing_else_waiting(fake: FakeCluster, tmp_path: Path) -> None:
    run, clock, messages = RunDir(tmp_path / "run"), FakeClock(), list[str]()
    for record in (SUBMIT, START):
        run.record_attempt(**record)
    lost, dead = pod("worker", 0, deleted=NOW - 60), pod("worker", 1, phase="Failed")
    lost["metadata"]["finalizers"] = ["batch.kubernetes.io/job-tracking"]
    fake.add(mpijob(now=NOW), batch_job(), lost, dead, pod("launcher"))
    fake.refuse = lambda method, plural, body: "forbidden_pods" if (method, plural) == ("PATCH", "pods") else None
    clock.after(200 * PERIOD, lambda: fake.remove("mpijobs", JOB, NAMESPACE))
    supervise(SupervisedRun(run, Place(NAMESPACE, RUN, JOB), RESTART), connect(), messages.append, clock)
    assert dead not in fake.of("pods")
    assert 5 <= len([one for one in fake.asked if one[0] == "PATCH"]) < 10, "in ten minutes"
    assert len(messages) == 4, messages


def test_in_a_terminal_a_launcher_pod_on_a_lost_node_is_replaced(
    fake: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log, which cannot be read, is not waited for."""
    monkeypatch.setattr(api, "LOG", 0.2)
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    write_place(run, Place(NAMESPACE, RUN, JOB, "fake"))
    for record in RUNNING:
        run.record_attempt(**record)
    run.run_file.write_text(
        f"name: {RUN}\nmodel: {{path: m.onnx, loss: mse}}\ndata: {{train: {{path: d.arrow}}, micro_batch: 1}}\n"
        "train: {steps: 10, optimizer: {name: sgd, lr: 0.1}}\n"
    )
    lost = pod("launcher", node="n2", deleted=time.time() - 60)
    fake.add(mpijob(now=time.time()), batch_job(), pod("worker", 0), pod("worker", 1), lost)
    fake.cut = {"n2"}
    fake.deleted = lambda plural, name: fake.remove("mpijobs", JOB, NAMESPACE)
    messages: list[str] = []
    module.in_terminal(run, Links(), messages.append)
    name = lost["metadata"]["name"]
    assert alike(messages, [f"… lost pod {name} … node n2 …", "the MPIJob was deleted"])


def test_a_supervisor_that_comes_before_the_mpijob_waits_for_it(fake: FakeCluster, tmp_path: Path) -> None:
    messages, clock = list[str](), FakeClock()
    charge, begun = SupervisedRun(RunDir(tmp_path / "run"), Place(NAMESPACE, RUN, JOB), RESTART), clock.now
    assert supervise(charge, connect(), messages.append, clock) == 1
    assert messages == ["the MPIJob was deleted"]
    assert BIRTH <= clock.now - begun <= BIRTH + PERIOD


def test_in_the_cluster_it_reads_the_run_directory_on_the_volume(
    fake: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"name: {RUN}\nmodel: {{path: m.onnx, loss: mse}}\ndata: {{train: {{path: d.arrow}}, micro_batch: 1}}\n"
        "train: {steps: 10, optimizer: {name: sgd, lr: 0.1}}\n"
    )
    run = RunDir(tmp_path / "volume" / "runs" / RUN)
    run.root.mkdir(parents=True)
    for record in (*RUNNING, {"event": "end", "attempt": 0, "outcome": "failure", "next": "stop"}):
        run.record_attempt(**record)
    fake.add(over(now=NOW))
    monkeypatch.setenv("ORTFLOW_RUN_FILE", str(file))
    monkeypatch.setenv("ORTFLOW_MOUNT", str(tmp_path / "volume"))
    monkeypatch.setattr(module.signal, "signal", lambda number, handler: None)
    assert module.main(["--namespace", NAMESPACE, "--job", JOB]) == 0, "the Job has succeeded"
    assert "the run has ended: failed" in capsys.readouterr().out
