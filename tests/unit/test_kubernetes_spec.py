"""`backends.kubernetes`: what is refused before the API server sees it, and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kubernetes_runs import EVERYTHING, contents_of, rendered, run_file, spec_of_file
from kubernetes_wrong import OURS, SERVERS, Wrong
from run_files import SMALL, spec_of, told

from ortflow.manifests.kubernetes import Placement, documents, dump
from ortflow.workflow.errors import Faults, UserError
from ortflow.workflow.spec.checks.check import check
from ortflow.workflow.spec.checks.kubernetes import require
from ortflow.workflow.spec.file.load import read_run_file
from ortflow.workflow.spec.problem import dotted

HERE = "backends.kubernetes."
LABEL = "use at most 63 lower-case letters, digits and hyphens, a letter or digit first and last"


def found(kubernetes: dict[str, Any], **sections: Any) -> list[str]:
    problems = check(spec_of(backends={"kubernetes": kubernetes}, **sections))
    sentences = [
        f"{dotted(problem.path)}: {problem.what}" + (f"; {problem.fix}" if problem.fix else "") for problem in problems
    ]
    return [line.removeprefix(HERE) for line in sentences]


def refusals(wrong: Wrong, tmp_path: Path) -> list[str]:
    """What a person is told, from the run file's text to the documents."""
    written, spec = wrong.written, None
    if wrong.key.endswith(".overlay[0]"):
        # The reader looks at the rest alone: what a patch does shows in the documents.
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


def test_each_wrong_one_is_told_at_its_key(tmp_path: Path) -> None:
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
        ({"namespace": "My_Lab"}, f"namespace: is not a valid name of a namespace: 'My_Lab'; {LABEL}"),
        ({"image": "a b"}, "image: is not a valid image: 'a b'; write [HOST/]NAME[:TAG], the name in lower case"),
        (
            {"volume": {"claim": "c", "host_path": "/x"}},
            "volume.host_path: cannot be combined with claim; give one of them",
        ),
        (
            {"volume": {"empty_dir": True}},
            "volume.empty_dir: is visible to one pod only, and the run has more; "
            "use storage that all pods see, or one node with launcher_as_worker",
        ),
        ({"ssh_port": 22}, "ssh_port: is 22, which only root may use; give one above 1023"),
        ({"env": {"ORTFLOW_JOB": "x"}}, "env.ORTFLOW_JOB: is set by ortflow or the operator; leave it out"),
        ({"secret_env": {"A": "s"}}, "secret_env.A: is not a key of a secret: 's'; write SECRET/KEY"),
        (
            {"labels": {"ortflow.dev/run": "x"}},
            "labels.ortflow.dev/run: is ortflow's or the operator's own; give another name",
        ),
        (
            {"tolerations": [{"key": "a", "operator": "exists"}]},
            "tolerations[0].operator: must be Equal or Exists, not the text 'exists'; did you mean Exists?",
        ),
        (
            {"volumes": [{"name": "a", "mount": "/a", "source": {"hostPath": {"path": "/a", "type": "Folder"}}}]},
            "volumes[0].source.hostPath.type: must be BlockDevice, CharDevice, Directory, DirectoryOrCreate, File, "
            "FileOrCreate or Socket, not the text 'Folder'; did you mean File?",
        ),
        (
            {"shared_memory": "8"},
            "shared_memory: '8' is not an amount of memory; write a number and a unit, such as 16G, 16Gi or 512M",
        ),
    ],
)
def test_the_words(kubernetes: dict[str, Any], sentence: str) -> None:
    assert found(kubernetes) == [sentence]


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


def test_what_is_missing_is_told_only_where_it_is_needed() -> None:
    spec = spec_of()
    assert check(spec) == []
    with pytest.raises(Faults) as raised:
        require(spec)
    assert [str(fault) for fault in raised.value.faults] == [
        "backends.kubernetes.image: is missing; name the image that the pods run",
        "backends.kubernetes.volume: has no storage; give one of claim, create, host_path, nfs, s3, empty_dir",
    ]


def test_faults_have_their_line(tmp_path: Path) -> None:
    text = SMALL + "backends:\n  kubernetes:\n    image: a\n    ssh_port: 80\n    env:\n      A: 1\n"
    assert told(tmp_path, text) == [
        "run.yaml:16 backends.kubernetes.ssh_port: is 80, which only root may use; give one above 1023",
        "run.yaml:18 backends.kubernetes.env.A: must be text, not 1; put it in quotes",
    ]


def test_a_deadline_may_be_a_number_of_minutes(tmp_path: Path) -> None:
    text = SMALL + "backends: {kubernetes: {image: a, volume: {claim: c}, deadline: 90}}\n"
    assert told(tmp_path, text) == []


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


def test_control_characters_do_not_travel() -> None:
    with pytest.raises(UserError, match=r"U\+0085"):
        rendered(run_file({"env": {"A": "x\x85y"}}))


def test_files_that_are_too_large_do_not_travel() -> None:
    run = run_file({"files": ["a.py"]})
    with pytest.raises(UserError, match="more than 900 KiB"):
        rendered(run, contents={"a.py": "x" * 10**6})


def test_the_supervisor_needs_a_namespace() -> None:
    with pytest.raises(UserError, match=r"backends\.kubernetes\.namespace: is missing"):
        rendered(run_file({"supervisor": True}), namespace=None)
