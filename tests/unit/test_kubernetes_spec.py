"""`backends.kubernetes`: what is refused before the API server sees it, and with which message."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_runs import EVERYTHING, contents_of, one, pod_of, rendered, run_file, spec_of_file
from kubernetes_wrong import OURS, SERVERS, Wrong
from messages import alike, mentions
from run_files import SMALL, reported, spec_of

from ortflow.manifests.kubernetes import Placement, documents, dump, schema
from ortflow.workflow.errors import Faults, UserError
from ortflow.workflow.spec.checks.check import check
from ortflow.workflow.spec.checks.kubernetes import require
from ortflow.workflow.spec.file.document import parse_document
from ortflow.workflow.spec.file.load import read_run_file
from ortflow.workflow.spec.problem import dotted

HERE = "backends.kubernetes."
LABEL = "63 lower-case letters, digits and hyphens"


def found(kubernetes: dict[str, Any], **sections: Any) -> list[str]:
    problems = check(spec_of(backends={"kubernetes": kubernetes}, **sections))
    sentences = [
        f"{dotted(problem.path)}: {problem.what}" + (f"; {problem.fix}" if problem.fix else "") for problem in problems
    ]
    return [line.removeprefix(HERE) for line in sentences]


def refusals(wrong: Wrong, tmp_path: Path) -> list[str]:
    """The messages that a user gets, from the run file's text to the documents."""
    written, spec = wrong.written, None
    if wrong.key.endswith(".overlay[0]"):
        # The reader checks only the rest: the effect of a patch shows in the documents.
        spec = spec_of_file(written)
    else:
        file = tmp_path / "run.yaml"
        file.write_text(dump([written]))
        reading = read_run_file(file, files=False)
        spec, written = reading.spec, reading.written
        if reading.faults or spec is None:
            return [f"{fault.key}: {fault.what}" for fault in reading.faults]
    try:
        documents(written, spec, Placement(contents=contents_of(written)))
    except Faults as faults:
        return [str(fault) for fault in faults.faults]
    except UserError as error:
        return [str(error)]
    return []


def test_there_are_hundreds() -> None:
    assert len(OURS) >= 200
    assert len(SERVERS) >= 40
    assert len({wrong.name for wrong in (*OURS, *SERVERS)}) == len(OURS) + len(SERVERS)


def test_each_wrong_one_is_reported_at_its_key(tmp_path: Path) -> None:
    for wrong in OURS:
        sentences = refusals(wrong, tmp_path)
        assert any(line.startswith(wrong.key) for line in sentences), (wrong.name, sentences)
        assert all("\n" not in line and len(line) < 500 for line in sentences), wrong.name


def test_the_others_are_for_the_api_server(tmp_path: Path) -> None:
    for wrong in SERVERS:
        assert refusals(wrong, tmp_path) == [], wrong.name


@pytest.mark.parametrize(
    ("kubernetes", "sentence"),
    [
        ({"namespace": "My_Lab"}, f"namespace: … name of a namespace … 'My_Lab' … {LABEL}"),
        ({"image": "a b"}, "image: … [HOST/]NAME[:TAG]"),
        (
            {"volume": {"claim": "c", "host_path": "/x"}},
            "volume.host_path: … one of them",
        ),
        (
            {"volume": {"empty_dir": True}},
            "volume.empty_dir: … storage … launcher_as_worker",
        ),
        ({"ssh_port": 22}, "ssh_port: … above 1023"),
        ({"env": {"ORTFLOW_JOB": "x"}}, "env.ORTFLOW_JOB: … leave it out"),
        ({"secret_env": {"A": "s"}}, "secret_env.A: … write SECRET/KEY"),
        (
            {"labels": {"ortflow.dev/run": "x"}},
            "labels.ortflow.dev/run: … reserved … another name",
        ),
        (
            {"shared_memory": "8"},
            "shared_memory: … unit … 16G",
        ),
    ],
)
def test_the_messages(kubernetes: dict[str, Any], sentence: str) -> None:
    assert alike(found(kubernetes), [sentence])


@pytest.mark.parametrize(
    ("key", "value", "where", "what", "fix"),
    [
        ("tolerations", [{"key": "a", "operater": "Equal"}], "tolerations[0].operater", "unknown key", "operator"),
        ("tolerations", [{"zzz": 1}], "tolerations[0].zzz", "unknown key", "upgrade the package kubernetes"),
        ("tolerations", [{"key": True}], "tolerations[0].key", "text … true", ""),
        ("affinity", {"nodeAffinity": []}, "affinity.nodeAffinity", "mapping … list", ""),
        ("topology_spread", [{"maxSkew": "1", "topologyKey": "a", "whenUnsatisfiable": "ScheduleAnyway"}],
         "topology_spread[0].maxSkew", "whole number … '1'", ""),
        ("topology_spread", [{"maxSkew": 1}], "topology_spread[0].topologyKey", "is missing", ""),
        ("volumes", [{"name": "a", "mount": "/a", "source": {"hostPath": {"Path": "/a"}}}],
         "volumes[0].source.hostPath.Path", "unknown key", "path"),
    ],
)  # fmt: skip
def test_the_schema_of_the_api(key: str, value: Any, where: str, what: str, fix: str) -> None:
    with pytest.raises(Faults) as raised:
        rendered(run_file({key: value}))
    (fault,) = [fault for fault in raised.value.faults if fault.where == f"{HERE}{where}"]
    assert mentions(fault.what, what)
    assert fix in (fault.fix or "")


