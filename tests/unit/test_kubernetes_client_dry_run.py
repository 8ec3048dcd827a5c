"""Faults reported before anything is created: in the documents, and in the pods that would result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_kubernetes import ANSWERS, FakeCluster
from kubernetes_runs import rendered, run_file

from ortflow.launchers.kubernetes.contexts import connect
from ortflow.launchers.kubernetes.dry_run import dry_run, pods
from ortflow.workflow.errors import UserError

Object = dict[str, Any]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    with FakeCluster(tmp_path) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        yield cluster


def refuse_pods(fake: FakeCluster, key: str, only: str = "") -> None:
    def answer(method: str, plural: str, body: Object) -> str | None:
        return key if plural == "pods" and only in body["metadata"]["name"] else None

    fake.refuse = answer


def test_a_pod_of_every_kind() -> None:
    made = {pod["metadata"]["name"]: pod for pod in pods(rendered(run_file({"supervisor": True, "tensorboard": True})))}
    kinds = {name.removeprefix("small-").partition("-")[2]: pod for name, pod in made.items()}
    assert sorted(kinds) == ["", "launcher", "supervisor", "worker-0"]
    for pod in made.values():
        assert "serviceAccountName" not in pod["spec"], "it is created together with the run"
        (owner,) = pod["metadata"]["ownerReferences"]
        assert owner["controller"] is True, "as in pods that controllers create"
    assert kinds["worker-0"]["spec"]["containers"][0]["name"] == "worker"
    assert kinds["worker-0"]["metadata"]["labels"]["ortflow.dev/component"] == "worker"
    assert "ownerReferences" not in rendered(run_file())[-1]["metadata"]


def test_a_foreign_account_stays() -> None:
    found = [*pods(rendered(run_file({"service_account": "me", "namespace": "lab"})))]
    assert [pod["spec"]["serviceAccountName"] for pod in found] == ["me", "me"]
    assert {pod["metadata"]["namespace"] for pod in found} == {"lab"}


@pytest.mark.parametrize(
    "key",
    ["pod_account", "pod_priority", "pod_runtime", "pod_security", "pod_limit", "pod_ratio", "pod_quota_never",
     "quota_needs", "webhook", "policy", "invalid"],
)  # fmt: skip
@pytest.mark.parametrize("only", ["launcher", "worker"])
def test_what_would_never_become_a_pod_is_refused(fake: FakeCluster, key: str, only: str) -> None:
    refuse_pods(fake, key, only)
    with pytest.raises(UserError):
        dry_run(connect(), rendered(run_file()))
    assert all(query.get("dryRun") == "All" for method, _, query in fake.asked if method == "POST")


@pytest.mark.parametrize("key", ["forbidden_pods", "no_dry_run", "pod_quota_now", "pod_default_account"])
def test_what_a_dry_run_cannot_check_is_not_a_refusal(fake: FakeCluster, key: str) -> None:
    assert key in ANSWERS
    refuse_pods(fake, key)
    dry_run(connect(), rendered(run_file()))


def test_a_webhook_that_takes_no_part_in_dry_runs(fake: FakeCluster) -> None:
    fake.refuse = lambda method, plural, body: "no_dry_run" if plural == "mpijobs" else None
    dry_run(connect(), rendered(run_file()))
