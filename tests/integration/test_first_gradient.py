"""A run checks its gradient once per combination of graphs, kernels and runtime, on rank 0."""

from __future__ import annotations

from pathlib import Path

import pytest
from project import Project, curve, of_kind


def test_a_gradient_is_checked_before_the_first_step_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "project").mkdir()
    project = Project.make(tmp_path / "project")
    short = {"train__steps": 6}
    unchecked = project.run("unchecked", **short, train__check_gradient=False)
    assert of_kind(unchecked, "gradient_check") == []
    first, second = project.run("checked", **short), project.run("known", **short)
    (record,) = of_kind(first, "gradient_check")
    assert "differences of the loss" in record["compared"]
    assert record["rank"] == 0
    assert of_kind(second, "gradient_check") == []
    assert curve(first) == curve(second) == curve(unchecked)
    assert [path.name for path in (tmp_path / "cache" / "ortflow" / "gradients").iterdir()]
