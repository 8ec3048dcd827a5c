"""The chart: its values are the run file's defaults, and Helm renders the same as `ortflow render`.

All but the first tests need the `helm` command (or its path in ORTFLOW_HELM).
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kubernetes_runs import EVERYTHING, any_run_file, contents_of, rendered, run_file

from ortflow import __version__
from ortflow.manifests.kubernetes import dump, names
from ortflow.manifests.kubernetes.chart import main
from ortflow.manifests.kubernetes.options import RULES
from ortflow.manifests.kubernetes.values import canonical, defaults
from ortflow.workflow.spec.file.document import parse_document

CHART = Path(__file__).parents[2] / "charts" / "ortflow"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
HELM = os.environ.get("ORTFLOW_HELM") or shutil.which("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="there is no helm command, and ORTFLOW_HELM names none")


def helm(*words: str | Path) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, *map(str, words)], capture_output=True, text=True, timeout=120)


def printed(*words: str | Path) -> list[dict[str, Any]]:
    done = helm("template", "release", *words, "--skip-tests", "--namespace", "default")
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.load_all(done.stdout, Loader=LOADER) if document]


def written_to(folder: Path, values: dict[str, Any]) -> Path:
    file = folder / "run.yaml"
    file.write_text(dump([values]))
    return file


def in_chart(written: dict[str, Any]) -> dict[str, Any]:
    """The values of a run file whose carried files are given with --set-file."""
    texts = contents_of(written).values()
    return {**written, "contents": {f"file-{place}": text for place, text in enumerate(texts)}} if texts else written


def read(found: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Documents by kind and name, with the run file in the ConfigMap as values: Helm writes YAML in its own style."""
    for document in found:
        if document["kind"] == "ConfigMap":
            reading = parse_document(document["data"]["run.yaml"], "run.yaml")
            assert not reading.problems
            document["data"]["run.yaml"] = reading.values
    return {(document["kind"], document["metadata"]["name"]): document for document in found}


def test_the_schema_is_up_to_date(tmp_path: Path) -> None:
    main(tmp_path)
    written = (tmp_path / "values.schema.json").read_text()
    again = "run: python -m ortflow.manifests.kubernetes.chart charts/ortflow"
    assert (CHART / "values.schema.json").read_text() == written, again


def test_values_are_the_defaults_of_the_run_file() -> None:
    assert yaml.safe_load((CHART / "values.yaml").read_text()) == defaults()
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (about["version"], about["appVersion"]) == (__version__, __version__)


def test_the_supervisor_has_the_same_rights_as_by_render() -> None:
    lines = (CHART / "templates/supervisor-role.yaml").read_text().splitlines()
    rights = [yaml.safe_load(line.removeprefix("- ")) for line in lines if line.startswith("- {")]
    assert [(right["apiGroups"], right["resources"], right["verbs"]) for right in rights] == [
        ([group], resources, verbs) for group, resources, verbs in RULES
    ]


def test_every_value_has_a_comment() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    for before, line in itertools.pairwise(lines):
        key = line.strip().partition(":")[0]
        if (
            not line.strip()
            or line.strip().startswith("#")
            or key in ("resources", "monitor", "backends", "kubernetes")
        ):
            continue
        assert before.strip().startswith("# "), line


@needs_helm
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_helm_makes_what_render_prints(tmp_path: Path, seed: int) -> None:
    """Twenty run files in one call: as many dependencies on the chart, each with its own values."""
    chance = random.Random(seed)
    runs = {f"r{number}": any_run_file(chance, _name(chance, number)) for number in range(20)}
    runs["all"] = run_file(EVERYTHING, name=f"all-{seed}", resources={"nodes": 4, "gpus_per_rank": 8})
    runs["spare"] = run_file(name=f"spare-{seed}", resources={"nodes": 9, "spares": seed})
    shutil.copytree(CHART, tmp_path / "around" / "charts" / "ortflow")
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    around = {
        "apiVersion": "v2",
        "name": "around",
        "version": "1.0.0",
        "dependencies": [{"name": "ortflow", "version": version, "repository": "", "alias": alias} for alias in runs],
    }
    (tmp_path / "around" / "Chart.yaml").write_text(json.dumps(around))
    values = written_to(tmp_path, {alias: in_chart(run) for alias, run in runs.items()})
    found = printed(tmp_path / "around", "-f", values)
    by_name: dict[str, list[dict[str, Any]]] = {}
    for document in found:
        by_name.setdefault(document["metadata"]["labels"]["ortflow.dev/run"], []).append(document)
    for run in runs.values():
        assert read(by_name[run["name"]]) == read(rendered(run, contents=contents_of(run))), run


