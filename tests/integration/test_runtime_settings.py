"""A run on a runtime that needs workarounds reports and records them, and resumes bit for bit only with the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from messages import mentions
from project import Project, command, logs, of_kind

from ortflow.workflow.runtime_check.remember import runtime_here
from ortflow.workflow.sessions.settings import Outcome, Settings

FOUND = Outcome(Settings(("Pad_Fusion",)), {"MaxPool of an image padded with zeros": "an error of 1"})


def test_workarounds_are_reported_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = {"ORTFLOW_CACHE": str(tmp_path / "cache")}
    monkeypatch.setenv("ORTFLOW_CACHE", cache["ORTFLOW_CACHE"])
    runtime_here(afresh=True, check=lambda: FOUND)
    project = Project.make(tmp_path)
    file, run_dir = project.write("small", train__steps=10, resources__ranks_per_node=1), project.run_dir("small")
    done = command("run", file.name, folder=tmp_path, **cache)
    assert done.returncode == 0, done.stdout + done.stderr
    (checked,) = of_kind(run_dir, "runtime_check")
    assert (checked["settings"], checked["faults"], checked["seconds"]) == ("Pad_Fusion", FOUND.faults, None)
    assert mentions(logs(run_dir), "MaxPool", "an error of 1")
    newest = max((run_dir / "checkpoints").iterdir())
    assert json.loads((newest / "manifest.json").read_text())["environment"]["settings"] == "Pad_Fusion"
    steps = json.loads((newest / "manifest.json").read_text())["step"] + 1
    runtime_here(afresh=True, check=lambda: Outcome(Settings()))
    done = command("resume", run_dir.name, f"train.steps={steps}", folder=tmp_path, **cache)
    assert done.returncode == 2
    assert "settings of sessions: Pad_Fusion before, none now" in done.stdout + done.stderr + logs(run_dir)
