"""The doctor: one correct line for each subject: if it exists, if it is missing and if it cannot be read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_kubernetes import FakeCluster
from kubernetes_objects import Object
from kubernetes_runs import rendered, run_file
from messages import mentions

from ortflow.cli.doctor import submission_to_check
from ortflow.launchers.findings import Finding, Level
from ortflow.launchers.kubernetes import checks
from ortflow.launchers.kubernetes.doctor import examine_kubernetes
from ortflow.launchers.kubernetes.quantity import parse, show

RUN = """\
name: digits
model: {path: m.onnx, loss: mse}
data: {train: {path: d.arrow}, micro_batch: 1}
train: {steps: 10, optimizer: {name: sgd, lr: 0.1}}
resources: {nodes: 2, ranks_per_node: 2, cpus_per_rank: 1, memory: 1Gi}
backends: {kubernetes: {image: "localhost/ortflow:test", volume: {create: {size: 1Gi}}}}
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    (tmp_path / "run.yaml").write_text(RUN)
    with FakeCluster(tmp_path) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        yield cluster


def node(name: str, memory: str = "8Gi", **spec: Any) -> Object:
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kind": "big"}},
        "spec": spec,
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {"cpu": "4", "memory": memory, "nvidia.com/gpu": "1"},
        },
    }


def lease(age: float = 1.0, ahead: float = 0.0, server_ahead: float = 0.0) -> Object:
    """A lease renewed by an operator whose clock is ahead, read through an API server whose clock is ahead."""
    now = time.time() - age
    renewed = time.strftime("%Y-%m-%dT%H:%M:%S.123456Z", time.gmtime(now + ahead))
    written = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now + server_ahead))
    return {
        "kind": "Lease",
        "metadata": {
            "name": "mpi-operator",
            "namespace": "mpi-operator",
            "managedFields": [{"manager": "mpi-operator", "time": written}],
        },
        "spec": {"renewTime": renewed, "holderIdentity": "somebody"},
    }


def storage(name: str = "fast", *, default: bool = True) -> Object:
    notes = {"storageclass.kubernetes.io/is-default-class": "true"} if default else {}
    return {"kind": "StorageClass", "metadata": {"name": name, "annotations": notes}}


def dns() -> list[Object]:
    labels = {"kubernetes.io/service-name": "kube-dns"}
    return [
        {"kind": "Service", "metadata": {"name": "kube-dns", "namespace": "kube-system"}},
        {
            "kind": "EndpointSlice",
            "metadata": {"name": "x", "namespace": "kube-system", "labels": labels},
            "endpoints": [1],
        },
    ]


def found(folder: Path, *overrides: str, file: bool = True) -> dict[str, list[Finding]]:
    run = submission_to_check(folder / "run.yaml" if file else None, list(overrides), folder / "runs", elsewhere=True)
    reported: dict[str, list[Finding]] = {}
    for finding in examine_kubernetes(run, of_user=file):
        reported.setdefault(finding.about, []).append(finding)
    return reported


def levels(reported: dict[str, list[Finding]]) -> dict[str, str]:
    return {about: findings[0].level.value for about, findings in reported.items()}


def test_a_cluster_on_which_the_run_works(tmp_path: Path, fake: FakeCluster) -> None:
    fake.add(lease(), storage(), node("n1"), node("n2"), *dns())
    reported = found(tmp_path)
    assert set(levels(reported).values()) == {"ok"}, reported
    assert set(reported) >= {
        "API server",
        "MPIJob",
        "operator",
        "rights",
        "quota",
        "storage class",
        "nodes",
        "cluster DNS",
        "dry run",
    }
    assert not [path for method, path, query in fake.asked if method in ("PATCH", "DELETE")]
    assert all(query.get("dryRun") for method, path, query in fake.asked if method == "POST" and "review" not in path)
    assert set(levels(found(tmp_path, file=False)).values()) == {"ok"}


