"""The launcher against an API server over real HTTP: runs are created completely or not at all, followed, ended."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_clock import FakeClock
from fake_kubernetes import FakeCluster
from kubernetes_objects import NOW, Object, event, mpijob, pod, stamp
from messages import mentions
from waits import PATIENCE

from ortflow.cli.status import overview
from ortflow.cli.submission import submission_of
from ortflow.launchers.base import Submission
from ortflow.launchers.kubernetes.adopting import adopt
from ortflow.launchers.kubernetes.folder import unpack
from ortflow.launchers.kubernetes.launcher import KubernetesLauncher
from ortflow.launchers.kubernetes.links import LONGEST, Links
from ortflow.launchers.kubernetes.place import read_place
from ortflow.launchers.kubernetes.pod import Pod
from ortflow.launchers.kubernetes.reconciler import DeletePod, reconcile
from ortflow.launchers.kubernetes.snapshot import take_snapshot
from ortflow.launchers.records import State
from ortflow.launchers.remote.bootstrap import BROUGHT
from ortflow.launchers.supervision.following import POLL, Follower
from ortflow.launchers.view.plain import PlainView
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.restart import Restart

RUN = """\
name: digits
prepare: [python, prepare.py]
model: {path: m.onnx, loss: mse}
data: {train: {path: d.arrow}, micro_batch: 1}
train: {steps: 10, optimizer: {name: sgd, lr: 0.1}}
resources: {nodes: 2}
backends:
  kubernetes:
    image: localhost/ortflow:test
    files: [prepare.py]
    volume: {create: {size: 1Gi}}
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "prepare.py").write_text("print('ready')\n")
    with FakeCluster(tmp_path) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        yield cluster


def wanted(folder: Path, *overrides: str, **given: Any) -> Submission:
    return submission_of(folder / "run.yaml", overrides, folder / "runs", elsewhere=True, **given)


def submit(folder: Path, *overrides: str, **given: Any) -> str:
    launcher = KubernetesLauncher()
    return launcher.submit(launcher.request(wanted(folder, *overrides, **given)))


def directory(folder: Path) -> RunDir:
    return RunDir(folder / "runs" / "digits")


def kinds(fake: FakeCluster) -> list[str]:
    return sorted(kind for kind, namespace, _ in fake.objects if namespace)


def job_of(folder: Path) -> str:
    place = read_place(directory(folder))
    assert place is not None
    return str(place.job)


def launcher_pod(job: str, index: int = 0, **given: Any) -> Object:
    made = pod("launcher", index, created=time.time(), **given)
    made["metadata"]["name"] = f"{job}-launcher-{index}"
    made["metadata"]["labels"]["ortflow.dev/job"] = job
    return made


def worker_pods(job: str) -> list[Object]:
    made = [pod("worker", index) for index in range(2)]
    for index, one in enumerate(made):
        one["metadata"]["name"] = f"{job}-worker-{index}"
        one["metadata"]["labels"]["ortflow.dev/job"] = job
    return made


def reported(file: str, **record: Any) -> str:
    return "::ortflow " + json.dumps({"file": file, "record": record})


def start(fake: FakeCluster, job: str) -> str:
    """Start the run as operator and supervisor process do; the launcher pod's name."""
    fake.objects["mpijobs", "default", job]["status"] = mpijob()["status"]
    made = launcher_pod(job)
    fake.add(made, *worker_pods(job))
    name = str(made["metadata"]["name"])
    fake.say(
        name,
        reported("attempts", event="submit", launcher="kubernetes", job=job, submission="x", time=NOW),
        reported("attempts", event="start", attempt=0, time=NOW + 1),
        "[0] hello",
        *(
            reported(
                "events", event="step", attempt=0, time=NOW + 1.7 + n / 10, step=n, loss=0.5, seconds=0.1, samples=4
            )
            for n in (1, 2, 3)
        ),
    )
    return name


def finish(fake: FakeCluster, job: str, name: str) -> None:
    fake.say(
        name,
        "[0] goodbye",
        reported("events", event="finished", attempt=0, time=NOW + 9, step=10),
        reported("attempts", event="end", attempt=0, time=NOW + 10, outcome="finished", next="stop", cause="finished"),
    )
    done = {"conditions": [{"type": "Succeeded", "status": "True"}], "completionTime": stamp(NOW)}
    fake.objects["mpijobs", "default", job]["status"] = done
    fake.objects["pods", "default", name]["status"]["phase"] = "Succeeded"


