"""A real API server: it refuses invalid runs, accepts valid ones, and nothing is left over."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from kubernetes_cluster import Cluster, Run
from kubernetes_runs import EVERYTHING, any_run_file, contents_of, rendered, run_file
from kubernetes_testbed import Space, wait_until
from kubernetes_wrong import OURS, SERVERS
from project import of_kind

from ortflow.launchers.kubernetes.api import Cluster as Api
from ortflow.launchers.kubernetes.api import Refused
from ortflow.launchers.kubernetes.contexts import connect
from ortflow.launchers.kubernetes.dry_run import dry_run, pods
from ortflow.launchers.kubernetes.request import applied_size
from ortflow.workflow.errors import UserError

COUNT = 20
OPTIONS = ("supervisor", "network_policy", "disruption_budget")
ACCOUNT = {"apiVersion": "v1", "kind": "ServiceAccount"}
KINDS = (
    "mpijobs,jobs,deployments,pods,services,configmaps,secrets,serviceaccounts,roles,rolebindings,networkpolicies,"
    "poddisruptionbudgets,pvc"
)


@pytest.fixture
def api(space: Space, monkeypatch: pytest.MonkeyPatch) -> Api:
    """The API server, seen from the test's namespace."""
    monkeypatch.setenv("KUBECONFIG", space.testbed.environment["KUBECONFIG"])
    return connect(namespace=space.name)


@pytest.fixture
def classes(space: Space) -> Iterator[None]:
    """The classes of pods that `EVERYTHING` names; they belong to no namespace."""
    found: list[dict[str, Any]] = [
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "high"}, "value": 1000},
        {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}, "handler": "runc"},
    ]
    given, ask = json.dumps({"apiVersion": "v1", "kind": "List", "items": found}), space.testbed.reported
    ask("kubectl", "create", "-f", "-", given=given)
    yield
    ask("kubectl", "delete", "-f", "-", given=given)


def test_the_server_refuses_what_our_checks_leave_to_it(space: Space, api: Api) -> None:
    """Together with those that ortflow's own checks refuse, some hundreds of invalid runs: none is accepted."""
    assert len(OURS) + len(SERVERS) >= 200
    reported = {wrong.name: refused(api, in_space(wrong.written, space)) for wrong in SERVERS}
    assert [name for name, sentence in reported.items() if sentence is None] == []
    assert not any("\n" in str(sentence) for sentence in reported.values())
    right = run_file()
    dry_run(api, in_space(right, space))
    assert space.get(KINDS, "-l", "app.kubernetes.io/name=ortflow")["items"] == []


def test_faults_that_only_a_pod_would_show(cluster: Cluster, api: Api) -> None:
    """Missing classes and accounts, security level, limits and quotas: reported before anything is created."""
    space = cluster.space
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    space.kubectl("patch", "namespace", space.name, "-p", json.dumps({"metadata": {"labels": label}}))
    limits = {"limits": [{"type": "Container", "max": {"cpu": "4"}}]}
    space.make_all(
        {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "limits"}, "spec": limits},
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "q"},
            "spec": {"hard": {"limits.memory": "2Gi"}},
        },
    )
    right: dict[str, Any] = {"cpus_per_rank": 1, "memory": "1Gi"}
    small = {"memory": "64Mi"}
    usual: dict[str, Any] = {"launcher_resources": small}
    reported = {
        words: refused(api, in_space(run_file({**usual, **own}, resources={**right, **resources}), space))
        for words, own, resources in (
            ("there is no service account nobody", {"service_account": "nobody"}, {}),
            ("there is no priority class nobody", {"priority_class": "nobody"}, {}),
            ("there is no runtime class nobody", {"gpu": {"runtime_class": "nobody"}}, {"gpus_per_rank": 1}),
            ("pods of the security level restricted", {"volume": {"host_path": "/srv"}}, {}),
            ("maximum cpu usage per Container is 4", {}, {"cpus_per_rank": 5}),
            ("has no room for Pod", {}, {"memory": "3Gi"}),
            ("", {}, {}),
        )
    }
    assert reported.pop("") is None, "the valid run is accepted"
    for words, sentence in reported.items():
        assert words in str(sentence), f"{words}: {sentence}"
    cluster.write("nobody", backends__kubernetes__priority_class="nobody")
    done = cluster.ortflow("submit", "-b", "kubernetes", "nobody.yaml")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "there is no priority class nobody" in done.stderr
    assert ours(space) == []


@pytest.mark.chaos
@pytest.mark.usefixtures("classes")
@pytest.mark.parametrize("seed", [1, 2])
def test_the_server_takes_what_our_checks_take(space: Space, api: Api, seed: int) -> None:
    """Random run files: if the server refuses one, ortflow's checks lack a rule."""
    chance = random.Random(seed)
    space.make_all(*({**ACCOUNT, "metadata": {"name": name}} for name in ("me", "a", "b")))
    runs = [run_file(EVERYTHING, name=f"all-{seed}"), *(any_run_file(chance, f"any-{n}") for n in range(COUNT))]
    found = [document for run in runs for document in in_space(run, space)]
    found += [*pods(found)]
    answers = [
        answer(api, {**document, "metadata": {**document["metadata"], "namespace": space.name}}) for document in found
    ]
    assert [reported for reported in answers if reported] == []