@pytest.mark.parametrize("ahead", [-7200.0, 7200.0])
@pytest.mark.parametrize("server_ahead", [-7200.0, 7200.0])
def test_clocks_that_differ(tmp_path: Path, fake: FakeCluster, ahead: float, server_ahead: float) -> None:
    """The operator's and the API server's clocks differ: its liveness is still detected."""
    fake.ahead = server_ahead
    fake.add(lease(2.0, ahead, server_ahead))
    assert levels(found(tmp_path))["operator"] == "ok"
    fake.add(lease(100.0, ahead, server_ahead))
    assert levels(found(tmp_path))["operator"] == "fault"


def test_what_is_missing(tmp_path: Path, fake: FakeCluster) -> None:
    reported = found(
        tmp_path, "backends.kubernetes.priority_class=high", "backends.kubernetes.queue=team",
        "backends.kubernetes.image_pull_secrets=[keys]", "backends.kubernetes.secret_env={TOKEN: keys2/token}",
    )  # fmt: skip
    wrong = {about for about, level in levels(reported).items() if level == "fault"}
    assert wrong == {"operator", "storage class", "nodes", "priority class", "queue", "secret"}
    assert [one.what for one in reported["secret"]] == ["there is no keys", "there is no keys2"]
    assert levels(reported)["cluster DNS"] == "warning"


def test_an_operator_that_died(tmp_path: Path, fake: FakeCluster) -> None:
    fake.add(lease(age=3000))
    assert "its lease was renewed 50:0" in str(found(tmp_path)["operator"][0])
    fake.versions = {"v1": ["mpijobs"]}
    assert "old training-operator" in str(found(tmp_path)["MPIJob"][0])


def test_an_account_with_few_permissions(tmp_path: Path, fake: FakeCluster) -> None:
    fake.forbidden = {"create configmaps", "get pods/log", "delete pods"}
    fake.refuse = lambda method, plural, body: (
        "forbidden_cluster" if plural in ("nodes", "leases", "namespaces", "resourcequotas", "services") else None
    )
    reported = found(tmp_path)
    needed, useful = reported["rights"]
    assert needed.level is Level.FAULT
    assert "get pods/log, create configmaps" in needed.what
    assert useful.level is Level.WARNING
    for about in ("nodes", "operator", "namespace", "quota", "cluster DNS"):
        assert reported[about][0].level is Level.UNTESTED, about


def test_no_answer(tmp_path: Path, fake: FakeCluster) -> None:
    fake.away = True
    reported = found(tmp_path)
    assert levels(reported) == {"client": "ok", "API server": "fault", "everything else": "untested"}


def test_the_run_itself_is_refused(tmp_path: Path, fake: FakeCluster) -> None:
    fake.refuse = lambda method, plural, body: "webhook" if (method, plural) == ("POST", "mpijobs") else None
    assert "images must come from" in str(found(tmp_path)["dry run"][0])
    assert "image" in str(found(tmp_path, "backends.kubernetes.image=null")["run file"][0])


def claim_of(*modes: str, phase: str = "Bound") -> Object:
    return {"metadata": {"name": "data"}, "spec": {"accessModes": list(modes)}, "status": {"phase": phase}}


def test_claims() -> None:
    assert checks.claim(None, "data", 1).level is Level.FAULT
    assert checks.claim(claim_of("ReadWriteOnce"), "data", 1).level is Level.OK
    assert checks.claim(claim_of("ReadWriteOnce"), "data", 2).level is Level.WARNING
    assert checks.claim(claim_of("ReadWriteMany"), "data", 2).level is Level.OK
    assert checks.claim(claim_of("ReadWriteMany", phase="Lost"), "data", 2).level is Level.FAULT
    assert checks.storage_class([storage("a", default=False)], None).level is Level.FAULT
    assert checks.storage_class([storage("a")], "b").fix == "there are: a"


def pod_of(**spec: Any) -> Object:
    """A document with one pod."""
    container = {"name": "rank", "resources": {"requests": {"cpu": "4"}}}
    return {"spec": {"template": {"spec": {"containers": [container], **spec}}}}