def test_the_request_contacts_no_server(tmp_path: Path, fake: FakeCluster) -> None:
    text = str(KubernetesLauncher().request(wanted(tmp_path)))
    assert text == str(KubernetesLauncher().request(wanted(tmp_path)))
    assert "kind: MPIJob" in text
    assert "print('ready')" in text
    assert "path: m.onnx" in text or '"path":"m.onnx"' in text, "paths are those in the pods"
    assert fake.asked == []
    assert not (tmp_path / "runs").exists()


def test_submit_dry_runs_creates_and_sets_owners(tmp_path: Path, fake: FakeCluster) -> None:
    handle = submit(tmp_path)
    job = job_of(tmp_path)
    assert handle == f"kubernetes://default/{job}"
    assert kinds(fake) == ["configmaps", "mpijobs", "persistentvolumeclaims", "serviceaccounts"]
    created = [(path.rpartition("/")[2], query.get("dryRun")) for method, path, query in fake.asked if method == "POST"]
    rehearsed = [kind for kind, dry in created if dry]
    assert sorted(rehearsed) == sorted([*(kind for kind, dry in created if not dry), "pods", "pods"])
    assert len(fake.asked) == 13, "each request delays the user"
    assert [dry for _, dry in created[: len(rehearsed)]] == ["All"] * len(rehearsed), (
        "all dry runs before the first object is created"
    )
    assert created[-1] == ("mpijobs", None)
    uid = fake.objects["mpijobs", "default", job]["metadata"]["uid"]
    for kind in ("configmaps", "serviceaccounts"):
        (thing,) = fake.of(kind)
        assert [owner["uid"] for owner in thing["metadata"]["ownerReferences"]] == [uid], kind
    (claim,) = fake.of("persistentvolumeclaims")
    assert "ownerReferences" not in claim["metadata"]
    fake.remove("mpijobs", job)
    assert kinds(fake) == ["persistentvolumeclaims"], "only the volume is left"


@pytest.mark.parametrize(
    ("method", "kind", "answer", "words"),
    [
        ("POST", "mpijobs", "quota", r"quota of namespace default .*MPIJob"),
        ("POST", "mpijobs", "webhook", "images must come from the house's registry"),
        ("POST", "mpijobs", "unknown_field", "there is no field spec.slotPerWorker"),
        ("POST", "configmaps", "forbidden_create", "may not create configmaps"),
        ("POST", "serviceaccounts", "no_namespace", "there is no namespace default"),
        ("POST", "pods", "pod_security", "security level restricted"),
        ("POST", "pods", "pod_priority", "there is no priority class urgent"),
        ("GET", "mpijobs", "forbidden_list", "may not list mpijobs"),
        ("GET", "mpijobs", "unauthorised", "does not accept the credentials"),
    ],
)
def test_nothing_is_made_where_something_is_refused(
    tmp_path: Path, fake: FakeCluster, method: str, kind: str, answer: str, words: str
) -> None:
    fake.refuse = lambda how, plural, body: answer if (how, plural) == (method, kind) else None
    with pytest.raises(UserError, match=words):
        submit(tmp_path)
    assert kinds(fake) == []
    assert all(query.get("dryRun") for how, _, query in fake.asked if how == "POST")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("method", "kind"), [("POST", "mpijobs"), ("POST", "configmaps"), ("PATCH", "configmaps")])
def test_what_was_made_is_taken_away_again(tmp_path: Path, fake: FakeCluster, method: str, kind: str) -> None:
    rehearsed = 0

    def refuse(how: str, plural: str, body: Object) -> str | None:
        nonlocal rehearsed
        if (how, plural) != (method, kind):
            return None
        rehearsed += 1
        return "webhook" if method == "PATCH" or rehearsed == 2 else None

    fake.refuse = refuse
    with pytest.raises(UserError, match="refuses"):
        submit(tmp_path)
    assert kinds(fake) == []
    assert not (tmp_path / "runs").exists()


