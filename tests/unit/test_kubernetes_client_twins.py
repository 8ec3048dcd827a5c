"""Two MPIJobs of one run name: each verb acts on the one that is named, and both stay visible."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_kubernetes import FakeCluster
from kubernetes_objects import NOW, Object, mpijob, stamp

from ortflow.cli.submission import submission_of
from ortflow.launchers.base import Submission
from ortflow.launchers.kubernetes.adopting import adopt
from ortflow.launchers.kubernetes.launcher import KubernetesLauncher
from ortflow.launchers.kubernetes.objects import directory, name
from ortflow.launchers.kubernetes.place import Place, read_place
from ortflow.launchers.kubernetes.snapshot import of_place
from ortflow.launchers.records import State
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.file.load import load_run_file

RUN = """\
name: digits
model: {path: m.onnx, loss: mse}
data: {train: {path: d.arrow}, micro_batch: 1}
train: {steps: 10, optimizer: {name: sgd, lr: 0.1}}
backends: {kubernetes: {image: "localhost/ortflow:test", volume: {claim: mine}}}
"""
FIRST, SECOND = "digits-first1", "digits-second"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    (tmp_path / "run.yaml").write_text(RUN)
    with FakeCluster(tmp_path) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        cluster.add({"kind": "Namespace", "metadata": {"name": "team"}, "status": {"phase": "Active"}})
        yield cluster


def job(called: str, age: float, claim: str = "mine", namespace: str = "default", over: bool = False) -> Object:
    """An MPIJob with the folder's run file in place of its ConfigMap's."""
    made = mpijob(age, now=time.time(), name=called)
    made["metadata"] |= {"uid": called, "namespace": namespace}
    spec = made["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
    spec["volumes"].append({"name": "data", "persistentVolumeClaim": {"claimName": claim}})
    if over:
        made["status"] |= {"conditions": [{"type": "Succeeded", "status": "True"}], "completionTime": stamp(NOW)}
    return made


def beside(made: Object) -> tuple[Object, Object]:
    """The MPIJob and its ConfigMap."""
    metadata = {"name": f"{name(made)}-run", "namespace": made["metadata"]["namespace"]}
    return made, {"kind": "ConfigMap", "metadata": metadata, "data": {"run.yaml": RUN}}


@pytest.mark.parametrize("claim", ["mine", "another"])
def test_each_handle_is_its_own(tmp_path: Path, fake: FakeCluster, claim: str) -> None:
    fake.add(*beside(job(FIRST, 60)), *beside(job(SECOND, 30, claim)))
    runs, launcher = tmp_path / "runs", KubernetesLauncher()
    first, second = (adopt(f"kubernetes://default/{called}", runs) for called in (FIRST, SECOND))
    assert first != second
    assert adopt(f"kubernetes://default/{FIRST}", runs) == first
    assert adopt(f"kubernetes://default/{SECOND}", runs) == second
    assert [launcher.status(run).job for run in (first, second)] == [FIRST, SECOND]
    assert [how.job for how in launcher.statuses([second, first])] == [SECOND, FIRST]
    assert launcher.cancel(first, now=False)
    assert [name(one) for one in fake.of("mpijobs")] == [SECOND]
    assert launcher.status(first).state is State.CANCELLED
    assert launcher.statuses([first])[0].state is State.CANCELLED, "it is not confused with the other"
    assert (launcher.status(second).state, launcher.status(second).job) == (State.PENDING, SECOND)


def test_all_are_listed(tmp_path: Path, fake: FakeCluster) -> None:
    fake.add(*beside(job(FIRST, 60)), *beside(job(SECOND, 30, "another")), job("digits-old", 90, over=True))
    run = adopt(f"kubernetes://default/{FIRST}", tmp_path / "runs")
    listed = KubernetesLauncher().listed([run], everywhere=False)
    assert [how.job for how in listed] == [FIRST, f"kubernetes://default/{SECOND}"]
    strange = KubernetesLauncher().listed([], everywhere=False)
    assert {str(how.job).rpartition("/")[2] for how in strange} == {FIRST, SECOND}, (
        "one for each volume, as for each run"
    )


def test_a_run_is_followed_into_what_follows_it() -> None:
    place = Place("default", "digits", FIRST, volume=directory(job(FIRST, 60)))
    alive, over = job(FIRST, 60), job(FIRST, 60, over=True)
    same, other, older = job(SECOND, 30), job(SECOND, 30, "another"), job("digits-old", 90)
    heir = job("digits-heir", 10, "another")
    heir["metadata"]["ownerReferences"] = [{"kind": "MPIJob", "uid": FIRST}]

    def first(*found: Object, at: Place = place) -> str:
        return name(of_place(found, at)[0]) if of_place(found, at) else ""

    assert first(same, alive) == FIRST, "while it is at work"
    assert first(same, over) == SECOND
    assert first(other, over) == FIRST, "it belongs to another run"
    assert first(heir, other, over) == "digits-heir", "made by the supervisor"
    assert first(over, older) == FIRST
    assert first(same) == SECOND
    assert first(other) == ""
    assert first(same, at=Place("default", "digits", FIRST, apart=(SECOND,))) == ""


def test_a_second_namespace_is_refused(tmp_path: Path, fake: FakeCluster) -> None:
    launcher = KubernetesLauncher()

    def wanted(*overrides: str, fresh: bool = False) -> Submission:
        return submission_of(tmp_path / "run.yaml", overrides, tmp_path / "runs", fresh=fresh, elsewhere=True)

    launcher.submit(launcher.request(wanted()))
    run = RunDir(tmp_path / "runs" / "digits")
    with pytest.raises(UserError, match=r"digits.*namespace default.*another"):
        launcher.submit(launcher.request(wanted("backends.kubernetes.namespace=team")))
    assert fake.of("mpijobs", "team") == []
    assert launcher.status(run).state is State.PENDING
    with pytest.raises(UserError, match=r"another name.*--runs-dir$"):
        launcher.submit(launcher.request(wanted("backends.kubernetes.namespace=team", fresh=True)))
    for record in (
        {"event": "start", "attempt": 0},
        {"event": "end", "attempt": 0, "outcome": "failure", "next": "stop"},
    ):
        run.record_attempt(**record)
    with pytest.raises(UserError, match=r"--fresh.*digits\.1$"):
        launcher.submit(launcher.request(wanted("backends.kubernetes.namespace=team")))
    launcher.submit(launcher.request(wanted("backends.kubernetes.namespace=team", fresh=True)))
    places = [read_place(RunDir(tmp_path / "runs" / folder)) for folder in ("digits", "digits.1")]
    assert [place and place.namespace for place in places] == ["team", "default"]
    assert launcher.status(RunDir(tmp_path / "runs" / "digits.1")).state is State.FAILED, "still visible"


def test_a_resumed_run_stays_in_its_namespace(tmp_path: Path, fake: FakeCluster) -> None:
    """Whatever namespace kubectl has been set to since."""
    fake.add(*beside(job(FIRST, 60, namespace="team", over=True)))
    run, launcher = adopt(f"kubernetes://team/{FIRST}", tmp_path / "runs"), KubernetesLauncher()
    spec = load_run_file(run.run_file, ["train.steps=20"])
    launcher.submit(launcher.request(Submission(spec, run, new_budget=True, overrides=("train.steps=20",))))
    assert len(fake.of("mpijobs", "team")) == 2
    assert fake.of("mpijobs") == []
