"""The documents of a run in Kubernetes: byte for byte, properties of all of them, and overlays.

`ORTFLOW_GOLDEN=1 pytest tests/unit/test_kubernetes_manifest.py` writes the golden files again.
"""

from __future__ import annotations

import copy
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes_runs import EVERYTHING, any_run_file, contents_of, one, pod_of, rendered, run_file, spec_of_file

from ortflow.manifests.kubernetes import Placement, dump, job_name
from ortflow.manifests.kubernetes import names as kubernetes_names
from ortflow.manifests.kubernetes.overlay import merge
from ortflow.manifests.kubernetes.values import defaults
from ortflow.workflow.spec.checks.kubernetes import check_kubernetes
from ortflow.workflow.spec.file.document import parse_document
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.spec.units import parse_memory

GOLDEN = Path(__file__).parent / "golden" / "kubernetes"
KUEUE = {"queue": "gpus", "suspend": True, "priority_class": "low"}
GPUS = {"gpus_per_rank": 1, "gpu_type": "H100", "ranks_per_node": 8, "nodes": 4, "cpus_per_rank": 12, "memory": "512Gi"}
GOLDENS: dict[str, dict[str, Any]] = {
    "plain": run_file(),
    "everything": run_file(EVERYTHING, resources={**GPUS, "time_limit": "12:00:00"}, run_dir="team/here"),
    "launcher-as-worker": run_file({"launcher_as_worker": True, "volume": {"empty_dir": True}}, resources={"nodes": 1}),
    "root-openmpi": run_file({"security": {"run_as_user": 0, "run_as_group": 0}, "mpi": "openmpi", "ssh_port": 22}),
    "kueue": run_file({**KUEUE, "volume": {"create": {"size": "10Gi"}}}),
    "scheduler-plugins": run_file(
        {"gang": {"scheduler": "scheduler-plugins"}, "volume": {"nfs": {"server": "a", "path": "/x"}}}
    ),
    "s3-files": run_file(
        {
            "volume": {"s3": {"driver": "s3.example", "attributes": {"bucket": "b"}, "secret": "keys"}},
            "files": ["make.py", "lib/more.py"],
        },
        prepare="python make.py",
    ),
}