def test_amounts_may_be_numbers_and_keys_without_a_value_are_absent() -> None:
    pod = {
        "containers": [{"name": "worker", "resources": {"limits": {"cpu": 2, "memory": "1Gi"}}, "lifecycle": None}],
        "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": 1000}}],
    }
    patch = {"spec": {"mpiReplicaSpecs": {"Worker": {"template": {"spec": pod}}}}}
    job = one(rendered(run_file({"overlay": [{"kind": "MPIJob", "patch": patch}]})), "MPIJob")
    made = pod_of(job, "Worker")
    (worker,) = (each for each in made["containers"] if each["name"] == "worker")
    assert worker["resources"]["limits"] == {"cpu": 2, "memory": "1Gi"}
    assert worker.get("lifecycle") is None
    assert {"name": "scratch", "emptyDir": {"sizeLimit": 1000}} in made["volumes"]


@pytest.mark.parametrize("key", ["Launcher", "Worker"])
@pytest.mark.parametrize("pod", [5, {"containers": 5}, {"containers": [5]}, {"volumes": 5}])
def test_rules_of_the_operator_hold_where_no_schema_is_installed(
    key: str, pod: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They must not rely on types that the schema would have checked."""
    monkeypatch.setattr(schema, "available", lambda: False)
    patch = {"spec": {"mpiReplicaSpecs": {key: {"template": {"spec": pod}}}}}
    with pytest.raises(Faults, match=re.escape(f"{HERE}overlay[0]")):
        rendered(run_file({"overlay": [{"kind": "MPIJob", "patch": patch}]}))
    assert rendered(run_file({"tolerations": [{"key": 5}]})), "left to the API server"


def test_nothing_is_wrong_with_everything() -> None:
    assert found({**EVERYTHING}) == []
    assert found({}) == []


def test_one_pod_may_keep_what_it_writes() -> None:
    alone = {"launcher_as_worker": True, "volume": {"empty_dir": True}}
    assert found(alone, resources={"nodes": 1}) == []
    assert found(alone, resources={"nodes": 2}) != []
    assert (
        found({"volume": {"create": {"size": "1Gi", "access_modes": ["ReadWriteOncePod"]}}, "launcher_as_worker": True})
        == []
    )


def test_root_may_have_the_usual_port() -> None:
    assert found({"ssh_port": 22, "security": {"run_as_user": 0}}) == []


def test_what_is_missing_is_reported_only_where_it_is_needed() -> None:
    spec = spec_of()
    assert check(spec) == []
    with pytest.raises(Faults) as raised:
        require(spec)
    assert alike(
        [str(fault) for fault in raised.value.faults],
        [
            "backends.kubernetes.image: … name the image",
            "backends.kubernetes.volume: … claim, create, host_path, nfs, s3, empty_dir",
        ],
    )


def test_faults_have_their_line(tmp_path: Path) -> None:
    text = SMALL + "backends:\n  kubernetes:\n    image: a\n    ssh_port: 80\n    env:\n      A: 1\n"
    assert alike(
        reported(tmp_path, text),
        [
            "run.yaml:16 backends.kubernetes.ssh_port: … above 1023",
            "run.yaml:18 backends.kubernetes.env.A: … in quotes",
        ],
    )


def test_a_deadline_may_be_a_number_of_minutes(tmp_path: Path) -> None:
    text = SMALL + "backends: {kubernetes: {image: a, volume: {claim: c}, deadline: 90}}\n"
    assert reported(tmp_path, text) == []


def test_the_file_as_written(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(SMALL.replace("cross_entropy", "mse"))
    plain = read_run_file(file, files=False)
    assert plain.written["model"] == {"path": "model.onnx", "loss": "mse"}
    assert plain.written["data"]["train"] == "train.arrow"
    changed = read_run_file(file, ["train.steps=7", "data.train.columns.x=a"], files=False)
    assert changed.written["train"]["steps"] == 7
    assert changed.written["data"]["train"] == {"path": "train.arrow", "columns": {"x": "a"}}
    assert spec_of_file(changed.written) == changed.spec


def test_control_characters_travel() -> None:
    run = run_file({"env": {"A": "x\x85y\ufffe\x7f\u2028"}})
    carried = one(yaml.safe_load_all(dump(rendered(run))), "ConfigMap")["data"]["run.yaml"]
    assert parse_document(carried, "run.yaml").values["backends"]["kubernetes"]["env"] == {
        "A": "x\x85y\ufffe\x7f\u2028"
    }


def test_files_that_are_too_large_do_not_travel() -> None:
    run = run_file({"files": ["a.py"]})
    with pytest.raises(UserError, match="more than 900 KiB"):
        rendered(run, contents={"a.py": "x" * 10**6})


def test_the_supervisor_needs_a_namespace() -> None:
    with pytest.raises(UserError, match=r"backends\.kubernetes\.namespace: is missing"):
        rendered(run_file({"supervisor": True}), namespace=None)
