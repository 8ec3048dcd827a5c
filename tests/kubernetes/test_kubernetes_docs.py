"""docs/kubernetes.md: from an empty cluster to a trained model by its ten commands, verbatim."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes_testbed import Testbed
from project import FEW_CORES

ROOT = Path(__file__).parents[2]
SHORT = f" train.steps=20 resources.memory=1Gi 'backends.kubernetes.env={json.dumps(FEW_CORES)}'"
"""The real one takes some minutes."""


@pytest.fixture
def namespace(cluster_testbed: Testbed) -> Iterator[str]:
    name = f"docs-{os.getpid()}"
    yield name
    cluster_testbed.ask("kubectl", "-n", name, "delete", "pods,mpijobs", "--all", "--wait=false", "--grace-period=1")
    cluster_testbed.ask("kubectl", "delete", "namespace", name, "--wait=false")


def test_ten_commands(cluster_testbed: Testbed, namespace: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    block = re.search(r"```sh\n(.*?)```", text, re.DOTALL)
    assert block is not None
    commands = block[1].splitlines()
    assert len(commands) == 10
    shutil.copytree(ROOT / "examples" / "gpt", tmp_path / "examples" / "gpt", ignore=shutil.ignore_patterns("build"))
    definition = tmp_path / "operator.json"
    found = cluster_testbed.get("crd", "mpijobs.kubeflow.org")
    found["metadata"] = {"name": found["metadata"]["name"], "annotations": found["metadata"].get("annotations") or {}}
    found.pop("status", None)
    definition.write_text(json.dumps(found))
    environment = {
        **cluster_testbed.environment,
        "IMAGE": "localhost/ortflow:testbed",
        "NAMESPACE": namespace,
        "MPI_OPERATOR": str(definition),
        "PATH": f"{Path(sys.executable).parent}:{cluster_testbed.environment['PATH']}",
    }
    for command in commands:
        line = command + (SHORT if command.startswith(("ortflow submit", "ortflow doctor")) else "")
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
            check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        if command.startswith("ortflow status"):
            assert "finished" in done.stdout
    assert (tmp_path / "model.onnx").stat().st_size > 1_000_000
