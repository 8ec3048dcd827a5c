"""docs/tutorials/first-mpijob.md: its commands as the page prints them, on a cluster."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes_testbed import Testbed
from project import FEW_CORES
from tutorials import commands, page, run_shell, write_files

LONG = (
    " train.epochs=3000 checkpoint.every_steps=20 resources.memory=1Gi"
    f" 'backends.kubernetes.env={json.dumps(FEW_CORES)}'"
)
"""So that there is still something to cancel."""


@pytest.fixture
def namespace(cluster_testbed: Testbed) -> Iterator[str]:
    name = f"tutorial-{os.getpid()}"
    cluster_testbed.ask("kubectl", "create", "namespace", name)
    yield name
    cluster_testbed.ask("kubectl", "-n", name, "delete", "pods,mpijobs", "--all", "--wait=false", "--grace-period=1")
    cluster_testbed.ask("kubectl", "delete", "namespace", name, "--wait=false")


@pytest.mark.rotates("Kubernetes tutorial")
def test_the_first_mpijob(cluster_testbed: Testbed, namespace: str, tmp_path: Path) -> None:
    environment = {
        **cluster_testbed.environment,
        "PATH": f"{Path(sys.executable).parent}:{cluster_testbed.environment['PATH']}",
    }
    write_files("only-onnx", tmp_path)
    for line in commands("only-onnx")[:4]:
        run_shell(line, tmp_path, environment)
    (section,) = re.findall(r"```yaml\n(.*?)```", page("first-mpijob"), re.DOTALL)
    section = section.replace("registry.example/ortflow:1", "localhost/ortflow:testbed")
    with (tmp_path / "model.yaml").open("a") as file:
        file.write(f"{section}    namespace: {namespace}\n")
    printed = {}
    for line in commands("first-mpijob"):
        submits = line.startswith("ortflow submit")
        printed[line] = run_shell(line + LONG if submits else line, tmp_path, environment, timeout=300)
        if submits or line.startswith("ortflow resume"):
            running = "ortflow status model | grep -q '^state *running' && ortflow logs model >logs.txt 2>&1"
            follow = f"for i in $(seq 150); do {running} && exit 0; sleep 1; done; exit 1"
            run_shell(follow, tmp_path, environment, timeout=300)
    assert len(printed) == 9
    assert "running" in printed["ortflow status model"]