def test_quotas() -> None:
    def reported(hard: str, used: str = "0") -> Level:
        quota = {"metadata": {"name": "q"}, "status": {"hard": {"requests.cpu": hard}, "used": {"requests.cpu": used}}}
        return next(iter(checks.quotas([quota], [pod_of()], []))).level

    assert reported("8") is Level.OK
    assert reported("8", "4500m") is Level.WARNING
    assert reported("3500m") is Level.FAULT


BARE = [{"name": "rank"}]
OTHER_NAMESPACES = {
    "podAntiAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 1, "podAffinityTerm": {"topologyKey": "zone", "namespaceSelector": {}}}
        ]
    }
}
OWN_NAMESPACE = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]}}
FILLED = {"spec": {"limits": [{"type": "Container", "defaultRequest": {"memory": "1Gi"}}]}}


def priority(operator: str, *values: str) -> Object:
    return {"matchExpressions": [{"scopeName": "PriorityClass", "operator": operator, "values": [*values]}]}


@pytest.mark.parametrize(
    ("quota", "pod", "ranges", "level"),
    [
        ({}, {}, [], Level.FAULT),
        ({"scopes": ["BestEffort"]}, {}, [], Level.OK),
        ({"scopes": ["BestEffort"]}, {"containers": BARE}, [], Level.FAULT),
        ({"scopes": ["BestEffort"]}, {"containers": BARE}, [FILLED], Level.OK),
        ({"scopes": ["NotBestEffort"]}, {}, [], Level.FAULT),
        ({"scopes": ["NotBestEffort"]}, {"containers": BARE}, [], Level.OK),
        ({"scopes": ["Terminating"]}, {}, [], Level.OK),
        ({"scopes": ["Terminating"]}, {"activeDeadlineSeconds": 60}, [], Level.FAULT),
        ({"scopes": ["NotTerminating"]}, {}, [], Level.FAULT),
        ({"scopes": ["NotTerminating", "BestEffort"]}, {}, [], Level.OK),
        ({"scopes": ["PriorityClass"]}, {"priorityClassName": "high"}, [], Level.FAULT),
        ({"scopeSelector": priority("In", "high")}, {"priorityClassName": "high"}, [], Level.FAULT),
        ({"scopeSelector": priority("In", "low")}, {"priorityClassName": "high"}, [], Level.OK),
        ({"scopeSelector": priority("NotIn", "high")}, {"priorityClassName": "high"}, [], Level.OK),
        ({"scopeSelector": priority("NotIn", "low")}, {"priorityClassName": "high"}, [], Level.FAULT),
        ({"scopeSelector": priority("DoesNotExist")}, {"priorityClassName": "high"}, [], Level.OK),
        ({"scopeSelector": priority("In", "high")}, {}, [], Level.UNTESTED),
        ({"scopeSelector": priority("In", "high"), "scopes": ["BestEffort"]}, {}, [], Level.OK),
        ({"scopes": ["CrossNamespacePodAffinity"]}, {}, [], Level.OK),
        ({"scopes": ["CrossNamespacePodAffinity"]}, {"affinity": OWN_NAMESPACE}, [], Level.OK),
        ({"scopes": ["CrossNamespacePodAffinity"]}, {"affinity": OTHER_NAMESPACES}, [], Level.FAULT),
        ({"scopes": ["VolumeAttributesClass"]}, {}, [], Level.UNTESTED),
    ],
)
def test_a_quota_counts_the_pods_of_its_scopes(quota: Object, pod: Object, ranges: list[Object], level: Level) -> None:
    item = {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "0"}, **quota}}
    (found,) = checks.quotas([item], [pod_of(**pod)], ranges)
    assert found.level is level
    assert ("pods 1 of 0" in found.what) == (level is not Level.OK)


def test_a_quota_of_another_scope_may_be_used_beyond_its_limit() -> None:
    status = {"hard": {"pods": "1"}, "used": {"pods": "2"}}
    (found,) = checks.quotas([{"metadata": {"name": "q"}, "spec": {"scopes": ["BestEffort"]}, "status": status}],
                             [pod_of()], [])  # fmt: skip
    assert (found.level, found.what) == (Level.OK, "q does not count the run's pods")