def test_render_and_kubectl(cluster: Cluster) -> None:
    """`ortflow render | kubectl apply` trains; a second apply changes nothing; `kubectl delete` removes all of it."""
    space = cluster.space
    file = cluster.write("applied", train__steps=10, **{f"backends__kubernetes__{key}": True for key in OPTIONS})
    done = cluster.ortflow("render", "--backend", "kubernetes", file.name)
    assert done.returncode == 0, done.stderr
    reported = space.kubectl("apply", "-f", "-", given=done.stdout)
    assert all(line.endswith(" created") for line in reported.splitlines()), reported
    run = Run(cluster, "applied")
    run.finish()
    assert len(of_kind(run.run_dir, "step")) == 10
    before = generations(space)
    again = space.kubectl("apply", "-f", "-", given=cluster.ortflow("render", "-b", "kubernetes", file.name).stdout)
    assert "created" not in again
    assert generations(space) == before, again
    space.kubectl("delete", "--wait=true", "-f", "-", given=done.stdout, timeout=90)
    wait_until(lambda: not ours(space), 120, lambda: str(ours(space)))
    assert of_kind(run.run_dir, "finished"), "what was trained is on the volume"


def test_kubectl_delete_keeps_the_claim(cluster: Cluster) -> None:
    """Applies the file that is printed by default: without a claim the run waits, and reports for what."""
    space = cluster.space
    create = {"mount": "/ortflow", "create": {"size": "1Gi"}}
    file = cluster.write("kept", backends__kubernetes__volume=create)
    plain = cluster.ortflow("render", "-b", "kubernetes", file.name).stdout
    whole = cluster.ortflow("render", "-b", "kubernetes", "--with-claim", file.name).stdout
    space.kubectl("apply", "-f", "-", given=plain)
    handle = f"kubernetes://{space.name}/{Run(cluster, 'kept').job()['metadata']['name']}"

    def waits() -> str:
        return str(json.loads(cluster.ortflow("status", handle, "--json").stdout)["waits"])

    wait_until(lambda: "ortflow render -b kubernetes --with-claim" in waits(), 120, waits)
    space.kubectl("apply", "-f", "-", given=whole)
    wait_until(lambda: space.get("pvc", "kept-data")["status"].get("phase") == "Bound", 120, space.transcript)
    space.kubectl("delete", "--wait=true", "-f", "-", given=plain, timeout=90)
    claim = space.get("pvc", "kept-data")
    assert "deletionTimestamp" not in claim["metadata"]


def generations(space: Space) -> dict[str, Any]:
    """The generation of each object; kubectl prints `configured` for disruption budgets that it has not changed."""
    found = space.get(KINDS, "-l", "app.kubernetes.io/name=ortflow,!ortflow.dev/component")["items"]
    return {
        f"{item['kind']}/{item['metadata']['name']}": (item["metadata"]["uid"], item["metadata"].get("generation"))
        for item in found
    }


def ours(space: Space) -> list[str]:
    """The objects of ortflow that still exist."""
    return [item["metadata"]["name"] for item in space.get(KINDS, "-l", "app.kubernetes.io/name=ortflow")["items"]]


def in_space(written: dict[str, Any], space: Space) -> list[dict[str, Any]]:
    """The rendered documents of a run file, in the test's namespace."""
    documents = rendered(written, namespace=space.name, contents=contents_of(written))
    for document in documents:
        document["metadata"]["namespace"] = space.name
    return documents


def answer(api: Api, document: dict[str, Any]) -> str | None:
    """The server's error for a document, if any."""
    try:
        api.create(document, dry_run=True)
    except Refused as error:
        return f"{document}: {error}"
    return None


def refused(api: Api, documents: list[dict[str, Any]]) -> str | None:
    """The error's sentence, if there is one."""
    try:
        dry_run(api, documents)
    except UserError as error:
        return str(error)
    return None


def test_the_size_of_what_kubectl_applies(cluster: Cluster) -> None:
    """`render` predicts the annotation, and the largest documents that it prints are taken."""
    (cluster.folder / "more.py").write_text("<&>é\u2028\\n\n'\"" * 100 + "x" * 250_000)
    file = cluster.write("large", backends__kubernetes__files=["more.py"], backends__kubernetes__suspend=True)
    done = cluster.ortflow("render", "-b", "kubernetes", file.name)
    assert done.returncode == 0, done.stderr
    cluster.space.kubectl("apply", "-f", "-", given=done.stdout)
    document = next(one for one in yaml.safe_load_all(done.stdout) if one and one["kind"] == "ConfigMap")
    config = cluster.space.get("configmap", document["metadata"]["name"])
    annotations = config["metadata"]["annotations"]
    size = sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items())
    assert 250_000 < size <= applied_size(document) < size + 400