@pytest.mark.parametrize("name", [*GOLDENS])
def test_byte_for_byte(name: str) -> None:
    run, file = GOLDENS[name], GOLDEN / f"{name}.yaml"
    text = re.sub(r"(ortflow\.dev/version: ).*", r'\1"VERSION"', dump(rendered(run, contents=contents_of(run))))
    if os.environ.get("ORTFLOW_GOLDEN"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


def test_no_golden_file_is_forgotten() -> None:
    assert {file.stem for file in GOLDEN.glob("*.yaml")} == {*GOLDENS}


@pytest.fixture(scope="module")
def many() -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    chance = random.Random(11)
    runs = [any_run_file(chance, f"n{number}") for number in range(150)]
    return [(run, rendered(run, contents=contents_of(run))) for run in runs]


def test_what_the_operator_relies_on(many: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> None:
    for run, found in many:
        job, spec = one(found, "MPIJob"), spec_of_file(run)
        name, replicas = job["metadata"]["name"], job["spec"]["mpiReplicaSpecs"]
        workers = replicas.get("Worker", {"replicas": 0})["replicas"]
        assert re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", name)
        assert len(f"{name}-worker-{max(0, workers - 1)}") <= 63
        assert workers + spec.backends.kubernetes.launcher_as_worker == spec.resources.nodes
        assert job["spec"]["slotsPerWorker"] == spec.resources.ranks_per_node
        assert job["spec"]["launcherCreationPolicy"] == ("AtStartup" if spec.elastic else "WaitForWorkersReady")
        assert job["spec"]["runPolicy"]["cleanPodPolicy"] == "Running"
        assert job["spec"]["runPolicy"]["backoffLimit"] >= 0
        assert replicas["Launcher"]["replicas"] == 1
        assert (replicas["Launcher"]["restartPolicy"], replicas.get("Worker", {}).get("restartPolicy")) in [
            ("Never", "OnFailure"),
            ("Never", None),
        ]
        gang = job["spec"]["runPolicy"].get("schedulingPolicy", {})
        assert gang.get("minAvailable", 0) <= workers
        assert all(document["metadata"]["name"] != name for document in found if document["kind"] == "Service")


def as_the_kubelet_reads(value: str) -> str:
    """Kubernetes' expansion.Expand, without variables."""
    reported, place = "", 0
    while place < len(value):
        if value[place] != "$" or place + 1 == len(value):
            reported += value[place]
        elif value[place + 1] == "$":
            reported, place = reported + "$", place + 1
        elif value[place + 1] == "(" and ")" in value[place:]:
            reported, place = reported + "VARIABLE", value.index(")", place)
        else:
            reported, place = reported + value[place : place + 2], place + 1
        place += 1
    return reported


def test_what_the_pods_rely_on(many: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> None:
    for run, found in many:
        job, spec = one(found, "MPIJob"), spec_of_file(run)
        name, k8s = job["metadata"]["name"], spec.backends.kubernetes
        for which in job["spec"]["mpiReplicaSpecs"]:
            template, pod = job["spec"]["mpiReplicaSpecs"][which]["template"], pod_of(job, which)
            container = pod["containers"][0]
            assert template["metadata"]["labels"]["ortflow.dev/component"] == which.lower() == container["name"]
            assert template["metadata"]["labels"]["ortflow.dev/job"] == name
            env = {variable["name"]: variable.get("value") for variable in container["env"]}
            assert len(env) == len(container["env"])
            assert env["ORTFLOW_JOB"] == name
            assert env["ORTFLOW_MOUNT"] == k8s.volume.mount
            assert env["ORTFLOW_SSH_PORT"] == str(k8s.ssh_port)
            assert {key: as_the_kubelet_reads(str(env[key])) for key in k8s.env} == k8s.env
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert mounts.keys() <= {volume["name"] for volume in pod["volumes"]}
            assert (mounts["run"], mounts["data"], mounts["shm"]) == ("/etc/ortflow/run", k8s.volume.mount, "/dev/shm")
            assert pod["terminationGracePeriodSeconds"] == k8s.grace_seconds
            if k8s.security.run_as_user:
                assert pod["securityContext"]["runAsNonRoot"] is True
                assert container["securityContext"]["allowPrivilegeEscalation"] is False
                assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]


def test_the_config_map_carries_the_run(many: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> None:
    for run, found in many:
        config = one(found, "ConfigMap")
        document = parse_document(config["data"]["run.yaml"], "run.yaml")
        assert document.problems == []
        assert spec_of_file(document.values) == spec_of_file(run)
        items = {
            item["key"]: item["path"]
            for item in pod_of(one(found, "MPIJob"), "Launcher")["volumes"][0]["configMap"]["items"]
        }
        for key, path in items.items():
            if key != "run.yaml":
                assert config["data"][key] == contents_of(run)[path.removeprefix("files/")]
        assert items.keys() == config["data"].keys()


def test_yaml_equals_the_documents(many: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> None:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for _, found in many:
        assert [*yaml.load_all(dump(found), Loader=loader)] == found


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.text(st.characters(exclude_categories=["Cs"]))
        | st.sampled_from(
            ["yes", "012", "1e3", "-", "a: b", "# c", "a\nb\n", " a\nb", "a\n\nb", "null", "~", "2001-01-01"]
        ),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    )
)
def test_yaml_of_anything(value: Any) -> None:
    assert yaml.safe_load(dump([{"key": value}])) == {"key": value}


def test_stable_and_new_by_its_values() -> None:
    run = run_file()
    assert dump(rendered(run)) == dump(rendered(dict(reversed(run.items()))))
    names = {one(rendered(run_file(seed=seed)), "MPIJob")["metadata"]["name"] for seed in range(20)}
    assert len(names) == 20
    assert all(re.fullmatch("small-[0-9a-f]{6}", name) for name in names)
    carrying = run_file({"files": ["a.py"]})
    texts = {one(rendered(carrying, contents={"a.py": text}), "MPIJob")["metadata"]["name"] for text in "ab"}
    assert len(texts) == 2


def test_a_submission_has_its_own_name_and_options() -> None:
    run = run_file()
    job = one(rendered(run, suffix="x1y2z3", new_budget=True, fresh=True), "MPIJob")
    assert job["metadata"]["name"] == "small-x1y2z3"
    assert job_name(run, spec_of_file(run), Placement("x1y2z3")) == "small-x1y2z3"
    env = {variable["name"]: variable.get("value") for variable in pod_of(job, "Launcher")["containers"][0]["env"]}
    assert (env["ORTFLOW_NEW_BUDGET"], env["ORTFLOW_FRESH"]) == ("1", "1")
    plain = pod_of(one(rendered(run), "MPIJob"), "Launcher")["containers"][0]["env"]
    assert not {"ORTFLOW_NEW_BUDGET", "ORTFLOW_FRESH"} & {variable["name"] for variable in plain}


@settings(max_examples=100, deadline=None)
@given(
    st.from_regex(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?", fullmatch=True)
    | st.text("a-", min_size=40, max_size=50).map(lambda middle: f"0{middle}z"),
    st.integers(1, 9999),
)
def test_names_fit(name: str, nodes: int) -> None:
    job = kubernetes_names.job_name(name, nodes, "abcdef")
    assert re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", job)
    assert len(f"{job}-worker-{nodes - 1}") <= 63
    assert len(f"{job}-supervisor") <= 63
    for what in ("data", "tensorboard"):
        sibling = kubernetes_names.sibling(name, what)
        assert re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", sibling)
        assert len(sibling) <= 63


@pytest.mark.parametrize("text", ["16G", "16Gi", "1.5 tib", "512k", "512KiB", "8mb", "7P"])
def test_amounts_mean_the_same(text: str) -> None:
    written = kubernetes_names.quantity(text)
    assert re.fullmatch(r"[0-9.]+(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)", written)
    assert parse_memory(written) == parse_memory(text)


def test_resources() -> None:
    run = run_file({"extended_resources": {"rdma/hca": 2}}, resources=GPUS)
    job = one(rendered(run), "MPIJob")
    amounts = {"cpu": 96, "memory": "512Gi", "nvidia.com/gpu": 8, "rdma/hca": 2}
    assert pod_of(job, "Worker")["containers"][0]["resources"] == {"requests": amounts, "limits": amounts}
    assert "nvidia.com/gpu" not in str(pod_of(job, "Launcher"))
    both = one(rendered(run_file({"launcher_as_worker": True}, resources=GPUS)), "MPIJob")
    assert pod_of(both, "Launcher")["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert both["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] == 3


def test_launcher_and_workers_lie_apart() -> None:
    """Workers on spot nodes; the launcher and its sidecar pods on nodes that are not preempted."""
    spot, quiet = {"key": "spot", "operator": "Exists"}, {"key": "quiet", "operator": "Exists"}
    both = {"key": "both", "operator": "Exists"}
    kubernetes = {
        "tolerations": [both], "worker_tolerations": [spot], "launcher_tolerations": [quiet],
        "node_selector": {"arch": "a"}, "worker_node_selector": {"pool": "spot"}, "supervisor": True,
    }  # fmt: skip
    found = rendered(run_file(kubernetes))
    launcher, worker = (pod_of(one(found, "MPIJob"), which) for which in ("Launcher", "Worker"))
    beside = one(found, "Job")["spec"]["template"]["spec"]
    assert (worker["tolerations"], worker["nodeSelector"]) == ([both, spot], {"arch": "a", "pool": "spot"})
    for pod in (launcher, beside):
        assert (pod["tolerations"], pod["nodeSelector"]) == ([both, quiet], {"arch": "a"})


def test_cores_in_thousandths() -> None:
    job = one(rendered(run_file({"worker_cpu": "1500m"}, resources={"nodes": 2, "cpus_per_rank": 4})), "MPIJob")
    cpu = [pod_of(job, which)["containers"][0]["resources"]["requests"]["cpu"] for which in ("Worker", "Launcher")]
    assert cpu == ["1500m", "250m"]


def test_values_of_variables_are_unchanged() -> None:
    """The kubelet replaces $$ by $, and $(NAME) by a variable's value."""
    values = {"A": "$(HOME) $$(B) $", "B": "a$b"}
    worker = pod_of(one(rendered(run_file({"env": values})), "MPIJob"), "Worker")
    env = {entry["name"]: entry.get("value") for entry in worker["containers"][0]["env"]}
    assert {name: env[name] for name in values} == {"A": "$$(HOME) $$$$(B) $$", "B": "a$$b"}


def test_python_writes_no_modules_to_the_volume(tmp_path: Path) -> None:
    """On a full volume a truncated module could be left, which would fail every attempt."""
    mount = tmp_path / "volume"
    mount.mkdir()
    (mount / "mine.py").write_text("")
    job = one(rendered(run_file({"volume": {"mount": str(mount), "claim": "data"}})), "MPIJob")
    for which in ("Launcher", "Worker"):
        variables = pod_of(job, which)["containers"][0]["env"]
        env = {entry["name"]: entry["value"] for entry in variables if "value" in entry}
        words = [sys.executable, "-c", "import json.tool, mine, wave"]
        subprocess.run(words, env={"PYTHONPATH": str(mount), **env}, cwd="/", check=True)
        assert [path.name for path in mount.rglob("*")] == ["mine.py"]


def test_a_time_limit_is_not_a_deadline() -> None:
    limited = one(rendered(run_file(resources={"time_limit": "1:00:00"})), "MPIJob")
    assert "activeDeadlineSeconds" not in limited["spec"]["runPolicy"]
    dead = one(rendered(run_file({"deadline": "1:00:00"})), "MPIJob")
    assert dead["spec"]["runPolicy"]["activeDeadlineSeconds"] == 3600


def test_data_do_not_go_with_the_job() -> None:
    found = rendered(run_file({"volume": {"create": {"size": "1Gi"}}, "tensorboard": True}))
    lasting = {document["kind"] for document in found if "ortflow.dev/job" not in document["metadata"]["labels"]}
    assert lasting == {"PersistentVolumeClaim", "Deployment", "Service"}
    assert all(document["metadata"]["labels"]["ortflow.dev/run"] == "small" for document in found)


def test_the_supervisor_may_do_no_more_than_it_does() -> None:
    found = rendered(run_file({"supervisor": True, "namespace": "lab"}))
    rules = {
        (group, what): rule["verbs"]
        for rule in one(found, "Role")["rules"]
        for group in rule["apiGroups"]
        for what in rule["resources"]
    }
    assert rules == {
        ("", "pods"): ["get", "list", "watch", "delete"],
        ("", "pods/log"): ["get"],
        ("", "pods/status"): ["patch"],
        ("", "configmaps"): ["get"],
        ("", "events"): ["list"],
        ("batch", "jobs"): ["get", "list", "patch"],
        ("kubeflow.org", "mpijobs"): ["get", "list", "create", "patch", "delete"],
    }
    (subject,) = one(found, "RoleBinding")["subjects"]
    job = one(found, "MPIJob")["metadata"]["name"]
    assert subject == {"kind": "ServiceAccount", "name": f"{job}-supervisor", "namespace": "lab"}
    assert one(found, "Job")["spec"]["template"]["spec"]["serviceAccountName"] == f"{job}-supervisor"


def test_defaults_are_those_of_the_types() -> None:
    written = {**run_file(), **copy.deepcopy(defaults())}
    written["backends"]["kubernetes"] |= {"image": "a", "volume": {"mount": "/ortflow", "claim": "shared"}}
    plain = run_file({"image": "a"}, resources={})
    assert TrainerRunSpec.model_validate(spec_of_file(written).model_dump()) == spec_of_file(plain)


@pytest.mark.parametrize(
    ("base", "patch", "wanted"),
    [
        ({"a": 1, "b": {"c": 2}}, {"b": {"d": 3}}, {"a": 1, "b": {"c": 2, "d": 3}}),
        ({"a": 1, "b": 2}, {"a": None}, {"b": 2}),
        ({"a": {"x": 1}}, {"a": {"$patch": "delete"}}, {}),
        ({"a": {"x": 1}}, {"a": {"$patch": "replace", "y": 2}}, {"a": {"y": 2}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({}, {"a": {"b": None, "c": {"d": None}}}, {"a": {"c": {}}}),
        (
            {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
            {"env": [{"name": "B", "value": "3"}, {"name": "C"}, {"name": "A", "$patch": "delete"}]},
            {"env": [{"name": "B", "value": "3"}, {"name": "C"}]},
        ),
        ({"env": [{"name": "A"}]}, {"env": [{"$patch": "replace"}, {"name": "B"}]}, {"env": [{"name": "B"}]}),
        ({"volumes": [{"name": "A"}]}, {"volumes": [{"$patch": "replace"}]}, {"volumes": []}),
        (
            {"volumes": [{"name": "a", "emptyDir": {"medium": "Memory"}}]},
            {"volumes": [{"name": "a", "emptyDir": None, "hostPath": {"path": "/a"}}]},
            {"volumes": [{"name": "a", "hostPath": {"path": "/a"}}]},
        ),
        (
            {"ports": [{"port": 1, "name": "x"}]},
            {"ports": [{"port": 1, "name": "y"}]},
            {"ports": [{"port": 1, "name": "y"}]},
        ),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "b"}]}, {"tolerations": [{"key": "b"}]}),
        ({"a": 1}, {"a": {"b": 1}}, {"a": {"b": 1}}),
    ],
)
def test_a_strategic_merge(base: dict[str, Any], patch: dict[str, Any], wanted: dict[str, Any]) -> None:
    before = repr(base)
    assert merge(base, patch) == wanted
    assert repr(base) == before


def test_labels_annotations_and_the_cpu_limit_reach_every_pod() -> None:
    """A policy of the namespace may require a label, or a quota a limit, of each pod."""
    own = {"labels": {"team": "x"}, "annotations": {"a.b/c": "d"}, "launcher_resources": {"cpu_limit": "2"}}
    found = rendered(run_file({**own, "supervisor": True, "tensorboard": True, "worker_cpu": "1"}))
    replicas = one(found, "MPIJob")["spec"]["mpiReplicaSpecs"]
    templates = [one(found, "Job")["spec"]["template"], one(found, "Deployment")["spec"]["template"]]
    templates += [replicas[kind]["template"] for kind in ("Launcher", "Worker")]
    for template in templates:
        assert template["metadata"]["labels"]["team"] == "x"
        assert template["metadata"]["annotations"] == {"a.b/c": "d"}
        assert "cpu" in template["spec"]["containers"][0]["resources"]["limits"]
    selector = one(found, "Deployment")["spec"]["selector"]["matchLabels"]
    assert "team" not in selector, "it cannot be changed later"


def test_a_cpu_limit_below_the_request_is_refused() -> None:
    for limit, wrong in (("200m", True), ("0.2", True), ("250m", False), ("1", False)):
        problems = [*check_kubernetes(spec_of_file(run_file({"launcher_resources": {"cpu_limit": limit}})))]
        assert [problem.path[-1] for problem in problems] == ["cpu_limit"] * wrong
