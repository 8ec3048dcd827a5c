"""A run checks its gradient once per combination of graphs, kernels and runtime, on rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from caches import cache_without_gradients
from project import Project, curve, of_kind


def test_a_gradient_is_checked_before_the_first_step_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_without_gradients(tmp_path / "cache")))
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


@pytest.mark.rotates
@pytest.mark.parametrize(
    "layout",
    [
        {"resources__ranks_per_node": 1},
        {"parallel__zero": 3},
        {"parallel__pipeline": 2},
    ],
    ids=["one rank", "zero", "pipeline"],
)
def test_a_model_with_a_fixed_batch_is_checked_with_all_of_it(
    layout: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check took two samples, and ONNX Runtime refused them in each attempt."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_without_gradients(tmp_path / "cache")))
    (tmp_path / "project").mkdir()
    project = Project.make(tmp_path / "project")
    file = project.folder / "model.onnx"
    model = onnx.load(file)
    for given in (*model.graph.input, *model.graph.output):
        given.type.tensor_type.shape.dim[0].dim_value = 4
    del model.graph.value_info[:]
    onnx.save(model, file)
    run = project.run("fixed", train__steps=6, data__last_batch="pad", **layout)
    assert "differences of the loss" in of_kind(run, "gradient_check")[0]["compared"]
