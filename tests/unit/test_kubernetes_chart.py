"""The chart: what is generated of it is up to date, and Helm makes of it what `ortflow render` prints.

Needs the `helm` command (or its path in ORTFLOW_HELM) for all but the first two tests.
"""

from __future__ import annotations

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
from trees import tree

from ortflow.manifests.kubernetes import dump
from ortflow.manifests.kubernetes.chart import chart, main
from ortflow.manifests.kubernetes.functions import FUNCTIONS
from ortflow.manifests.kubernetes.values import canonical
from ortflow.workflow.errors import UserError

CHART = Path(__file__).parents[2] / "charts" / "ortflow"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
HELM = os.environ.get("ORTFLOW_HELM") or shutil.which("helm")
AGAIN = "run: python -m ortflow.manifests.kubernetes.chart charts/ortflow"
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


def test_the_generated_files_are_up_to_date() -> None:
    files = chart()
    for name, text in files.items():
        assert (CHART / name).read_text(encoding="utf-8") == text, f"{name} differs; {AGAIN}"
    for path in CHART.rglob("*"):
        if path.is_file() and path.name not in {"NOTES.txt", "_functions.tpl", ".helmignore"}:
            assert str(path.relative_to(CHART)) in files, f"{path} is not generated; {AGAIN}"


def test_only_generated_files_are_replaced(tmp_path: Path) -> None:
    main(tmp_path)
    before = tree(tmp_path)
    (tmp_path / "templates" / "own.yaml").write_text("precious: true\n")
    (tmp_path / "templates" / "old.yaml").write_text((tmp_path / "templates" / "claim.yaml").read_text())
    (tmp_path / "templates" / "link.yaml").symlink_to(tmp_path / "templates" / "claim.yaml")
    main(tmp_path)
    assert sorted(set(tree(tmp_path)) - set(before)) == ["templates/link.yaml", "templates/own.yaml"]
    for name in chart():
        (tmp_path / name).rename(tmp_path / "kept")
        (tmp_path / name).write_text("precious")
        with pytest.raises(UserError, match=r"was not written by this program"):
            main(tmp_path)
        (tmp_path / "kept").rename(tmp_path / name)


@needs_helm
@pytest.mark.parametrize("seed", [1, 2])
def test_helm_makes_what_render_prints(tmp_path: Path, seed: int) -> None:
    """Twenty run files in one call: as many dependencies on the chart, each with its own values."""
    chance = random.Random(seed)
    runs = {f"r{number}": any_run_file(chance, _name(chance, number)) for number in range(20)}
    runs["all"] = run_file(EVERYTHING, name=f"all-{seed}", resources={"nodes": 4, "gpus_per_rank": 8})
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
        theirs = {_id(document): document for document in by_name[run["name"]]}
        ours = {_id(document): document for document in rendered(run, contents=contents_of(run))}
        assert theirs == ours, run


@needs_helm
def test_alone_also_in_the_same_order(tmp_path: Path) -> None:
    run = run_file({**EVERYTHING, "namespace": None}, seed=None, backends_=None)
    del run["backends_"]
    run["restart"] = {"failures": None, "hung_seconds": None}
    run["checkpoint"] = None
    assert printed(CHART, "-f", written_to(tmp_path, run)) == rendered(run)


@needs_helm
def test_numbers_on_the_way_through_helm(tmp_path: Path) -> None:
    chance = random.Random(3)
    numbers = [chance.choice([1, -1]) * 10 ** chance.uniform(-12, 25) for _ in range(400)]
    numbers += [float(f"1e{power}") for power in range(-30, 30)] + [0.0, -0.0, 2.0**53, 5e-324, 1.7976931348623157e308]
    run = run_file()
    run["data"]["pad_value"] = {f"p{place}": number for place, number in enumerate(numbers)}
    (config,) = [document for document in printed(CHART, "-f", written_to(tmp_path, run)) if "data" in document]
    (ours,) = [document for document in rendered(run) if "data" in document]
    assert config["data"]["run.yaml"] == ours["data"]["run.yaml"]
    back = json.loads(ours["data"]["run.yaml"], parse_int=float)["data"]["pad_value"]
    assert back == run["data"]["pad_value"]


def _id(document: dict[str, Any]) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def _name(chance: random.Random, number: int) -> str:
    middle = "".join(chance.choice("abc019-") for _ in range(chance.choice([0, 5, 30, 45])))
    return f"{chance.choice('ab09')}{middle}{number}"


AMOUNT = st.from_regex(r"[0-9]{1,4}(\.[0-9]{1,3})? ?[kKmMgGtTpP]i?[bB]?", fullmatch=True)
TIME = st.from_regex(r"([0-9]{1,3}-)?[0-9]{1,3}:[0-5]?[0-9]:[0-5]?[0-9]", fullmatch=True).filter(
    lambda text: any(digit in text for digit in "123456789")
)
RUN_NAME = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?", fullmatch=True) | (
    # Whatever is cut, a hyphen stands there.
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
    st.tuples(st.just("before"), st.from_regex(r"[a-z./]{0,9}", fullmatch=True), st.just("/")),
    st.tuples(st.just("after"), st.from_regex(r"[a-z./]{0,9}", fullmatch=True), st.just("/")),
)


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chart that says what the functions make of `calls`."""
    folder = tmp_path_factory.mktemp("twins")
    (folder / "templates").mkdir()
    (folder / "Chart.yaml").write_text(json.dumps({"apiVersion": "v2", "name": "twins", "version": "1.0.0"}))
    shutil.copy(CHART / "templates" / "_functions.tpl", folder / "templates")
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
    said = printed(twins, "-f", values)[0]["said"]
    for call, theirs in zip(calls, said, strict=True):
        assert theirs == str(FUNCTIONS[call[0]](*call[1:])), call


def test_every_function_has_a_twin() -> None:
    text = (CHART / "templates" / "_functions.tpl").read_text()
    for name in FUNCTIONS:
        assert f'define "ortflow.{name}"' in text


@needs_helm
def test_lint(tmp_path: Path) -> None:
    done = helm("lint", "--strict", CHART, "-f", written_to(tmp_path, run_file(EVERYTHING)))
    assert done.returncode == 0, done.stdout


@needs_helm
@pytest.mark.parametrize(
    ("change", "told"),
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
        ({"train": {"steps": 1, "optimizer": {"name": "adan", "lr": 1}}}, "optimizer"),
    ],
)
def test_helm_itself_refuses_bad_values(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    done = helm("template", "x", CHART, "-f", written_to(tmp_path, run_file(**change)))
    assert done.returncode != 0
    assert told in done.stderr


@needs_helm
@pytest.mark.parametrize("section", ["env", "secret_env", "labels", "annotations", "worker_node_selector"])
def test_a_name_that_helm_reads_as_a_word_is_refused(tmp_path: Path, section: str) -> None:
    """YAML 1.1 takes N for false, and the variable would be called so."""
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
def test_helm_test_looks_at_the_image(tmp_path: Path) -> None:
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