def test_a_claim_that_is_there_is_used_and_survives_a_failure(tmp_path: Path, fake: FakeCluster) -> None:
    mine = {"kind": "PersistentVolumeClaim", "metadata": {"name": "digits-data", "namespace": "default", "uid": "mine"}}
    fake.add(mine)
    fake.refuse = lambda how, plural, body: "webhook" if how == "PATCH" else None
    with pytest.raises(UserError):
        submit(tmp_path)
    assert kinds(fake) == ["persistentvolumeclaims"]
    fake.refuse = lambda how, plural, body: None
    submit(tmp_path)
    assert [one["metadata"]["uid"] for one in fake.of("persistentvolumeclaims")] == ["mine"]


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({}, "the mpi-operator .* is not installed"),
        ({"v1": ["mpijobs", "tfjobs"]}, "old training-operator: it serves v1"),
        ({"v2beta1": ["others"]}, "is not installed"),
    ],
)
def test_no_operator_or_the_old_one(
    tmp_path: Path, fake: FakeCluster, versions: dict[str, list[str]], words: str
) -> None:
    fake.versions = versions
    with pytest.raises(UserError, match=words):
        submit(tmp_path)
    assert not (tmp_path / "runs").exists()


def test_an_api_server_that_is_away(tmp_path: Path, fake: FakeCluster) -> None:
    fake.away = True
    with pytest.raises(OrtflowError, match=r"does not answer.*nothing was submitted"):
        submit(tmp_path)
    clock = FakeClock()
    clock.after(50.0, lambda: setattr(fake, "away", False))
    launcher = KubernetesLauncher(Links(clock=clock))
    launcher.submit(launcher.request(replace(wanted(tmp_path), retry=100)))
    assert len(fake.of("mpijobs")) == 1
    assert sum(clock.sleeps) == pytest.approx(50.0, abs=2.0)


