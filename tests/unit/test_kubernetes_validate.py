"""`ortflow validate` of runs for Kubernetes: faults of an overlay are reported with their line, with all others."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from kubernetes_runs import run_file
from messages import mentions
from typer.testing import CliRunner, Result

from ortflow.cli.validate import validate
from ortflow.manifests.kubernetes import dump, schema

app = typer.Typer()
app.command()(validate)


def run(folder: Path, *overrides: str, **kubernetes: object) -> Result:
    file = folder / "run.yaml"
    file.write_text(dump([run_file({"image": "ortflow:1", **kubernetes})]))
    return CliRunner().invoke(app, [str(file), *overrides])


def said(done: Result) -> list[str]:
    return [line for line in done.stderr.splitlines() if "there is no file" not in line]


def test_what_an_overlay_breaks(tmp_path: Path) -> None:
    overlay = [
        {"kind": "MPIJob", "patch": {"spec": {"runPolicy": {"cleanPodPolicy": "Some"}}}},
        {"kind": "Service", "patch": {}},
    ]
    done = run(tmp_path, overlay=overlay)
    assert done.exit_code == 2
    first, second = said(done)
    assert "backends.kubernetes.overlay[0]: makes MPIJob spec.runPolicy.cleanPodPolicy wrong" in first
    assert first.startswith(f"error: {tmp_path}/run.yaml:"), "with its line"
    assert mentions(second, "backends.kubernetes.overlay[1]", "ServiceAccount small-")
    assert "there is no file" in done.stderr, "with all other faults"


def test_inputs_that_lie_on_the_volume(tmp_path: Path) -> None:
    done = run(tmp_path, "--backend=kubernetes")
    assert done.exit_code == 0, done.stderr
    assert mentions(done.stdout, f"{tmp_path}/run.yaml: valid")
    assert mentions(done.stdout, "not checked", "/ortflow/files/small")
    assert "from /in on the volume" in run(tmp_path, "--backend=kubernetes", "backends.kubernetes.folder=/in").stdout
    for wrong in ({"volume": {}}, {"overlay": [{"kind": "Service", "patch": {}}]}, {"ssh_port": 22}):
        assert run(tmp_path, "--backend=kubernetes", **wrong).exit_code == 2, wrong
    assert run(tmp_path, "--backend=kubernetes", "backends.kubernetes.image=null").exit_code == 2
    assert run(tmp_path).exit_code == 2, "inputs are required here"


def test_what_keys_must_agree_on(tmp_path: Path) -> None:
    done = run(tmp_path, volume={})
    assert done.exit_code == 2
    assert "backends.kubernetes.volume" in said(done)[0]


def test_a_run_that_goes_elsewhere_or_is_right(tmp_path: Path) -> None:
    """Carried files need not exist, and the namespace need not be known."""
    assert said(run(tmp_path, "backends.kubernetes.image=null", overlay=[{"kind": "Service", "patch": {}}])) == []
    assert said(run(tmp_path, supervisor=True, files=["make.py"])) == []


def test_what_cannot_be_checked_without_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tolerations = [{"key": "a", "operater": "Exists"}]
    assert run(tmp_path, "--backend=kubernetes", tolerations=tolerations).exit_code == 2
    monkeypatch.setattr(schema, "available", lambda: False)
    done = run(tmp_path, "--backend=kubernetes", tolerations=tolerations)
    assert done.exit_code == 0
    assert "not checked: the model and the data" in done.stdout
    assert "pip install 'ortflow[kubernetes]'" in done.stdout
    assert "pip install" not in run(tmp_path, "--backend=kubernetes").stdout, "there is nothing for it to check"