def test_a_quota_of_another_scope_asks_no_container_to_state_anything() -> None:
    item = {"metadata": {"name": "q"}, "spec": {"hard": {"limits.cpu": "9"}, "scopes": ["Terminating"]}}
    (found,) = checks.quotas([item], [pod_of()], [])
    assert found.level is Level.OK


def test_a_quota_on_what_a_container_does_not_state() -> None:
    """The API server refuses such a pod, however much room there is."""
    quota = {"metadata": {"name": "q"}, "status": {"hard": {"limits.cpu": "100", "pods": "9"}, "used": {}}}
    options = {"supervisor": True, "tensorboard": True}

    def reported(kubernetes: dict[str, Any], ranges: tuple[Object, ...] = (), **resources: Any) -> Finding:
        found = rendered(run_file({**options, **kubernetes}, resources={"nodes": 2, **resources}))
        return next(iter(checks.quotas([quota], found, ranges)))

    without = reported({}, cpus_per_rank=1)
    assert without.level is Level.FAULT
    assert mentions(without.what, "limits.cpu of launcher, supervisor, tensorboard")
    assert without.fix == "give backends.kubernetes.launcher_resources.cpu_limit"
    both = "give backends.kubernetes.launcher_resources.cpu_limit and resources.cpus_per_rank"
    assert [*map(set, ((reported({}).fix or "").split(), both.split()))] == [set(both.split())] * 2
    limit = {"launcher_resources": {"cpu_limit": "1"}}
    assert reported(limit, cpus_per_rank=1).level is Level.OK
    assert reported(limit).fix == "give resources.cpus_per_rank"
    defaults = ({"spec": {"limits": [{"type": "Container", "default": {"cpu": "1"}}]}},)
    assert reported({}, defaults, cpus_per_rank=1).level is Level.OK


def test_every_pod_counts_against_a_quota() -> None:
    found = rendered(run_file({"supervisor": True, "tensorboard": True}, resources={"nodes": 2, "cpus_per_rank": 1}))
    asked = checks.all_asks(checks.pod_specs(found))
    assert asked["pods"] == 5
    assert asked["requests.cpu"] == pytest.approx(2 + 0.25 + 0.05 + 0.05)


def test_nodes_that_can_hold_a_worker() -> None:
    def reported(nodes: list[Object], asks: dict[str, float], **spec: Any) -> Finding:
        return next(iter(checks.fits(nodes, spec, 2, asks)))

    small, big = node("n1", memory="512Mi"), node("n2")
    assert reported([big, node("n3")], {"memory": 2**30}).level is Level.OK
    assert reported([small, big], {"memory": 2**30}).level is Level.WARNING
    strict = [{"whenUnsatisfiable": "DoNotSchedule"}]
    assert reported([small, big], {"memory": 2**30}, topologySpreadConstraints=strict).level is Level.FAULT
    gpus = reported([small, big], {"nvidia.com/gpu": 2.0})
    assert gpus.level is Level.FAULT
    assert "2 with 1 of nvidia.com/gpu" in gpus.what
    assert reported([big, big], {}, nodeSelector={"kind": "small"}).level is Level.FAULT
    taint = {"key": "spot", "value": "yes", "effect": "NoSchedule"}
    spot = node("n4", taints=[taint])
    assert "1 with the taint spot" in reported([spot], {}).what
    for toleration in ({"key": "spot", "operator": "Exists"}, {"key": "spot", "value": "yes"}, {"operator": "Exists"}):
        assert reported([spot, spot], {}, tolerations=[toleration]).level is Level.OK, toleration
    assert "cordoned" in reported([node("n5", unschedulable=True)], {}).what
    down = node("n6")
    down["status"]["conditions"][0]["status"] = "Unknown"
    assert "not ready" in reported([down], {}).what


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1),
        ("250m", 0.25),
        ("24603460Ki", 24603460 * 1024),
        ("1Gi", 2**30),
        ("2G", 2e9),
        ("1e3", 1000),
        ("junk", 0),
        (3, 3),
    ],
)
def test_quantities(text: object, number: float) -> None:
    assert parse(text) == pytest.approx(number)
    assert show("memory", 2**30) == "1Gi"