@needs_helm
def test_alone_also_in_the_same_order(tmp_path: Path) -> None:
    run = run_file({**EVERYTHING, "namespace": None}, seed=None, backends_=None)
    del run["backends_"]
    run["restart"] = {"failures": None, "hung_seconds": None}
    run["checkpoint"] = None
    theirs, ours = read(printed(CHART, "-f", written_to(tmp_path, run))), read(rendered(run))
    assert theirs == ours
    assert [*theirs] == [*ours]


@needs_helm
def test_numbers_on_the_way_through_helm(tmp_path: Path) -> None:
    chance = random.Random(3)
    numbers = [chance.choice([1, -1]) * 10 ** chance.uniform(-12, 25) for _ in range(400)]
    numbers += [float(f"1e{power}") for power in range(-30, 30)] + [0.0, -0.0, 2.0**53, 5e-324, 1.7976931348623157e308]
    run = run_file()
    run["data"]["pad_value"] = {f"p{place}": number for place, number in enumerate(numbers)}
    for found in (printed(CHART, "-f", written_to(tmp_path, run)), rendered(run)):
        (config,) = [document for document in read(found).values() if document["kind"] == "ConfigMap"]
        # Above 2^53 Helm writes a whole number with the digits of the nearest floating-point one.
        back = config["data"]["run.yaml"]["data"]["pad_value"]
        assert {key: float(number) for key, number in back.items()} == run["data"]["pad_value"]


def _name(chance: random.Random, number: int) -> str:
    middle = "".join(chance.choice("abc019-") for _ in range(chance.choice([0, 5, 30, 45])))
    return f"{chance.choice('ab09')}{middle}{number}"


AMOUNT = st.from_regex(r"[0-9]{1,4}(\.[0-9]{1,3})? ?[kKmMgGtTpP]i?[bB]?", fullmatch=True)
TIME = st.from_regex(r"([0-9]{1,3}-)?[0-9]{1,3}:[0-5]?[0-9]:[0-5]?[0-9]", fullmatch=True).filter(
    lambda text: any(digit in text for digit in "123456789")
)
RUN_NAME = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?", fullmatch=True) | (
    # There is a hyphen wherever the name is cut.
    st.text("a-", min_size=40, max_size=50).map(lambda middle: f"0{middle}z")
)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
CALLS = st.one_of(
    st.tuples(st.just("quantity"), AMOUNT),
    st.tuples(st.just("seconds"), TIME | st.integers(1, 10**9 - 1) | st.integers(1, 10**9 - 1).map(str)),
    st.tuples(st.just("digest"), TEXT),
    st.tuples(st.just("literal"), st.text("$()A{}", max_size=12)),
    st.tuples(st.just("label"), RUN_NAME),
    st.tuples(st.just("job_name"), RUN_NAME, st.integers(1, 9999), st.sampled_from(["abcdef", "0a1b2c"])),
    st.tuples(st.just("sibling"), RUN_NAME, st.sampled_from(["data", "tensorboard"])),
    st.tuples(st.just("inside"), st.sampled_from(["/a", "/a/", "/a//b//", "/"]), st.sampled_from(["b", "/c", "b/c/"])),
)


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chart that outputs the functions' results for `calls`."""
    folder = tmp_path_factory.mktemp("twins")
    (folder / "templates").mkdir()
    (folder / "Chart.yaml").write_text(json.dumps({"apiVersion": "v2", "name": "twins", "version": "1.0.0"}))
    shutil.copy(CHART / "templates" / "_names.tpl", folder / "templates")
    (folder / "templates" / "said.yaml").write_text(
        "said:\n{{- range .Values.calls }}\n"
        '- {{ include (printf "ortflow.%s" (first .)) (rest .) | toJson }}\n{{- end }}\n'
    )
    return folder


@needs_helm
@settings(max_examples=4, deadline=None, suppress_health_check=[*HealthCheck])
@given(st.lists(CALLS, min_size=100, max_size=200))
def test_every_function_is_its_twin(twins: Path, calls: list[tuple[Any, ...]]) -> None:
    values = twins.parent / "calls.json"
    values.write_text(dump([{"calls": [[*call] for call in calls]}]))
    output = printed(twins, "-f", values)[0]["said"]
    for call, theirs in zip(calls, output, strict=True):
        assert theirs == str(getattr(names, call[0])(*call[1:])), call


