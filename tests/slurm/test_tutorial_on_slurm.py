"""docs/tutorials/first-slurm-job.md: its commands as the page prints them, on a cluster."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cluster import ENDS, Cluster, Run
from project import FEW_CORES, Project
from testbed import wait_until
from tutorials import commands, run_shell, write_files

LONG = " train.epochs=3000 checkpoint.every_steps=20"
"""So that there is still something to cancel."""


@pytest.mark.rotates("Slurm tutorial")
def test_the_first_slurm_job(cluster_of: Cluster) -> None:
    # Its model.onnx is another one than that of the project.
    folder = cluster_of.project.folder / "tutorial"
    folder.mkdir()
    cluster_of = replace(cluster_of, project=Project(folder))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**cluster_of.testbed.environment, **FEW_CORES, "PATH": path}
    write_files("only-onnx", folder)
    for line in commands("only-onnx"):
        if not line.startswith(("ortflow run", "ortflow status", "ortflow report", "ortflow evaluate", "python -c")):
            run_shell(line, folder, environment)
    printed = {}
    run = Run(cluster_of, "model")
    for line in commands("first-slurm-job"):
        submits = line.startswith("ortflow submit")
        printed[line] = run_shell(line + LONG if submits else line, folder, environment, timeout=240)
        if submits or line.startswith("ortflow resume"):
            wait_until(lambda: run.steps() > 0, ENDS)
    assert len(printed) == 9
    assert "running" in printed["ortflow status model"]
    assert "model" in printed["ortflow list"]
    run_shell("ortflow cancel model", folder, environment)
