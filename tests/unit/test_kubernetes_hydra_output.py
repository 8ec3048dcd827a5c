"""Messages for refusals of the API server, each from a real one's body; contexts; the log's lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from fake_kubernetes import ANSWERS
from messages import mentions, says

from ortflow.launchers.kubernetes.api import Refused, Unreachable
from ortflow.launchers.kubernetes.contexts import connect
from ortflow.launchers.kubernetes.lines import Record, Text, read_line, stamped
from ortflow.launchers.kubernetes.refusals import refusal
from ortflow.workflow.errors import OrtflowError, UserError


def refused(key: str, verb: str = "create", kind: str = "MPIJob", namespace: str = "default") -> Refused:
    answer = ANSWERS[key]
    body = answer["text"] if "text" in answer else json.dumps(answer["body"])
    return Refused(answer["code"], body, verb, kind, "digits-abc123", namespace)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("unauthorised", "API server … credentials"),
        ("forbidden_create", "system:serviceaccount:default:weak … create configmaps in namespace default … ask"),
        ("forbidden_list", "may not list mpijobs in namespace default"),
        ("forbidden_cluster", "may not list nodes in the cluster"),
        ("taken", "name is taken … MPIJob digits-abc123 … namespace default"),
        ("unknown_field", "there is no field spec.slotPerWorker in MPIJob"),
        ("invalid", 'spec.mpiImplementation: Unsupported value: "MVAPICH": supported values'),
        ("invalid_name", "metadata.name: Invalid value"),
        ("quota", "quota of namespace default … MPIJob digits-abc123 … q, requested: count/mpijobs"),
        ("quota_needs", "backends.kubernetes.overlay: … quota must of namespace default … requests.cpu"),
        ("not_found", "no MPIJob digits-abc123 … namespace default"),
        ("too_large", "backends.kubernetes.files: … MPIJob digits-abc123 … too large"),
        ("grant", "may not … MPIJob digits-abc123 rights"),
        ("going", "backends.kubernetes.namespace: … default … being deleted"),
        ("webhook", "policy images.policy.example … MPIJob digits-abc123: images must come from the house's"),
        ("policy", "policy few-workers … MPIJob digits-abc123: no more than 8 workers"),
        ("pod_account", "service_account: … nobody … namespace default … correct the name"),
        ("pod_priority", "backends.kubernetes.priority_class: … urgent … correct the name"),
        ("pod_runtime", "backends.kubernetes.gpu.runtime_class: … nvidia … correct the name"),
        ("pod_limit", "resources: … limit of namespace default … MPIJob digits-abc123: maximum memory usage"),
        ("pod_ratio", "limit of namespace default … MPIJob digits-abc123: cpu max limit to request ratio"),
        ("pod_quota_never", "quota of namespace default … MPIJob digits-abc123: q, requested"),
        ("pod_security", "security level restricted:latest … allowPrivilegeEscalation != false"),
    ],
)
def test_one_sentence_each(key: str, words: str) -> None:
    error = refusal(refused(key))
    assert isinstance(error, UserError)
    assert mentions(str(error), words)
    assert "\n" not in str(error)


def test_a_namespace_that_is_not_there() -> None:
    reported = str(refusal(refused("no_namespace", namespace="nope")))
    assert says(reported, "backends.kubernetes.namespace: … nope … `kubectl create namespace nope`")


def test_a_transient_refusal_is_not_a_user_error() -> None:
    error = refusal(refused("webhook_broken"))
    assert not isinstance(error, UserError)
    assert "images.policy.example, does not answer" in str(error)
    assert isinstance(refusal(Refused(503, "away", "get", "MPIJob", "x", "default")), OrtflowError)


def kubeconfig(path: Path, server: str = "http://127.0.0.1:1", **context: str) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [
            {"name": "one", "context": {"cluster": "c", "user": "u", **context}},
            {"name": "two", "context": {"cluster": "c", "user": "u", "namespace": "team"}},
        ],
        "current-context": "one",
    }
    path.write_text(yaml.safe_dump(config))
    return path


def test_contexts_are_found_as_kubectl_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'missing'}:{kubeconfig(tmp_path / 'config')}")
    assert (connect().context, connect().namespace) == ("one", "default")
    assert (connect("two").context, connect("two").namespace) == ("two", "team")
    assert connect("two", "mine").namespace == "mine"
    with pytest.raises(UserError, match=r"backends\.kubernetes\.context: .*tow.*two\?"):
        connect("tow")


def test_no_cluster_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    with pytest.raises(UserError, match=r"KUBECONFIG names .*missing, which does not exist"):
        connect()
    (tmp_path / "empty").touch()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "empty"))
    with pytest.raises(UserError, match="names no cluster"):
        connect()
    (tmp_path / "broken").write_text("a: [")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "broken"))
    with pytest.raises(UserError, match="cannot be read"):
        connect()


def test_inside_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kubernetes.config import incluster_config

    from ortflow.launchers.kubernetes import contexts

    for name, text in {"token": "abc", "ca.crt": "x", "namespace": "team"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    monkeypatch.setattr(contexts, "IN_POD", tmp_path)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    found = connect()
    assert (found.context, found.namespace, found.server) == (None, "team", "https://127.0.0.1:1")


def test_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config")))
    with pytest.raises(Unreachable, match=r"http://127\.0\.0\.1:1.*Connection refused"):
        connect().find_all("MPIJob")


def test_the_three_kinds_of_lines() -> None:
    assert read_line("[3] step 1") == Text(3, "step 1")
    assert read_line("[x] step 1") == Text(None, "[x] step 1")
    assert read_line("12:00:00  attempt 0") == Text(None, "12:00:00  attempt 0")
    record = {"event": "start", "attempt": 0}
    assert read_line("::ortflow " + json.dumps({"file": "attempts", "record": record})) == Record("attempts", record)
    for torn in ('::ortflow {"file":"atte', '::ortflow {"file":"other","record":{}}', "::ortflow []"):
        assert read_line(torn) == Text(None, torn)


def test_times_compare_as_texts() -> None:
    early, late = stamped(b"2026-11-20T05:46:43Z a"), stamped(b"2026-11-20T05:46:43.5Z  b")
    assert early == ("2026-11-20T05:46:43.000000000Z", "a")
    assert late == ("2026-11-20T05:46:43.500000000Z", " b")
    assert early < late
    assert stamped(b"unable to retrieve container logs") is None


@pytest.mark.parametrize(
    ("lacking", "keys"),
    [
        ("limits.cpu for: launcher", ["backends.kubernetes.launcher_resources.cpu_limit"]),
        ("limits.cpu for: supervisor; limits.memory for: worker", [
            "backends.kubernetes.launcher_resources.cpu_limit", "resources.memory"]),
        ("limits.cpu,requests.cpu for: worker", ["resources.cpus_per_rank"]),
        ("requests.memory for: side,worker", ["requests.memory of side in an overlay", "resources.memory"]),
    ],
)  # fmt: skip
def test_a_quota_names_the_key_of_the_container_that_lacks_something(lacking: str, keys: list[str]) -> None:
    message = f'pods "p" is forbidden: failed quota: must: must specify {lacking}'
    body = json.dumps({"message": message, "reason": "Forbidden", "code": 403})
    error = refusal(Refused(403, body, "create", "Pod", "p", "default"))
    assert isinstance(error, UserError)
    assert error.where == ("backends.kubernetes.overlay" if " " in keys[0] else keys[0])
    assert error.fix == f"give {' and '.join(keys)}"