def test_a_run_is_never_there_twice(tmp_path: Path, fake: FakeCluster) -> None:
    submit(tmp_path)
    job = job_of(tmp_path)
    with pytest.raises(UserError, match=f"digits .*MPIJob {job} .*default"):
        submit(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("run.yaml", "prepare.py"):
        (elsewhere / name).write_text((tmp_path / name).read_text())
    with pytest.raises(UserError, match="the run digits is pending"):
        submit(elsewhere)
    assert len(fake.of("mpijobs")) == 1


def test_status_and_logs_follow_the_run(tmp_path: Path, fake: FakeCluster) -> None:
    submit(tmp_path)
    job, run, launcher = job_of(tmp_path), directory(tmp_path), KubernetesLauncher()
    how = launcher.status(run)
    assert (how.state, how.job, how.total_steps) == (State.PENDING, job, 10)
    name = start(fake, job)
    how = launcher.status(run)
    assert (how.state, how.step, how.loss, how.nodes) == (State.RUNNING, 3, 0.5, "n1")
    assert how.seconds_left == pytest.approx(0.7)
    assert list(launcher.logs(run, attempt=None, rank=0, follow=False)) == ["hello"]
    lines: list[str] = []
    follower = threading.Thread(target=lambda: lines.extend(launcher.logs(run, attempt=None, rank=0, follow=True)))
    follower.start()
    finish(fake, job, name)
    follower.join(PATIENCE)
    assert lines == ["hello", "goodbye"]
    fake.remove("mpijobs", job)
    fake.remove("pods", name)
    assert launcher.status(run).state is State.FINISHED
    assert list(launcher.logs(run, attempt=None, rank=0, follow=False)) == ["hello", "goodbye"], "the pods are gone"


def test_following_continues_after_an_outage(
    tmp_path: Path, fake: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(tmp_path)
    clock = FakeClock()
    job, run, launcher = job_of(tmp_path), directory(tmp_path), KubernetesLauncher(Links(clock=clock))
    name = start(fake, job)
    changed = {"event": "changed", "attempt": 0, "notes": ["resources.nodes: 2 before, 1 now"]}
    asked: list[int] = []

    def away() -> None:
        assert any(record["event"] == "changed" for record in run.read_attempts())
        fake.away = True

    def back() -> None:
        asked.append(len(fake.asked))
        fake.away = False
        finish(fake, job, name)

    clock.after(1.0, lambda: fake.say(name, reported("attempts", **changed)))
    clock.after(1.0 + 2 * POLL, away)
    clock.after(120.0, back)
    begun = clock.now
    assert Follower(run, launcher, PlainView(run, 1), clock).follow().code == 0
    assert clock.now - begun <= 120.0 + LONGEST + 2 * POLL
    out = capsys.readouterr().out
    assert out.count("does not answer") == 1, out
    assert out.count("resources.nodes: 2 before, 1 now") == 1, "which is only in the run's own directory"
    assert "finished" in out
    assert len(fake.asked) > asked[0]


def test_status_while_the_api_server_is_away(tmp_path: Path, fake: FakeCluster) -> None:
    submit(tmp_path)
    job, run = job_of(tmp_path), directory(tmp_path)
    start(fake, job)
    KubernetesLauncher().status(run)
    fake.away = True
    how = KubernetesLauncher().status(run)
    assert (how.state, how.step) == (State.RUNNING, 3)
    assert "does not answer" in (how.waits or "")
    (many,) = KubernetesLauncher().statuses([run])
    assert "does not answer" in (many.waits or "")


def test_cancel_reads_to_the_end(tmp_path: Path, fake: FakeCluster) -> None:
    submit(tmp_path)
    clock = FakeClock()
    job, run, launcher = job_of(tmp_path), directory(tmp_path), KubernetesLauncher(Links(clock=clock))
    name = start(fake, job)

    def ends() -> None:
        step = reported("events", event="step", attempt=0, time=NOW + 5, step=4, loss=0.4)
        fake.say(name, step, "[0] saved at step 4")
        time.sleep(0.2)
        end = {"event": "end", "attempt": 0, "time": NOW + 6, "outcome": "preempted", "next": "restart"}
        fake.say(name, reported("attempts", **end))
        for one in fake.of("pods"):
            fake.remove("pods", one["metadata"]["name"])

    fake.deleted = lambda plural, what: threading.Timer(0.2, ends).start() if plural == "mpijobs" else None
    assert launcher.cancel(run, now=False)
    how = launcher.status(run)
    assert (how.state, how.step) == (State.CANCELLED, 4)
    assert [record["event"] for record in run.read_attempts()] == ["submit", "start", "end", "stop"]
    assert kinds(fake) == ["persistentvolumeclaims"]
    assert not launcher.cancel(run, now=False)


def test_cancel_now_does_not_ask_pods_to_save(tmp_path: Path, fake: FakeCluster) -> None:
    submit(tmp_path)
    job, run = job_of(tmp_path), directory(tmp_path)
    start(fake, job)
    assert KubernetesLauncher().cancel(run, now=True)
    assert fake.of("pods") == []
    assert KubernetesLauncher().status(run).state is State.CANCELLED


@pytest.mark.parametrize("ahead", [-300.0, 300.0])
def test_our_clock_is_not_that_of_the_cluster(tmp_path: Path, fake: FakeCluster, ahead: float) -> None:
    """A pod with 5 s left to terminate is not considered to be on a lost node, and a new MPIJob is new."""
    submit(tmp_path)
    fake.ahead = ahead
    job, run = job_of(tmp_path), directory(tmp_path)
    there = fake.of("mpijobs")[0]
    there["metadata"]["creationTimestamp"] = stamp(time.time() + ahead)
    assert "has not processed it yet" in str(KubernetesLauncher().status(run).waits)
    start(fake, job)
    leaving = worker_pods(job)[0]
    leaving["metadata"]["deletionTimestamp"] = stamp(time.time() + ahead + 5)
    fake.add(leaving)
    cluster, place = Links().of(run)
    view = take_snapshot(cluster, place)
    assert not [one for one in reconcile(view, run.read_attempts(), Restart()) if isinstance(one, DeletePod)]
    assert "should have ended" not in str(KubernetesLauncher().status(run).waits)
    leaving["metadata"]["deletionTimestamp"] = stamp(time.time() + ahead - 20)
    (found,) = reconcile(take_snapshot(cluster, place), run.read_attempts(), Restart())
    assert isinstance(found, DeletePod)
    assert found.force


def test_what_kubectl_made_is_swept_up_too(tmp_path: Path, fake: FakeCluster) -> None:
    from ortflow.manifests.kubernetes import Placement, documents

    one = wanted(tmp_path)
    assert one.source is not None
    made = documents(one.source, one.spec, Placement(namespace="default", contents={"prepare.py": "x"}))
    for document in made:
        document["metadata"]["namespace"] = "default"
    fake.add(*made)
    job = next(document["metadata"]["name"] for document in made if document["kind"] == "MPIJob")
    run = adopt(f"kubernetes://default/{job}", tmp_path / "runs")
    assert run.root.name == "digits"
    assert KubernetesLauncher().status(run).state is State.PENDING
    assert KubernetesLauncher().cancel(run, now=False)
    assert kinds(fake) == ["persistentvolumeclaims"]


def test_a_finished_run_is_resumed_with_more_steps(tmp_path: Path, fake: FakeCluster) -> None:
    submit(tmp_path)
    first, run, launcher = job_of(tmp_path), directory(tmp_path), KubernetesLauncher()
    finish(fake, first, start(fake, first))
    assert launcher.status(run).state is State.FINISHED
    changes = ("train.steps=20", "train.optimizer.lr=0.5")
    spec = load_run_file(run.run_file, changes)
    launcher.submit(launcher.request(Submission(spec, run, new_budget=True, overrides=changes)))
    assert job_of(tmp_path) != first
    carried = load_run_file(run.root / "kubernetes" / "run.yaml")
    assert (carried.train.steps, carried.train.optimizer.lr) == (20, 0.5)
    (changed,) = [record for record in run.read_attempts() if record["event"] == "changed"]
    assert "train.steps: 10 before, 20 now" in changed["notes"]


def test_a_run_is_adopted_and_resumed_where_it_was_unknown(tmp_path: Path, fake: FakeCluster) -> None:
    submit(tmp_path)
    job = job_of(tmp_path)
    name = start(fake, job)
    other = tmp_path / "other"
    run = adopt(f"kubernetes://default/{job}", other)
    launcher = KubernetesLauncher()
    assert launcher.status(run).state is State.RUNNING
    assert list(launcher.logs(run, attempt=None, rank=0, follow=False)) == ["hello"]
    assert adopt(f"kubernetes://default/{job}", other) == run
    again = Submission(launcher.request(wanted(tmp_path)).payload.spec, run, new_budget=True)
    with pytest.raises(UserError, match="the run digits is running"):
        launcher.submit(launcher.request(again))
    end = {"event": "end", "attempt": 0, "time": NOW + 6, "outcome": "failure", "next": "stop"}
    fake.say(name, reported("attempts", **end))
    handle = launcher.submit(launcher.request(again))
    (new,) = fake.of("mpijobs")
    assert handle.endswith(new["metadata"]["name"]), "the failed one would continue to retry"
    assert new["metadata"]["name"] != job
    env = new["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "ORTFLOW_NEW_BUDGET", "value": "1"} in env
    (carried,) = fake.of("configmaps")
    assert "print('ready')\n" in carried["data"].values()
    assert run.read_attempts()[-1]["new_budget"] is True


@pytest.mark.parametrize(
    ("handle", "words"),
    [
        ("kubernetes://default", "write kubernetes://NAMESPACE/MPIJOB"),
        ("kubernetes://default/nobody", "no MPIJob nobody"),
    ],
)
def test_handles_that_name_nothing(tmp_path: Path, fake: FakeCluster, handle: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        adopt(handle, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_lists_across_namespaces(tmp_path: Path, fake: FakeCluster) -> None:
    submit(tmp_path)
    there = mpijob(now=time.time(), name="foreign-abc123")
    there["metadata"] |= {"namespace": "team", "uid": "f"}
    there["metadata"]["labels"] |= {"ortflow.dev/run": "foreign"}
    fake.add(there)
    launcher, run = KubernetesLauncher(), directory(tmp_path)
    assert [how.name for how in launcher.listed([run], everywhere=False)] == ["digits"]
    before = len(fake.asked)
    ours, foreign = launcher.listed([run], everywhere=True)
    assert (ours.name, foreign.name, foreign.job) == ("digits", "foreign", "kubernetes://team/foreign-abc123")
    assert len([path for _, path, _ in fake.asked[before:] if path.endswith("/mpijobs")]) == 2


def test_a_submission_from_elsewhere_is_seen(tmp_path: Path, fake: FakeCluster) -> None:
    submit(tmp_path)
    job, run = job_of(tmp_path), directory(tmp_path)
    finish(fake, job, start(fake, job))
    assert KubernetesLauncher().status(run).state is State.FINISHED
    fake.remove("mpijobs", job)
    other = mpijob(now=time.time(), name="digits-zzz999")
    other["metadata"]["uid"] = "other"
    fake.add(other)
    how = KubernetesLauncher().status(run)
    assert (how.state, how.job) == (State.PENDING, "digits-zzz999")


def test_what_the_operator_refuses_stays_refused(tmp_path: Path, fake: FakeCluster) -> None:
    """In both status and list, also when the event is gone."""
    submit(tmp_path)
    job, run, launcher = job_of(tmp_path), directory(tmp_path), KubernetesLauncher()
    made = event(job, "ValidationError", "Found validation errors: spec.x: Unsupported value")
    fake.add({"kind": "Event", **made})
    (listed,) = launcher.listed([], everywhere=False)
    words = "operator … MPIJob: spec.x: Unsupported value"
    assert listed.state is State.FAILED
    assert mentions(listed.cause or "", words)
    assert [how.state for how in launcher.statuses([run])] == [State.FAILED]
    fake.remove("events", made["metadata"]["name"])
    how = launcher.status(run)
    assert how.state is State.FAILED
    assert mentions(how.cause or "", words)
    assert [record["event"] for record in run.read_attempts()] == ["submit", "stop"]
    launcher.submit(launcher.request(wanted(tmp_path)))
    assert launcher.status(run).state is State.PENDING, "a new submission is examined again"


def test_a_quota_for_one_of_two_workers_is_named(tmp_path: Path, fake: FakeCluster) -> None:
    """While the launcher pod and the other worker are there."""
    submit(tmp_path)
    job, run, launcher = job_of(tmp_path), directory(tmp_path), KubernetesLauncher()
    start(fake, job)
    fake.remove("pods", f"{job}-worker-1")
    assert mentions(launcher.status(run).waits or "", "waiting for workers … 1 of 2")
    words = 'pods "x" is forbidden: exceeded quota: q'
    made = event(job, "MPIJobFailed", f"worker pod created failed: {words}")
    fake.add({"kind": "Event", **made, "lastTimestamp": stamp(time.time() + 1)})
    assert launcher.status(run).waits == f"no pod can be made: {words}"


def test_a_run_of_a_deleted_crd_is_not_running(tmp_path: Path, fake: FakeCluster) -> None:
    submit(tmp_path)
    job, run, launcher = job_of(tmp_path), directory(tmp_path), KubernetesLauncher()
    start(fake, job)
    assert launcher.status(run).state is State.RUNNING
    fake.refuse = lambda method, plural, body: "no_kind" if plural == "mpijobs" else None
    assert launcher.status(run).state is State.RUNNING, "while the API server starts it may not know its kinds"
    fake.versions = {}
    for how in (launcher.status(run), *launcher.statuses([run])):
        assert (how.state, how.phase) == (State.LOST, None)
        assert "mpijobs.kubeflow.org was deleted" in how.cause


def test_logs_of_a_run_that_never_started_give_the_reason(tmp_path: Path, fake: FakeCluster) -> None:
    submit(tmp_path)
    job, run, launcher = job_of(tmp_path), directory(tmp_path), KubernetesLauncher()
    with pytest.raises(UserError, match=r"digits.*pending"):
        list(launcher.logs(run, attempt=None, rank=0, follow=False))
    name = start(fake, job)
    fake.logs[name] = []
    fake.say(name, "12:00:00  the image has no mpich")
    output = {"terminated": {"exitCode": 2, "message": "backends.kubernetes.mpi: the image has no mpich"}}
    (ended,) = [one for one in fake.of("pods") if one["metadata"]["name"] == name]
    ended["status"] |= {"phase": "Failed", "containerStatuses": [{"name": "launcher", "state": output}]}
    for follow in (False, True):
        with pytest.raises(
            UserError,
            match=r"no mpich.*launcher\.log$",
        ):
            list(launcher.logs(run, attempt=None, rank=0, follow=follow))


def test_a_small_file_that_is_missing_or_not_text(tmp_path: Path, fake: FakeCluster) -> None:
    (tmp_path / "prepare.py").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"backends\.kubernetes\.files: prepare\.py is not text"):
        submit(tmp_path)
    (tmp_path / "prepare.py").unlink()
    with pytest.raises(UserError, match=r"prepare\.py cannot be read: No such file"):
        submit(tmp_path)
    assert fake.asked == []


def test_carried_files_come_where_nothing_but_bytes_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a bucket, or in a folder that another user shares with a group."""
    files, folder = tmp_path / "config" / "files", tmp_path / "volume"
    (files / "sub").mkdir(parents=True)
    (files / "sub" / "a.py").write_text("a")
    folder.mkdir()

    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    for name in ("chmod", "utime", "setxattr", "chown"):
        monkeypatch.setattr("os." + name, refuse)
    unpack(Pod("job", "id", tmp_path / "config" / "run.yaml", tmp_path, 2222, False, False), folder)
    assert (folder / "sub" / "a.py").read_text() == "a"


def test_carried_files_replace_only_what_was_carried(tmp_path: Path) -> None:
    data, folder, outside = tmp_path / "config" / "..data", tmp_path / "volume", tmp_path / "outside"
    (data / "sub").mkdir(parents=True)
    outside.mkdir()
    (outside / "far.py").write_text("precious")
    folder.mkdir()
    (folder / "own.py").write_text("precious")
    (folder / "far.py").symlink_to(outside / "far.py")
    files = tmp_path / "config" / "files"
    files.mkdir()
    pod = Pod("job", "id", tmp_path / "config" / "run.yaml", tmp_path, 2222, False, False)
    for text in ("first", "second"):
        for name in ("own.py", "far.py", "sub/new.py"):
            (data / name).write_text(text)
            (files / name).parent.mkdir(exist_ok=True)
            if not (files / name).exists():
                (files / name).symlink_to(data / name)
        unpack(pod, folder)
        for name in ("own.py", "far.py", "sub/new.py"):
            assert (folder / name).read_text() == text
    assert (folder / "own.py.1").read_text() == "precious"
    assert (outside / "far.py").read_text() == "precious"
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.name != BROUGHT}
    assert names == {"own.py", "own.py.1", "far.py", "far.py.1", "sub", "sub/new.py"}


def test_cancel_deletes_what_an_mpijob_left_that_was_deleted_alone(tmp_path: Path, fake: FakeCluster) -> None:
    submit(tmp_path)
    job, run, launcher = job_of(tmp_path), directory(tmp_path), KubernetesLauncher()
    start(fake, job)
    fake.add({"kind": "Job", "metadata": {"name": f"{job}-launcher", "namespace": "default"}, "spec": {}})
    del fake.objects["mpijobs", "default", job]
    how = launcher.status(run)
    assert how.state is State.RUNNING
    assert "`ortflow cancel`" in (how.waits or "")
    assert launcher.cancel(run, now=False)
    assert fake.of("pods") == fake.of("jobs") == []
    assert launcher.status(run).state is State.CANCELLED


def test_a_run_whose_log_was_deleted_before_it_was_read(tmp_path: Path, fake: FakeCluster) -> None:
    """Its time to live expired while nobody asked: it has finished, and nothing is known of its steps."""
    submit(tmp_path)
    job, run, launcher = job_of(tmp_path), directory(tmp_path), KubernetesLauncher()
    done = {"conditions": [{"type": "Succeeded", "status": "True"}], "completionTime": "2026-11-28T00:00:00Z"}
    fake.objects["mpijobs", "default", job]["status"] = done
    how = launcher.status(run)
    assert how.state is State.FINISHED
    assert overview([how], 0.0)[1][2] == "-"
    with pytest.raises(UserError, match=r"no log of digits.*time_to_live.*volume"):
        list(launcher.logs(run, attempt=None, rank=0, follow=False))