@needs_helm
def test_lint(tmp_path: Path) -> None:
    done = helm("lint", "--strict", CHART, "-f", written_to(tmp_path, run_file(EVERYTHING)))
    assert done.returncode == 0, done.stdout


@needs_helm
@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"name": "Big"}, "name"),
        ({"trian": {}}, "trian"),
        ({"resources": {"nodes": 0}}, "nodes"),
        ({"resources": {"nodes": "two"}}, "nodes"),
        ({"seed": 2**60}, "seed"),
        ({"backends": {"kubernetes": {"volume": {"claim": "c"}}}}, "image"),
        ({"backends": {"kubernetes": {"image": None, "volume": {"claim": "c"}}}}, "image"),
        ({"backends": {"kubernetes": {"image": "a"}}}, "volume"),
        ({"backends": {"kubernetes": {"image": "a", "volume": {"claim": "c", "host_path": "/x"}}}}, "volume"),
        ({"backends": {"kubernetes": {"image": "a", "volume": {"claim": "c"}, "mpi": "intel"}}}, "mpi"),
        ({"backends": {"kubernetes": {"image": "a", "volume": {"claim": "c"}, "files": ["a.py"]}}}, "--set-file"),
        ({"resources": {"nodes": None}}, "nodes"),
        ({"backends": {"kubernetes": {"image": "a", "volume": {"claim": "c"}, "ssh_port": None}}}, "ssh_port"),
        (
            {"backends": {"kubernetes": {"image": "a", "volume": {"claim": "c"}, "overlay": [{"kind": "Pod"}]}}},
            "overlay",
        ),
        ({"train": {"steps": 1, "optimizer": {"name": "adan", "lr": 1}}}, "optimizer"),
    ],
)
def test_helm_itself_refuses_bad_values(tmp_path: Path, change: dict[str, Any], reported: str) -> None:
    done = helm("template", "x", CHART, "-f", written_to(tmp_path, run_file(**change)))
    assert done.returncode != 0
    assert reported in done.stderr


@needs_helm
@pytest.mark.parametrize("section", ["env", "secret_env", "labels", "annotations", "worker_node_selector"])
def test_a_name_that_helm_reads_as_a_boolean_is_refused(tmp_path: Path, section: str) -> None:
    """YAML 1.1 reads N as false, and the variable would get that name."""
    file = written_to(tmp_path, run_file())
    file.write_text(file.read_text().replace("    image:", f"    {section}: {{N: a}}\n    image:"))
    assert "{N: a}" in file.read_text()
    done = helm("template", "x", CHART, "-f", file)
    assert done.returncode != 0
    assert f"backends.kubernetes.{section}: Helm has read a name such as N" in done.stderr
    assert "put the name in quotes" in done.stderr
    file.write_text(file.read_text().replace("{N: a}", '{"N": a/b}' if section == "secret_env" else '{"N": a}'))
    assert helm("template", "x", CHART, "-f", file).returncode == 0


@needs_helm
def test_helm_test_checks_the_image(tmp_path: Path) -> None:
    done = helm("template", "x", CHART, "-f", written_to(tmp_path, run_file()), "-s", "templates/tests/doctor.yaml")
    pod = yaml.safe_load(done.stdout)
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["spec"]["containers"][0]["command"] == ["python", "-m", "ortflow", "image", "check"]


@needs_helm
def test_notes(tmp_path: Path) -> None:
    templates = shutil.copytree(CHART, tmp_path / "chart") / "templates"
    text = (templates / "NOTES.txt").read_text()
    (templates / "said.yaml").write_text(
        f'{{{{ define "notes" }}}}{text}{{{{ end }}}}\nsaid: {{{{ include "notes" . | toJson }}}}\n'
    )
    run = run_file({"volume": {"create": {"size": "1Gi"}}})
    found = printed(tmp_path / "chart", "-f", written_to(tmp_path, run), "-s", "templates/said.yaml")
    job = rendered(run)[-1]["metadata"]["name"]
    assert f"small trains as MPIJob {job} in namespace default." in found[0]["said"]
    assert "The claim small-data" in found[0]["said"]


def test_canonical_is_json() -> None:
    value = {"b": [1, 2.5, None, True, '\u2028<&>\x07\x08\x0c\n"'], "a": {}}
    assert json.loads(canonical(value)) == value
    assert canonical(value).startswith('{"a":{},"b":[1,2.5,null,true,"')
